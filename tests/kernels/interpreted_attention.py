"""Triton decode attention under the interpreter; run by test_attention in a process of its own."""

from __future__ import annotations

import pytest
import torch
from attention_problems import BOUND, expected_decode, paged, relative_error
from moe_kernels import decode_attention, mla_decode_attention


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("lens", "heads", "kv_heads", "size", "v_size", "page", "window", "splits"),
    [
        ([5, 0, 70], 6, 2, 80, 80, 3, None, None),
        ([33, 130], 3, 1, 64, 48, 16, 7, 2),
        ([9, 300], 2, 2, 64, 64, 128, None, 20),
        ([65], 4, 2, 96, 96, 64, 40, 3),
    ],
)
def test_decode_is_the_formula(lens, heads, kv_heads, size, v_size, page, window, splits, dtype):
    k, v, table, lengths = paged(lens, kv_heads, size, v_size, page, dtype)
    q = torch.randn(len(lens), heads, size, generator=torch.Generator().manual_seed(3)).to(dtype)
    got = decode_attention(
        q, k, v, table, lengths, scale=size**-0.5, window=window, num_kv_splits=splits, impl="triton"
    )
    assert relative_error(got, expected_decode(q, k, v, table, lengths, size**-0.5, window)) < BOUND[dtype]
    assert not got[lengths == 0].any()


@pytest.mark.parametrize("rank", [512, 256])
@pytest.mark.parametrize("splits", [1, 5])
def test_latent_decode(rank, splits):
    k, v, table, lengths = paged([19, 3], 1, rank + 64, rank, 4, torch.float32, latent=True)
    q = torch.randn(2, 5, rank + 64, generator=torch.Generator().manual_seed(3))
    got = mla_decode_attention(
        q, k[:, :, 0], table, lengths, kv_lora_rank=rank, scale=0.07, num_kv_splits=splits, impl="triton"
    )
    assert relative_error(got, expected_decode(q, k, v, table, lengths, 0.07, None)) < BOUND[torch.float32]


def test_strides_of_a_cache_do_not_matter():
    k, v, table, lengths = paged([21, 8], 2, 64, 64, 4, torch.float32)
    q = torch.randn(2, 4, 64, generator=torch.Generator().manual_seed(3))
    got = decode_attention(q, k, v, table, lengths, scale=0.2, impl="triton")
    turned = [cache.permute(2, 3, 0, 1).contiguous().permute(2, 3, 0, 1) for cache in (k, v)]
    assert torch.equal(decode_attention(q, *turned, table, lengths, scale=0.2, impl="triton"), got)
