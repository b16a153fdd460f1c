"""Known faults of attention kernels at the sizes at which they were met, for any implementation and device."""

from __future__ import annotations

import torch
from attention_problems import BOUND, expected_prefill, relative_error
from moe_kernels import PagedPrefix, decode_attention, mla_decode_attention, prefill_attention
from moe_kernels.testing.attention import attention_oracle, decode_oracle, paged_cache
from moe_kernels.testing.oracle import poison_allocator

# Query heads and heads of keys, of models and of their ranks.
HEADS = [(28, 4), (14, 2), (6, 6), (5, 1), (48, 6)]
LATENT_HEADS = [1, 4, 8, 16, 24]
# Page size, heads of keys, head size, the last page, whether keys and values alternate in one pool: the last page
# starts at element 2^31 or after it, the one before does not.
FAR_PAGES = {
    "latent": (480, 1, 576, 7768, False),
    "alternating": (16, 8, 128, 65536, True),
}


def seeded(*shape: int, dtype: torch.dtype, device: str, seed: int = 3) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def check_heads(impl: str, device: str, dtype: torch.dtype, heads: int, kv_heads: int, size: int = 80) -> None:
    """A-06: groups that are no power of two, head size 80, keys and values alternating in one pool."""
    cache = paged_cache([37, 0, 5], kv_heads, size, size, 4, dtype=dtype, device=device, layout="interleaved")
    q = seeded(3, heads, size, dtype=dtype, device=device)
    poison_allocator(device, *(4 * 2**n for n in range(4, 20)))
    got = decode_attention(q, *cache[:4], scale=size**-0.5, impl=impl)
    assert relative_error(got, decode_oracle(q, cache, size**-0.5)) < BOUND[dtype]
    new = seeded(6, kv_heads, size, dtype=dtype, device=device, seed=4)
    rows = seeded(6, heads, size, dtype=dtype, device=device, seed=5)
    bounds = torch.tensor([0, 2, 3, 6], dtype=torch.int32, device=device)
    poison_allocator(device, *(4 * 2**n for n in range(4, 20)))
    got = prefill_attention(rows, new, new.flip(0), bounds, scale=0.1, prefix=PagedPrefix(*cache[:4]), impl=impl)
    assert relative_error(got, expected_prefill(rows, new, new.flip(0), bounds, 0.1, cache)) < BOUND[dtype]


def check_latent(impl: str, device: str, dtype: torch.dtype, heads: int, rank: int) -> None:
    """A-06: few heads, or 24, on a rank; a latent of 256 where kernels know 512."""
    size = rank + 64
    cache = paged_cache([37, 3], 1, size, rank, 8, dtype=dtype, device=device, layout="latent")
    q = seeded(2, heads, size, dtype=dtype, device=device)
    got = mla_decode_attention(
        q, cache.k_cache[:, :, 0], cache.page_table, cache.lens, kv_lora_rank=rank, scale=size**-0.5, impl=impl
    )
    assert relative_error(got, decode_oracle(q, cache, size**-0.5)) < BOUND[dtype]


def check_far_page(impl: str, device: str, dtype: torch.dtype, name: str) -> None:
    """A-05: the same ten keys on the first page, the last below 2^31 elements and the first beyond."""
    page, kv_heads, size, last, alternating = FAR_PAGES[name]
    shape = (last + 1, *([2] if alternating else []), page, kv_heads, size)
    # Only the pages that are used are ever touched.
    pool = torch.empty(shape, dtype=dtype, device=device)
    k_cache, v_cache = (pool[:, 0], pool[:, 1]) if alternating else (pool, pool[..., :512])
    keys, values = (seeded(10, kv_heads, size, dtype=dtype, device=device, seed=seed) for seed in (1, 2))
    for number in (0, last - 1, last):
        k_cache[number, :10] = keys
        if alternating:
            v_cache[number, :10] = values
    values = values if alternating else keys[..., :512]
    table = torch.tensor([[0], [last - 1], [last]], dtype=torch.int32, device=device)
    lens = torch.full((3,), 10, dtype=torch.int32, device=device)
    q = seeded(1, 2 * kv_heads, size, dtype=dtype, device=device).expand(3, -1, -1)
    got = decode_attention(q, k_cache, v_cache, table, lens, scale=0.1, impl=impl)
    assert relative_error(got[0], attention_oracle(q[:1], keys, values, 0.1)[0]) < BOUND[dtype]
    assert torch.equal(got[1], got[0])
    assert torch.equal(got[2], got[0])
    new = [seeded(3, n, size, dtype=dtype, device=device, seed=6) for n in (2 * kv_heads, kv_heads)]
    bounds = torch.tensor([0, 1, 2, 3], dtype=torch.int32, device=device)
    rows, k_new = (tensor[:1].expand(3, -1, -1) for tensor in new)
    prefix = PagedPrefix(k_cache, v_cache, table, lens)
    got = prefill_attention(rows, k_new, k_new[..., : v_cache.shape[3]], bounds, scale=0.1, prefix=prefix, impl=impl)
    assert torch.equal(got[1], got[0])
    assert torch.equal(got[2], got[0])


def check_far_rows(impl: str, device: str, dtype: torch.dtype, stride: int, first: int, rows: int) -> None:
    """A-05: rows of a packed projection that start beyond 2^31 elements; `first` rows before them are others'."""
    pool = torch.empty(first + rows, stride, dtype=dtype, device=device)
    near = seeded(rows, 3, 1, 64, dtype=dtype, device=device)
    pool[first:, :192] = near.flatten(1)
    q, k, v = (pool[:, 64 * n : 64 * n + 64].unsqueeze(1) for n in range(3))
    pool[:first, :192] = 0.0
    ends = [*range(0, first, 1024), first, first + rows]
    bounds = torch.tensor(ends, dtype=torch.int32, device=device)
    got = prefill_attention(q, k, v, bounds, scale=0.1, impl=impl)
    expected = attention_oracle(near[:, 0], near[:, 1], near[:, 2], 0.1)
    assert relative_error(got[first:], expected) < BOUND[dtype]
    assert not got[:first].any()


def check_more_splits_than_keys(device: str, dtype: torch.dtype) -> None:
    """128 parts of a few keys each, or of none: the merge counts no part that has no keys."""
    cache = paged_cache([1, 0, 100, 300], 1, 128, 128, 16, dtype=dtype, device=device)
    q = seeded(4, 2, 128, dtype=dtype, device=device)
    expected = decode_oracle(q, cache, 0.1)
    for splits in (3, 128) if device == "cpu" else (1, 2, 3, 128, 1024):
        poison_allocator(device, *(4 * 2**n for n in range(4, 22)))
        got = decode_attention(q, *cache[:4], scale=0.1, num_kv_splits=splits, impl="triton")
        assert relative_error(got, expected) < BOUND[dtype], splits
