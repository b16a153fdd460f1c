"""Attention in plain PyTorch: the specification that every other implementation is held to.

    out[i, h] = sum over visible j of softmax_j(scale * q[i, h] . k[j, g]) * v[j, g],     g = h // (H / Hkv)

A query at position p sees keys at positions j <= p (all of its sequence where not causal), and with a window those with
j > p - window. Everything is float32, rounded once at the end. A query that sees no key gives zeros.

Shapes: B sequences, S new tokens of all of them, L those of one, N keys of one, H query heads, Hkv heads of keys and
values, G = H / Hkv, D and Dv head sizes, P pages of a sequence at most.
"""

from __future__ import annotations

import itertools

import torch

from moe_kernels.attention.types import PagedPrefix

# Scores held at a time.
_SCORES = 2**26


def decode_reference(
    q_BHD: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table_BP: torch.Tensor,
    seq_lens_B: torch.Tensor,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Return ``[B, H, Dv]``; the query is the last token of its sequence."""
    out = q_BHD.new_zeros(*q_BHD.shape[:2], v_cache.shape[3])
    for b, length in enumerate(clamped(seq_lens_B, page_table_BP, k_cache)):
        if length:
            first = 0 if window is None else max(0, length - window)
            k_NHD, v_NHD = (gather(cache, page_table_BP[b], first, length) for cache in (k_cache, v_cache))
            out[b] = attend(q_BHD[b : b + 1], k_NHD, v_NHD, scale, None)[0]
    return out


def prefill_reference(
    q_SHD: torch.Tensor,
    k_SHD: torch.Tensor,
    v_SHD: torch.Tensor,
    cu_seqlens: torch.Tensor,
    scale: float,
    causal: bool,
    window: int | None,
    prefix: PagedPrefix | None,
) -> torch.Tensor:
    """Return ``[S, H, Dv]``; rows of no sequence are zero."""
    out = q_SHD.new_zeros(*q_SHD.shape[:2], v_SHD.shape[2])
    bounds = checked_bounds(cu_seqlens, q_SHD.shape[0])
    cached = [0] * (len(bounds) - 1)
    if prefix is not None:
        cached = clamped(prefix.prefix_lens_B, prefix.page_table_BP, prefix.k_cache)
    for b, (start, end) in enumerate(itertools.pairwise(bounds)):
        k_NHD, v_NHD = k_SHD[start:end], v_SHD[start:end]
        seen = cached[b] - first_seen(cached[b], window)
        if prefix is not None and seen:
            old = (prefix.page_table_BP[b], cached[b] - seen, cached[b])
            k_NHD = torch.cat([gather(prefix.k_cache, *old), k_NHD])
            v_NHD = torch.cat([gather(prefix.v_cache, *old), v_NHD])
        rows = max(1, _SCORES // max(1, len(k_NHD) * q_SHD.shape[1]))
        for first in range(start, end, rows):
            last = min(end, first + rows)
            mask = visible(last - first, len(k_NHD), seen + first - start, window, q_SHD.device) if causal else None
            out[first:last] = attend(q_SHD[first:last], k_NHD, v_NHD, scale, mask)
    return out


def attend(
    q_LHD: torch.Tensor, k_NHD: torch.Tensor, v_NHD: torch.Tensor, scale: float, mask_LN: torch.Tensor | None
) -> torch.Tensor:
    """Attention of one sequence, ``[L, H, Dv]`` in the dtype of ``q_LHD``; every query sees a key."""
    queries, heads, size = q_LHD.shape
    grouped = q_LHD.float().view(queries, k_NHD.shape[1], -1, size)
    scores = torch.einsum("lhgd,nhd->hgln", grouped, k_NHD.float()) * scale
    if mask_LN is not None:
        scores = scores.masked_fill(~mask_LN, float("-inf"))
    out = torch.einsum("hgln,nhd->lhgd", torch.softmax(scores, dim=-1), v_NHD.float())
    return out.reshape(queries, heads, -1).to(q_LHD.dtype)


def visible(queries: int, keys: int, position: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Which keys are seen by queries at ``position``, ``position + 1``, ...: bool ``[queries, keys]``.

    Example: 2 queries from position 2 on, 4 keys, window 2: ``[[0, 1, 1, 0], [0, 0, 1, 1]]``.
    """
    query = position + torch.arange(queries, device=device)[:, None]
    key = torch.arange(keys, device=device)[None, :]
    seen = key <= query
    return seen if window is None else seen & (key > query - window)


def first_seen(cached: int, window: int | None) -> int:
    """First slot of a prefix of ``cached`` that the first new token sees; pages before it may be given away."""
    return 0 if window is None else min(cached, max(0, cached - window + 1))


def gather(cache: torch.Tensor, pages_P: torch.Tensor, first: int, end: int) -> torch.Tensor:
    """Slots ``first`` to ``end - 1`` of a sequence, ``[end - first, Hkv, D]``; other slots and entries are not read."""
    page_size = cache.shape[1]
    begin = first // page_size
    pages = pages_P[begin : -(-end // page_size)].long()
    return cache[pages].flatten(0, 1)[first - begin * page_size : end - begin * page_size]


def clamped(lens_B: torch.Tensor, page_table_BP: torch.Tensor, cache: torch.Tensor) -> list[int]:
    """Lengths on the host, none below 0 or above what the page table holds."""
    most = page_table_BP.shape[1] * cache.shape[1]
    return [min(max(0, length), most) for length in lens_B.tolist()]


def checked_bounds(cu_seqlens: torch.Tensor, rows: int) -> list[int]:
    """Bounds of the sequences on the host; ValueError where they do not rise from 0 to ``rows`` at most."""
    bounds: list[int] = cu_seqlens.tolist()
    if bounds[0] != 0 or any(a > b for a, b in itertools.pairwise(bounds)) or bounds[-1] > rows:
        raise ValueError(f"cu_seqlens must start at 0 and rise to {rows}, the rows of q_SHD, at most; got {bounds}.")
    return bounds
