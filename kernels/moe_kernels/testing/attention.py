"""Paged caches with everything unused poisoned, and what attention over them must give.

Shapes: B sequences, S new tokens, H query heads, Hkv heads of keys and values, D and Dv head sizes, P pages, N keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

# What no kernel may use: entries of a page table past its sequence.
_NO_PAGES = (2**31 - 1, -1, -(2**31), 10**6)


class PagedCache(NamedTuple):
    """A cache of sequences whose keys and values are known.

    Attributes:
        k_cache: ``[num_pages, page_size, Hkv, D]``.
        v_cache: ``[num_pages, page_size, Hkv, Dv]``.
        page_table: int32 ``[B, P]``.
        lens: int32 ``[B]``.
        keys, values: of each sequence, ``[N, Hkv, D]`` and ``[N, Hkv, Dv]``.
    """

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    page_table: torch.Tensor
    lens: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]


def paged_cache(
    lens: Sequence[int],
    kv_heads: int,
    head_dim: int,
    v_head_dim: int,
    page_size: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    layout: str = "apart",
    seed: int = 0,
) -> PagedCache:
    """Seeded caches with pages dealt in a random order, unused slots NaN and infinite, unused entries no pages.

    Args:
        lens: keys of each sequence.
        layout: ``"apart"``; ``"interleaved"`` for views of one ``[num_pages, 2, page_size, Hkv, D]``; ``"heads_first"``
            for views of ``[num_pages, Hkv, page_size, D]``; ``"latent"`` for values that are the keys' first columns.
    """
    generator = torch.Generator().manual_seed(seed)
    pages = [-(-length // page_size) for length in lens]
    num_pages = sum(pages) + 2
    order = torch.randperm(num_pages, generator=generator).tolist()
    if layout == "interleaved":
        both = torch.empty(num_pages, 2, page_size, kv_heads, max(head_dim, v_head_dim), dtype=dtype)
        k_cache, v_cache = both[:, 0, ..., :head_dim], both[:, 1, ..., :v_head_dim]
    elif layout == "heads_first":
        k_cache = torch.empty(num_pages, kv_heads, page_size, head_dim, dtype=dtype).transpose(1, 2)
        v_cache = torch.empty(num_pages, kv_heads, page_size, v_head_dim, dtype=dtype).transpose(1, 2)
    else:
        k_cache = torch.empty(num_pages, page_size, kv_heads, head_dim, dtype=dtype)
        v_cache = torch.empty(num_pages, page_size, kv_heads, v_head_dim, dtype=dtype)
    k_cache.fill_(float("nan"))
    v_cache.fill_(float("nan"))
    k_cache[:, ::2], v_cache[:, ::2] = float("inf"), float("inf")
    if layout == "latent":
        v_cache = k_cache[..., :v_head_dim]
    width = max([1, *pages]) + 1
    table = torch.tensor(_NO_PAGES, dtype=torch.int32).repeat(width)[:width].repeat(len(lens), 1)
    keys, values = [], []
    for b, length in enumerate(lens):
        k = torch.randn(length, kv_heads, head_dim, generator=generator).to(dtype)
        v = torch.randn(length, kv_heads, v_head_dim, generator=generator).to(dtype)
        for p in range(pages[b]):
            page = order.pop()
            table[b, p] = page
            count = min(page_size, length - p * page_size)
            if layout != "latent":
                v_cache[page, :count] = v[p * page_size : p * page_size + count]
            k_cache[page, :count] = k[p * page_size : p * page_size + count]
        keys.append(k.to(device))
        values.append(keys[-1][..., :v_head_dim] if layout == "latent" else v.to(device))
    moved = _to(k_cache, device)
    v_moved = moved[..., :v_head_dim] if layout == "latent" else _to(v_cache, device)
    return PagedCache(
        moved, v_moved, table.to(device), torch.tensor(lens, dtype=torch.int32, device=device), keys, values
    )


def _to(cache: torch.Tensor, device: str) -> torch.Tensor:
    """A copy elsewhere with the same strides, which ``to`` gives to dense tensors alone; unused memory is NaN."""
    if device == "cpu":
        return cache
    extent = 1 + sum((size - 1) * stride for size, stride in zip(cache.shape, cache.stride(), strict=True))
    moved = torch.full((extent,), float("nan"), dtype=cache.dtype, device=device).as_strided(
        cache.shape, cache.stride()
    )
    return moved.copy_(cache)


def attention_oracle(
    q_LHD: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    *,
    causal: bool = True,
    window: int | None = None,
) -> torch.Tensor:
    """Float64 ``[L, H, Dv]`` of one sequence whose last L positions are the queries, head by head.

    Args:
        q_LHD: ``[L, H, D]``.
        keys, values: ``[N, Hkv, D]`` and ``[N, Hkv, Dv]``, N >= L.
    """
    queries, heads, _ = q_LHD.shape
    count = len(keys)
    out = torch.zeros(queries, heads, values.shape[2], dtype=torch.float64, device=q_LHD.device)
    position = torch.arange(count - queries, count, device=q_LHD.device)[:, None]
    key = torch.arange(count, device=q_LHD.device)[None, :]
    hidden = (key > position) if causal else torch.zeros(queries, count, dtype=torch.bool, device=q_LHD.device)
    if window is not None:
        hidden = hidden | (key <= position - window)
    for head in range(heads):
        group = head * keys.shape[1] // heads
        scores = scale * (q_LHD[:, head].double() @ keys[:, group].double().T)
        weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)
        out[:, head] = weights @ values[:, group].double()
    return out


def decode_oracle(q_BHD: torch.Tensor, cache: PagedCache, scale: float, *, window: int | None = None) -> torch.Tensor:
    """Float64 ``[B, H, Dv]``; zeros for a sequence without keys."""
    out = torch.zeros(*q_BHD.shape[:2], cache.v_cache.shape[3], dtype=torch.float64, device=q_BHD.device)
    for b, (keys, values) in enumerate(zip(cache.keys, cache.values, strict=True)):
        if len(keys):
            out[b] = attention_oracle(q_BHD[b : b + 1], keys, values, scale, window=window)[0]
    return out
