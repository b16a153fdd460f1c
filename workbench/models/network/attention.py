"""Attention with plain heads: grouped queries, biases, normed heads and a sliding window where the model has them.

Shapes: S rows, D model, H query heads, G key and value heads, C head size.
"""

from __future__ import annotations

import torch
from moe_kernels import PagedPrefix, decode_attention, prefill_attention
from moe_kernels.step.turn import turn_and_write
from torch import nn

from workbench.models.network.batch import DECODE, Batch, LayerCache
from workbench.models.network.linear import Linear
from workbench.models.network.norm import RMSNorm
from workbench.models.network.rope import Turn, turned


class Attention(nn.Module):
    """One rank's heads.

    Attributes:
        qkv: rows of all queries, then keys, then values: `[(H + 2 G) C, D]`.
        out: `[D, H C]`.
        q_norm, k_norm: norms of every head; None for none.
        heads, kv_heads, head_dim: H, G and C.
        window: keys that a query sees, itself counted; None for all.
        impl: attention backend.
        fused: whether heads are normed, turned and kept in one kernel.
        part: of the network, for profiles.
    """

    part = "attention"
    fused = False

    def __init__(
        self,
        qkv: Linear,
        out: Linear,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
        window: int | None = None,
        impl: str | None = None,
    ) -> None:
        super().__init__()
        self.qkv, self.out = qkv, out
        self.q_norm, self.k_norm = q_norm, k_norm
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.window = window
        self.impl = impl

    def forward(self, x_SD: torch.Tensor, batch: Batch, cache: LayerCache, turn: Turn) -> torch.Tensor:
        """Return `[S, D]`: a rank's share of the sum. Keys and values of the rows are kept in `cache`."""
        heads, kept = self.heads, self.kv_heads
        if self.fused:
            q_SHC, k_SGC, v_SGC = self._turned_and_written(self.qkv(x_SD), batch, cache, turn)
            return self._mixed(q_SHC, k_SGC, v_SGC, batch, cache)
        qkv = self.qkv(x_SD).unflatten(-1, (heads + 2 * kept, self.head_dim))
        v_SGC = qkv[:, heads + kept :]
        if self.q_norm is None or self.k_norm is None:
            both = turned(qkv[:, : heads + kept], turn)
            q_SHC, k_SGC = both[:, :heads], both[:, heads:]
        else:
            q_SHC = turned(self.q_norm(qkv[:, :heads]), turn)
            k_SGC = turned(self.k_norm(qkv[:, heads : heads + kept]), turn)
        cache.write(k_SGC, v_SGC, batch.slots_S)
        return self._mixed(q_SHC, k_SGC, v_SGC, batch, cache)

    def _turned_and_written(
        self, qkv_SN: torch.Tensor, batch: Batch, cache: LayerCache, turn: Turn
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q_norm, k_norm = self.q_norm, self.k_norm
        return turn_and_write(
            qkv_SN,
            turn,
            cache.k,
            cache.v,
            batch.slots_S,
            heads=self.heads,
            kv_heads=self.kv_heads,
            q_norm=None if q_norm is None else q_norm.weight,
            k_norm=None if k_norm is None else k_norm.weight,
            eps=0.0 if q_norm is None else q_norm.eps,
        )

    def _mixed(
        self, q_SHC: torch.Tensor, k_SGC: torch.Tensor, v_SGC: torch.Tensor, batch: Batch, cache: LayerCache
    ) -> torch.Tensor:
        scale = self.head_dim**-0.5
        if batch.kind == DECODE:
            mixed = decode_attention(
                q_SHC,
                cache.k,
                cache.v,
                batch.page_table_BP,
                batch.seq_lens_B,
                scale=scale,
                window=self.window,
                impl=self.impl,
            )
        else:
            prefix = None
            if batch.prefix_lens_B is not None:
                prefix = PagedPrefix(cache.k, cache.v, batch.page_table_BP, batch.prefix_lens_B)
            mixed = prefill_attention(
                q_SHC, k_SGC, v_SGC, batch.cu_seqlens, scale=scale, window=self.window, prefix=prefix, impl=self.impl
            )
        out_SD: torch.Tensor = self.out(mixed.flatten(1))
        return out_SD

    def upcast(self) -> Attention:
        """The same in float32 by the reference; it holds the same weights."""
        return Attention(
            self.qkv.upcast(),
            self.out.upcast(),
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            q_norm=None if self.q_norm is None else self.q_norm.upcast(),
            k_norm=None if self.k_norm is None else self.k_norm.upcast(),
            window=self.window,
            impl="reference",
        )
