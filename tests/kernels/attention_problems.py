"""Paged problems of odd sizes for attention, and the plain formula in float64."""

from __future__ import annotations

import itertools
import math

import torch
from moe_kernels.testing.attention import PagedCache, attention_oracle

BOUND = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


def paged(
    lens: list[int], kv_heads: int, size: int, v_size: int, page: int, dtype: torch.dtype, *, latent: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Caches whose unused slots hold NaN or infinity, a page table of scattered pages, and lengths.

    With `latent` the values are a view of the keys' first columns.
    """
    make = torch.Generator().manual_seed(11)
    columns = max(1, -(-max(lens) // page))
    pages = len(lens) * columns + 2
    k = torch.randn(pages, page, kv_heads, size, generator=make).to(dtype)
    v = k[..., :v_size] if latent else torch.randn(pages, page, kv_heads, v_size, generator=make).to(dtype)
    table = torch.randperm(pages, generator=make)[: len(lens) * columns].reshape(len(lens), columns).to(torch.int32)
    used = torch.zeros(pages, page, dtype=torch.bool)
    for row, length in zip(table.tolist(), lens, strict=True):
        for slot in range(length):
            used[row[slot // page], slot % page] = True
    k[~used] = float("nan")
    if not latent:
        v[~used] = float("inf")
    return k, v, table, torch.tensor(lens, dtype=torch.int32)


def plain(q_HD: torch.Tensor, k_NGD: torch.Tensor, v_NGD: torch.Tensor, scale: float) -> torch.Tensor:
    """One query over N keys of G heads, in float64."""
    group = q_HD.shape[0] // k_NGD.shape[1]
    out = []
    for head in range(q_HD.shape[0]):
        keys, values = k_NGD[:, head // group].double(), v_NGD[:, head // group].double()
        weights = torch.softmax(keys @ q_HD[head].double() * scale, 0)
        out.append(weights @ values)
    return torch.stack(out)


def gathered(cache: torch.Tensor, row: torch.Tensor, length: int) -> torch.Tensor:
    """The first `length` slots of a sequence."""
    page = cache.shape[1]
    return torch.stack([cache[int(row[slot // page]), slot % page] for slot in range(length)])


def expected_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    table: torch.Tensor,
    lens: torch.Tensor,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Decode attention by the formula, `[B, H, Dv]` float64; zeros for a sequence of no keys."""
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[3], dtype=torch.float64)
    for b, length in enumerate(lens.tolist()):
        if length:
            first = max(0, length - window) if window else 0
            out[b] = plain(q[b], gathered(k, table[b], length)[first:], gathered(v, table[b], length)[first:], scale)
    return out


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """L2 of the difference over L2 of what is expected; infinite where NaN is met."""
    error = float((got.double() - expected).norm() / expected.norm())
    return math.inf if math.isnan(error) else error


def expected_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bounds: torch.Tensor,
    scale: float,
    cache: PagedCache | None = None,
    *,
    causal: bool = True,
    window: int | None = None,
) -> torch.Tensor:
    """Prefill attention by the formula, `[S, H, Dv]` float64; zeros for rows of no sequence."""
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[2], dtype=torch.float64, device=q.device)
    for b, (first, end) in enumerate(itertools.pairwise(bounds.tolist())):
        keys, values = k[first:end], v[first:end]
        if cache is not None:
            keys, values = torch.cat([cache.keys[b], keys]), torch.cat([cache.values[b], values])
        if end > first:
            out[first:end] = attention_oracle(q[first:end], keys, values, scale, causal=causal, window=window)
    return out
