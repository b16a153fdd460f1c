"""Triton prefill attention under the interpreter; run by test_attention in a process of its own."""

from __future__ import annotations

import pytest
import torch
from attention_problems import BOUND, expected_prefill, relative_error
from moe_kernels import PagedPrefix, prefill_attention
from moe_kernels.attention import ops
from moe_kernels.attention.tiles import PrefillTiles
from moe_kernels.testing.attention import paged_cache

SMALL = PrefillTiles(block_m=16, block_n=16, num_warps=4, num_stages=1, pack=4)


def problem(new, before, heads, kv_heads, size, v_size, page, *, layout="apart", dtype=torch.float32, unused=0):
    """(q, k, v, bounds, prefix, cache) with NaN in rows of no sequence."""
    make = torch.Generator().manual_seed(5)
    rows = sum(new)
    q = torch.randn(rows + unused, heads, size, generator=make)
    k = torch.randn(rows + unused, kv_heads, size, generator=make)
    v = k[..., :v_size] if layout == "latent" else torch.randn(rows + unused, kv_heads, v_size, generator=make)
    for tensor in (q, k, v):
        tensor[rows:] = float("nan")
    q, k = q.to(dtype), k.to(dtype)
    v = k[..., :v_size] if layout == "latent" else v.to(dtype)
    bounds = torch.tensor([0, *new], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    if before is None:
        return q, k, v, bounds, None, None
    cache = paged_cache(before, kv_heads, size, v_size, page, dtype=dtype, layout=layout)
    return q, k, v, bounds, PagedPrefix(*cache[:4]), cache


@pytest.mark.parametrize(
    ("new", "before", "heads", "kv_heads", "size", "v_size", "page", "layout", "window"),
    [
        ([5, 0, 19], [7, 4, 0], 6, 6, 192, 128, 3, "apart", None),
        ([17, 1], None, 7, 1, 80, 80, 0, "apart", 6),
        ([18, 3], [70, 33], 4, 2, 96, 96, 16, "interleaved", 20),
        ([4, 9], [40, 5], 5, 1, 40, 40, 64, "heads_first", None),
        ([3, 18], [21, 9], 2, 1, 72, 64, 8, "apart", 6),
    ],
)
def test_prefill_is_the_formula(new, before, heads, kv_heads, size, v_size, page, layout, window):
    q, k, v, bounds, prefix, cache = problem(new, before, heads, kv_heads, size, v_size, page, layout=layout, unused=2)
    expected = expected_prefill(q, k, v, bounds, 0.1, cache, window=window)
    got = prefill_attention(q, k, v, bounds, scale=0.1, window=window, prefix=prefix, impl="triton")
    assert relative_error(got, expected) < BOUND[torch.float32]
    assert not got[sum(new) :].any()
    # Tiles that are small beside the problem: several blocks a sequence and several tiles a block.
    small = ops.prefill_attention(
        q, k, v, bounds, scale=0.1, causal=True, window=window, prefix=prefix, impl="triton", config=SMALL.as_ints
    )
    assert relative_error(small, expected) < BOUND[torch.float32]


@pytest.mark.parametrize("rank", [512, 256])
def test_latent_prefill_reads_values_from_the_keys(rank):
    q, k, v, bounds, prefix, cache = problem([3, 6], [9, 0], 3, 1, rank + 64, rank, 4, layout="latent")
    got = prefill_attention(q, k, v, bounds, scale=0.07, prefix=prefix, impl="triton")
    assert relative_error(got, expected_prefill(q, k, v, bounds, 0.07, cache)) < BOUND[torch.float32]


@pytest.mark.parametrize("before", [None, [20, 3]])
def test_prefill_that_is_not_causal_sees_the_whole_sequence(before):
    q, k, v, bounds, prefix, cache = problem([21, 40], before, 4, 2, 64, 48, 5, dtype=torch.float16)
    got = prefill_attention(q, k, v, bounds, scale=0.125, causal=False, prefix=prefix, impl="triton")
    expected = expected_prefill(q, k, v, bounds, 0.125, cache, causal=False)
    assert relative_error(got, expected) < BOUND[torch.float16]


def test_rows_of_views_do_not_matter():
    q, k, v, bounds, _, _ = problem([9, 4], None, 4, 4, 64, 64, 0)
    packed = torch.cat([q, k, v], dim=1)
    views = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    got = prefill_attention(*views, bounds, scale=0.1, impl="triton")
    assert torch.equal(got, prefill_attention(q, k, v, bounds, scale=0.1, impl="triton"))


def test_no_rows_and_no_sequences():
    q, k, v, _, _, _ = problem([3], None, 2, 2, 64, 64, 0)
    none = torch.tensor([0], dtype=torch.int32)
    assert not prefill_attention(q, k, v, none, scale=0.1, impl="triton").any()
    empty = torch.tensor([0, 0], dtype=torch.int32)
    assert prefill_attention(q[:0], k[:0], v[:0], empty, scale=0.1, impl="triton").shape == (0, 2, 64)
