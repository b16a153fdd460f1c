"""Attention by ``torch.nn.functional.scaled_dot_product_attention``, which knows neither pages nor lengths.

Cached keys and values are gathered into new memory and slots outside a sequence are zeroed, so that nothing in them
reaches a sum. Decode gathers as many pages as the page table is wide, for every sequence, and reads nothing on the
host. Prefill reads lengths on the host: sequences of one length go in one call, others one after another; a window or
a prefix needs a mask ``[L, N]``, with which torch repeats the keys of a group for each of its heads.

Shapes: B sequences, S new tokens of all of them, L those of one, N keys of one, H query heads, Hkv heads of keys and
values, G = H / Hkv, D and Dv head sizes, P pages of a sequence at most.
"""

from __future__ import annotations

import itertools

import torch
from torch.nn.functional import scaled_dot_product_attention

from moe_kernels.attention.reference import checked_bounds, clamped, first_seen, gather, visible
from moe_kernels.attention.types import PagedPrefix


def decode_sdpa(
    q_BHD: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table_BP: torch.Tensor,
    seq_lens_B: torch.Tensor,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Return ``[B, H, Dv]``; the heads of a group are the rows of one query."""
    (batch, heads, size), (_, page_size, kv_heads, v_size) = q_BHD.shape, v_cache.shape
    pages = page_table_BP.shape[1]
    if batch == 0 or pages == 0:
        return q_BHD.new_zeros(batch, heads, v_size)
    end = seq_lens_B.clamp(0, pages * page_size)[:, None]
    begin = (end - window).clamp_min(0) if window is not None else torch.zeros_like(end)
    page_start = torch.arange(pages, device=q_BHD.device) * page_size
    table = torch.where((page_start < end) & (page_start + page_size > begin), page_table_BP, 0).long()
    slot = torch.arange(pages * page_size, device=q_BHD.device)
    mask_BN = (slot >= begin) & (slot < end)
    k_BHND = _gathered(k_cache, table, mask_BN)
    v_BHND = k_BHND[..., :v_size] if is_front(v_cache, k_cache) else _gathered(v_cache, table, mask_BN)
    out = scaled_dot_product_attention(
        q_BHD.reshape(batch, kv_heads, -1, size), k_BHND, v_BHND, attn_mask=mask_BN[:, None, None], scale=scale
    )
    return out.reshape(batch, heads, v_size).masked_fill((end == 0)[:, None], 0.0)


def _gathered(cache: torch.Tensor, table_BP: torch.Tensor, mask_BN: torch.Tensor) -> torch.Tensor:
    """``[B, Hkv, N, D]``, zero where ``mask_BN`` is not set."""
    return cache[table_BP].flatten(1, 2).masked_fill(~mask_BN[..., None, None], 0.0).transpose(1, 2)


def is_front(v: torch.Tensor, k: torch.Tensor) -> bool:
    """Whether values are the first columns of the keys, in the same memory."""
    same = v.untyped_storage()._cdata == k.untyped_storage()._cdata and v.storage_offset() == k.storage_offset()
    return same and v.stride() == k.stride() and v.shape[-1] <= k.shape[-1]


def prefill_sdpa(
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
    bounds = checked_bounds(cu_seqlens, q_SHD.shape[0])
    lens = [end - start for start, end in itertools.pairwise(bounds)]
    cached = [0] * len(lens)
    if prefix is not None:
        cached = clamped(prefix.prefix_lens_B, prefix.page_table_BP, prefix.k_cache)
    out = q_SHD.new_zeros(*q_SHD.shape[:2], v_SHD.shape[2])
    alike = len(set(zip(lens, cached, strict=True))) == 1
    for b, count in [(0, len(lens))] if alike else [(b, 1) for b in range(len(lens))]:
        start, end = bounds[b], bounds[b + count]
        if start == end:
            continue
        q, k, v = (x[start:end].unflatten(0, (count, -1)) for x in (q_SHD, k_SHD, v_SHD))
        first = first_seen(cached[b], window)
        if prefix is not None and first < cached[b]:
            k, v = (
                torch.cat([_prefix(cache, prefix.page_table_BP[b : b + count], first, cached[b]), new], dim=1)
                for cache, new in ((prefix.k_cache, k), (prefix.v_cache, v))
            )
        out[start:end] = _attend(q, k, v, scale, causal, window).flatten(0, 1)
    return out


def _prefix(cache: torch.Tensor, table_BP: torch.Tensor, first: int, end: int) -> torch.Tensor:
    """Slots ``first`` to ``end - 1`` of sequences, ``[B, end - first, Hkv, D]``."""
    return torch.stack([gather(cache, pages, first, end) for pages in table_BP])


def _attend(
    q_BLHD: torch.Tensor, k_BNHD: torch.Tensor, v_BNHD: torch.Tensor, scale: float, causal: bool, window: int | None
) -> torch.Tensor:
    """Sequences of one length each, ``[B, L, H, Dv]``."""
    queries, keys = q_BLHD.shape[1], k_BNHD.shape[1]
    mask = None
    if causal and (queries != keys or window is not None):
        mask = visible(queries, keys, keys - queries, window, q_BLHD.device)
    q, k, v = (x.transpose(1, 2) for x in (q_BLHD, k_BNHD, v_BNHD))
    # torch's fast kernels on CUDA know groups, but neither with a mask nor where head sizes differ.
    group = q.shape[1] // k.shape[1]
    grouped = group > 1 and q.is_cuda and mask is None and q.shape[-1] == v.shape[-1]
    if group > 1 and not grouped:
        k, v = (x[:, :, None].expand(-1, -1, group, -1, -1).flatten(1, 2) for x in (k, v))
    is_causal = causal and mask is None
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=grouped)
    return out.transpose(1, 2)
