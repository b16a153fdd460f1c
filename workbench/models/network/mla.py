"""Multi-head latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434), absorbed and expanded.

A token's keys and values of all heads come from one latent c and one shared key with position:

    k[h] = (w_uk[h] . c, k_rope)      v[h] = w_uv[h] . c

Expanded, they are made for every head. Absorbed, `q . (w_uk c) = (w_uk^T q) . c`: queries are brought to the latent,
which all heads then read as one key, and as value its part without k_rope; `w_uv` follows after.

Shapes: S rows, B sequences, P pages of a sequence, D model, H heads, N and R parts of a head without and with position,
V value of a head, C latent, L = C + R.
"""

from __future__ import annotations

import torch
from moe_kernels import PagedPrefix, decode_attention, mla_decode_attention, prefill_attention
from moe_kernels.step.heads import absorb_queries, expand_values
from moe_kernels.step.turn import latent_turn_and_write
from torch import nn

from workbench.errors import InvalidInput
from workbench.models.network.batch import DECODE, Batch, LayerCache
from workbench.models.network.linear import Linear
from workbench.models.network.norm import RMSNorm
from workbench.models.network.rope import Turn, turned
from workbench.models.network.shapes import MLAConfig


class LatentAttention(nn.Module):
    """One rank's heads.

    Attributes:
        down: rows of the query (whole, or its low rank), then of the latent, then of the shared key.
        q_norm, q_up: norm and projection of a low-rank query; None where `down` makes it whole.
        kv_norm: of the latent.
        kv_up: rows of each head's key, then value: `[H (N + V), C]`.
        out: `[D, H V]`.
        prefill, decode: `absorbed` or `expanded`. Absorbed decode keeps the latent in its cache, expanded decode keys
            and values of every head; prefill writes what decode reads.
        scale: of the scores.
        impl: attention backend.
        fused: whether absorbed decode norms, turns and keeps the latent in one kernel, and has one for each product
            with a matrix of every head.
        part: of the network, for profiles.
    """

    part = "attention"
    fused = False

    def __init__(
        self,
        down: Linear,
        kv_norm: RMSNorm,
        kv_up: Linear,
        out: Linear,
        *,
        mla: MLAConfig,
        heads: int,
        scale: float,
        prefill: str,
        decode: str,
        q_norm: RMSNorm | None = None,
        q_up: Linear | None = None,
        impl: str | None = None,
    ) -> None:
        super().__init__()
        self.down, self.q_norm, self.q_up = down, q_norm, q_up
        self.kv_norm, self.kv_up, self.out = kv_norm, kv_up, out
        self.mla, self.heads, self.scale = mla, heads, scale
        self.prefill, self.decode = prefill, decode
        self.impl = impl
        self.w_uk_HNC: torch.Tensor | None = None
        self.w_uv_HVC: torch.Tensor | None = None
        if "absorbed" in (prefill, decode) and not kv_up.exact:
            self.w_uk_HNC, self.w_uv_HVC = self._per_head()

    def forward(self, x_SD: torch.Tensor, batch: Batch, cache: LayerCache, turn: Turn) -> torch.Tensor:
        """Return `[S, D]`: a rank's share of the sum. What decode reads of the rows is kept in `cache`.

        Raises:
            InvalidInput: absorbed prefill over a prefix that is kept expanded, which no longer has its latent.
        """
        mla = self.mla
        if self.fused and batch.kind == DECODE and self.decode == "absorbed":
            return self._fused_decode(x_SD, batch, cache, turn)
        q, latent_SC, k_rope_SR = self.down(x_SD).split(
            [self.down.weights.N - mla.latent_dim, mla.kv_lora_rank, mla.qk_rope_head_dim], dim=-1
        )
        if self.q_norm is not None and self.q_up is not None:
            q = self.q_up(self.q_norm(q))
        q_nope_SHN, q_rope_SHR = q.unflatten(-1, (self.heads, mla.qk_head_dim)).split(
            [mla.qk_nope_head_dim, mla.qk_rope_head_dim], dim=-1
        )
        both = turned(torch.cat((q_rope_SHR, k_rope_SR[:, None]), 1), turn)
        q_rope_SHR, k_rope_S1R = both[:, : self.heads], both[:, self.heads :]
        latent_SC = self.kv_norm(latent_SC)
        keys: tuple[torch.Tensor, torch.Tensor] | None = None
        form = self.decode if batch.kind == DECODE else self.prefill
        if form == "expanded" or self.decode == "expanded":
            keys = self._expanded(latent_SC, k_rope_S1R)
        latent_SL = torch.cat((latent_SC, k_rope_S1R[:, 0]), -1) if "absorbed" in (form, self.decode) else None
        if self.decode == "absorbed":
            assert latent_SL is not None
            cache.write(latent_SL, None, batch.slots_S)
        else:
            assert keys is not None
            cache.write(*keys, batch.slots_S)
        if form == "absorbed":
            assert latent_SL is not None
            mixed_SHV = self._absorbed(q_nope_SHN, q_rope_SHR, latent_SL, batch, cache)
        else:
            assert keys is not None
            mixed_SHV = self._plain(torch.cat((q_nope_SHN, q_rope_SHR), -1), *keys, batch, cache)
        out_SD: torch.Tensor = self.out(mixed_SHV.flatten(1))
        return out_SD

    def _fused_decode(self, x_SD: torch.Tensor, batch: Batch, cache: LayerCache, turn: Turn) -> torch.Tensor:
        mla = self.mla
        assert cache.latent is not None
        assert self.w_uk_HNC is not None
        assert self.w_uv_HVC is not None
        down_SN, q_SM = self.down(x_SD), None
        if self.q_norm is not None and self.q_up is not None:
            q_SM = self.q_up(self.q_norm(down_SN[:, : self.down.weights.N - mla.latent_dim]))
        q_nope_SHN, q_SHL, _ = latent_turn_and_write(
            down_SN,
            turn,
            cache.latent,
            batch.slots_S,
            heads=self.heads,
            nope_dim=mla.qk_nope_head_dim,
            kv_norm=self.kv_norm.weight,
            eps=self.kv_norm.eps,
            q_SM=q_SM,
        )
        absorb_queries(q_nope_SHN, self.w_uk_HNC, q_SHL[..., : mla.kv_lora_rank])
        mixed_SHC = mla_decode_attention(
            q_SHL,
            cache.latent,
            batch.page_table_BP,
            batch.seq_lens_B,
            kv_lora_rank=mla.kv_lora_rank,
            scale=self.scale,
            impl=self.impl,
        )
        out_SD: torch.Tensor = self.out(expand_values(mixed_SHC, self.w_uv_HVC).flatten(1))
        return out_SD

    def _absorbed(
        self,
        q_nope_SHN: torch.Tensor,
        q_rope_SHR: torch.Tensor,
        latent_SL: torch.Tensor,
        batch: Batch,
        cache: LayerCache,
    ) -> torch.Tensor:
        """`[S, H, V]` by way of the latent."""
        rank = self.mla.kv_lora_rank
        if self.w_uk_HNC is None or self.w_uv_HVC is None:
            w_uk_HNC, w_uv_HVC = self._per_head()
        else:
            w_uk_HNC, w_uv_HVC = self.w_uk_HNC, self.w_uv_HVC
        q_SHC = torch.bmm(q_nope_SHN.transpose(0, 1), w_uk_HNC).transpose(0, 1)
        q_SHL = torch.cat((q_SHC, q_rope_SHR), -1)
        if batch.kind == DECODE:
            assert cache.latent is not None
            mixed_SHC = mla_decode_attention(
                q_SHL,
                cache.latent,
                batch.page_table_BP,
                batch.seq_lens_B,
                kv_lora_rank=rank,
                scale=self.scale,
                impl=self.impl,
            )
        else:
            prefix = None
            if batch.prefix_lens_B is not None:
                if cache.latent is None:
                    raise InvalidInput(
                        "mla_prefill: absorbed cannot read a prefix that mla_decode expanded keeps; expanded is "
                        "allowed, as is mla_decode absorbed"
                    )
                prefix = PagedPrefix(cache.k, cache.v, batch.page_table_BP, batch.prefix_lens_B)
            k_S1L = latent_SL[:, None]
            mixed_SHC = prefill_attention(
                q_SHL, k_S1L, k_S1L[..., :rank], batch.cu_seqlens, scale=self.scale, prefix=prefix, impl=self.impl
            )
        return torch.bmm(mixed_SHC.transpose(0, 1), w_uv_HVC.transpose(1, 2)).transpose(0, 1)

    def _plain(
        self, q_SHK: torch.Tensor, k_SHK: torch.Tensor, v_SHV: torch.Tensor, batch: Batch, cache: LayerCache
    ) -> torch.Tensor:
        """`[S, H, V]` by every head's own keys and values."""
        if batch.kind == DECODE:
            return decode_attention(
                q_SHK, cache.k, cache.v, batch.page_table_BP, batch.seq_lens_B, scale=self.scale, impl=self.impl
            )
        prefix = None
        if batch.prefix_lens_B is not None:
            prefix = (
                PagedPrefix(cache.k, cache.v, batch.page_table_BP, batch.prefix_lens_B)
                if cache.latent is None
                else self._expanded_prefix(cache.latent, batch, batch.prefix_lens_B)
            )
        return prefill_attention(q_SHK, k_SHK, v_SHV, batch.cu_seqlens, scale=self.scale, prefix=prefix, impl=self.impl)

    def _expanded(self, latent_SC: torch.Tensor, k_rope_S1R: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys `[S, H, N + R]` and values `[S, H, V]` of every head; values are a view."""
        mla = self.mla
        k_nope_SHN, v_SHV = (
            self.kv_up(latent_SC)
            .unflatten(-1, (self.heads, mla.qk_nope_head_dim + mla.v_head_dim))
            .split([mla.qk_nope_head_dim, mla.v_head_dim], dim=-1)
        )
        return torch.cat((k_nope_SHN, k_rope_S1R.expand(-1, self.heads, -1)), -1), v_SHV

    def _expanded_prefix(self, latent: torch.Tensor, batch: Batch, prefix_lens_B: torch.Tensor) -> PagedPrefix:
        """Pages of keys and values made of the prefixes' latents, one sequence's after another's."""
        count, page_size = batch.page_table_BP.shape[0], latent.shape[1]
        pages = -(-batch.max_prefix // page_size)
        found = latent[batch.page_table_BP[:, :pages].to(torch.int64)].flatten(1, 2)
        # Slots past a prefix may hold anything, which a scale for all rows would feel.
        held = torch.arange(pages * page_size, device=latent.device) < prefix_lens_B[:, None]
        rows_TL = torch.where(held[:, :, None], found, 0.0).flatten(0, 1)
        latent_TC, k_rope_TR = rows_TL.split([self.mla.kv_lora_rank, self.mla.qk_rope_head_dim], dim=-1)
        k, v = self._expanded(latent_TC.contiguous(), k_rope_TR[:, None])
        table = torch.arange(count * pages, dtype=torch.int32, device=latent.device).view(count, pages)
        return PagedPrefix(
            k.unflatten(0, (count * pages, page_size)),
            v.unflatten(0, (count * pages, page_size)),
            table,
            prefix_lens_B,
        )

    def _per_head(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`w_uk` `[H, N, C]` and `w_uv` `[H, V, C]`: views of plain weights, else what the stored format holds."""
        weights = self.kv_up.weights
        whole = weights.dequantize() if self.kv_up.exact or weights.scale is not None else weights.w
        if not self.kv_up.exact:
            whole = whole.to(weights.dtype)
        w_uk_HNC, w_uv_HVC = whole.unflatten(0, (self.heads, -1)).split(
            [self.mla.qk_nope_head_dim, self.mla.v_head_dim], dim=1
        )
        return w_uk_HNC, w_uv_HVC

    def tensors(self) -> list[torch.Tensor]:
        """What it holds beside its parts."""
        return [w for w in (self.w_uk_HNC, self.w_uv_HVC) if w is not None]

    def upcast(self) -> LatentAttention:
        """The same in float32 by the reference; it holds the same weights."""
        return LatentAttention(
            self.down.upcast(),
            self.kv_norm.upcast(),
            self.kv_up.upcast(),
            self.out.upcast(),
            mla=self.mla,
            heads=self.heads,
            scale=self.scale,
            prefill=self.prefill,
            decode=self.decode,
            q_norm=None if self.q_norm is None else self.q_norm.upcast(),
            q_up=None if self.q_up is None else self.q_up.upcast(),
            impl="reference",
        )
