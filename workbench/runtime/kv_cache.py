"""Keys and values of a network's tokens, kept in pages.

Shapes: S rows, B sequences, P pages of a sequence, N pages in all, L latent and shared key.
"""

from __future__ import annotations

from typing import Protocol

import torch

from workbench.errors import InvalidInput, choices
from workbench.models.network.shapes import MLA_FORMS, NetworkConfig


class Served(Protocol):
    """What a cache must know of a network."""

    @property
    def config(self) -> NetworkConfig: ...

    @property
    def mla_decode(self) -> str: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...


class LayerCache:
    """One layer's pages: keys and values of every head, or one latent a token.

    Attributes:
        k: `[N, page_size, heads, head size]`; of a latent cache `[N, page_size, 1, L]`.
        v: `[N, page_size, heads, value size]`; of a latent cache the latent without the shared key, a view.
        latent: `[N, page_size, L]`; None where keys and values are kept.
    """

    def __init__(self, k: torch.Tensor, v: torch.Tensor, latent: torch.Tensor | None = None) -> None:
        self.k, self.v, self.latent = k, v, latent

    def write(self, k: torch.Tensor, v: torch.Tensor | None, slots_S: torch.Tensor) -> None:
        """Keep these rows at `page * page_size + offset`.

        Args:
            k: `[S, heads, head size]`, or a latent `[S, L]`.
            v: `[S, heads, value size]`; None beside a latent.
            slots_S: int64, no slot twice.
        """
        if self.latent is not None:
            self.latent.flatten(0, 1).index_copy_(0, slots_S, k.to(self.latent.dtype))
            return
        assert v is not None
        self.k.flatten(0, 1).index_copy_(0, slots_S, k.to(self.k.dtype))
        self.v.flatten(0, 1).index_copy_(0, slots_S, v.to(self.v.dtype))

    @property
    def nbytes(self) -> int:
        """Bytes that the pages take."""
        return self.latent.nbytes if self.latent is not None else self.k.nbytes + self.v.nbytes

    def upcast(self) -> LayerCache:
        """A copy in float32, of the same pages."""
        if self.latent is not None:
            return _latent_cache(self.latent.to(torch.float32, copy=True), self.v.shape[-1])
        return LayerCache(self.k.to(torch.float32, copy=True), self.v.to(torch.float32, copy=True))

    def fill(self, value: float) -> None:
        """Overwrite everything."""
        for tensor in (self.k, self.v) if self.latent is None else (self.latent,):
            tensor.fill_(value)


class KVCache:
    """Pages for `batch_size` sequences of up to `max_len` tokens, in every layer of one rank.

    Pages are dealt in turn and from the last one down, so that no sequence's pages lie in order and a wrong page table
    shows: with 2 sequences of 3 pages, sequence 0 has pages 5, 3, 1 and sequence 1 has 4, 2, 0.

    Attributes:
        batch_size: sequences.
        max_len: tokens of each.
        page_size: tokens of a page.
        page_table: int32 `[B, P]`.
        layers: one `LayerCache` a layer.
    """

    def __init__(
        self,
        config: NetworkConfig,
        batch_size: int,
        max_len: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        mla_decode: str = "absorbed",
    ) -> None:
        """Allocate all pages; what they hold at first is undefined.

        Args:
            config: says what a token's keys and values are.
            batch_size, max_len, page_size: at least 1.
            dtype: of keys and values: that of the network's activations.
            device: of the network.
            mla_decode: `absorbed` keeps the latent, `expanded` every head's keys and values; without latent
                attention it is not read.

        Raises:
            InvalidInput: a size below 1, or another `mla_decode`.
        """
        for name, value in (("batch_size", batch_size), ("max_len", max_len), ("page_size", page_size)):
            if value < 1:
                raise InvalidInput(f"{name}: must be at least 1, not {value}")
        if mla_decode not in MLA_FORMS:
            raise InvalidInput(f"mla_decode: must be {choices(MLA_FORMS)}, not {mla_decode!r}")
        self.batch_size, self.max_len, self.page_size = batch_size, max_len, page_size
        pages = -(-max_len // page_size)
        total = pages * batch_size
        dealt = torch.arange(total - 1, -1, -1, dtype=torch.int32).view(pages, batch_size)
        self.page_table = dealt.T.contiguous().to(device)
        mla = config.mla
        self.layers: list[LayerCache] = []
        for _ in range(config.num_layers):
            if mla is not None and mla_decode == "absorbed":
                latent = torch.empty(total, page_size, mla.latent_dim, dtype=dtype, device=device)
                self.layers.append(_latent_cache(latent, mla.kv_lora_rank))
                continue
            heads = config.rank_kv_heads
            k = torch.empty(total, page_size, heads, config.head_dim, dtype=dtype, device=device)
            v = torch.empty(total, page_size, heads, config.value_dim, dtype=dtype, device=device)
            self.layers.append(LayerCache(k, v))

    @classmethod
    def for_network(cls, network: Served, batch_size: int, max_len: int, page_size: int) -> KVCache:
        """A cache with the layout, dtype and device that `network` writes; errors as above."""
        return cls(
            network.config,
            batch_size,
            max_len,
            page_size,
            network.dtype,
            network.device,
            mla_decode=network.mla_decode,
        )

    @property
    def nbytes(self) -> int:
        """Bytes that all pages take."""
        return sum(layer.nbytes for layer in self.layers)

    def reset(self) -> None:
        """Forget everything: all pages become NaN, so that reading what was not written since shows."""
        for layer in self.layers:
            layer.fill(float("nan"))


def _latent_cache(latent: torch.Tensor, rank: int) -> LayerCache:
    k = latent.unsqueeze(2)
    return LayerCache(k, k[..., :rank], latent)
