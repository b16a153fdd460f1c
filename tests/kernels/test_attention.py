"""Attention in plain PyTorch against the formula in float64: pages, windows, groups, head sizes, prefixes."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest
import torch
from attention_problems import BOUND, expected_decode, expected_prefill, gathered, paged, plain, relative_error
from moe_kernels import PagedPrefix, decode_attention, mla_decode_attention, prefill_attention
from moe_kernels.testing.attention import decode_oracle, paged_cache

IMPLS = ("reference", "sdpa")


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("lens", "heads", "kv_heads", "size", "v_size", "page", "window"),
    [
        ([5, 0, 17, 1], 6, 2, 80, 80, 3, None),
        ([33, 16, 31], 8, 8, 64, 48, 16, 7),
        ([9, 40], 7, 1, 96, 96, 1, 40),
        ([12], 4, 4, 256, 256, 5, 1),
    ],
)
def test_decode_is_the_formula(lens, heads, kv_heads, size, v_size, page, window, dtype, impl):
    k, v, table, lengths = paged(lens, kv_heads, size, v_size, page, dtype)
    q = torch.randn(len(lens), heads, size, generator=torch.Generator().manual_seed(3)).to(dtype)
    got = decode_attention(q, k, v, table, lengths, scale=size**-0.5, window=window, impl=impl)
    expected = expected_decode(q, k, v, table, lengths, size**-0.5, window)
    assert relative_error(got, expected) < BOUND[dtype]
    assert not got[lengths == 0].any()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("rank", [512, 256])
def test_latent_decode_reads_values_from_the_keys(rank, impl):
    k, v, table, lengths = paged([19, 3], 1, rank + 64, rank, 4, torch.float32, latent=True)
    q = torch.randn(2, 5, rank + 64, generator=torch.Generator().manual_seed(3))
    got = mla_decode_attention(q, k[:, :, 0], table, lengths, kv_lora_rank=rank, scale=0.07, impl=impl)
    assert relative_error(got, expected_decode(q, k, v, table, lengths, 0.07, None)) < BOUND[torch.float32]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("size", "v_size", "kv_heads"), [(192, 128, 6), (64, 64, 2), (72, 64, 1)])
@pytest.mark.parametrize("window", [None, 4])
def test_prefill_behind_a_paged_prefix_is_each_row_by_itself(size, v_size, kv_heads, window, impl):
    new, before, heads = [5, 0, 9], [7, 4, 0], 6
    k_cache, v_cache, table, prefix_lens = paged(before, kv_heads, size, v_size, 3, torch.float32)
    make = torch.Generator().manual_seed(5)
    rows = sum(new)
    q = torch.randn(rows, heads, size, generator=make)
    k, v = torch.randn(rows, kv_heads, size, generator=make), torch.randn(rows, kv_heads, v_size, generator=make)
    ends = torch.tensor([0, 5, 5, 14], dtype=torch.int32)
    prefix = PagedPrefix(k_cache, v_cache, table, prefix_lens)
    got = prefill_attention(q, k, v, ends, scale=0.1, window=window, prefix=prefix, impl=impl)
    for b, count in enumerate(new):
        first = int(ends[b])
        for row in range(count):
            keys, values = k[first : first + row + 1], v[first : first + row + 1]
            if before[b]:
                keys = torch.cat([gathered(k_cache, table[b], before[b]), keys])
                values = torch.cat([gathered(v_cache, table[b], before[b]), values])
            if window:
                keys, values = keys[-window:], values[-window:]
            assert relative_error(got[first + row], plain(q[first + row], keys, values, 0.1)) < BOUND[torch.float32]


@pytest.mark.parametrize("impl", IMPLS)
def test_prefill_that_is_not_causal_sees_the_whole_sequence(impl):
    make = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(8, 2, 64, generator=make) for _ in range(3))
    got = prefill_attention(q, k, v, torch.tensor([0, 3, 8], dtype=torch.int32), scale=0.125, causal=False, impl=impl)
    for row in range(8):
        part = slice(0, 3) if row < 3 else slice(3, 8)
        assert relative_error(got[row], plain(q[row], k[part], v[part], 0.125)) < BOUND[torch.float32]


def test_bad_arguments_are_named():
    k, v, table, lengths = paged([4, 2], 2, 64, 64, 2, torch.float32)
    q = torch.randn(2, 4, 64)
    with pytest.raises(ValueError, match="heads must be a multiple of k_cache's"):
        decode_attention(q[:, :3], k, v, table, lengths, scale=1.0)
    with pytest.raises(ValueError, match="window must be None or at least 1"):
        decode_attention(q, k, v, table, lengths, scale=1.0, window=0)
    with pytest.raises(ValueError, match="scale must be finite"):
        decode_attention(q, k, v, table, lengths, scale=float("nan"))
    with pytest.raises(ValueError, match="page_table_BP must be int32"):
        decode_attention(q, k, v, table.long(), lengths, scale=1.0)
    with pytest.raises(NotImplementedError, match="Triton kernels run on cuda, not cpu"):
        decode_attention(q, k, v, table, lengths, scale=1.0, impl="triton")


@pytest.mark.slow
@pytest.mark.parametrize("cases", ["interpreted_attention.py", "interpreted_prefill_attention.py"])
def test_kernels_pass_in_the_interpreter(cases):
    pytest.importorskip("triton")
    path = pathlib.Path(__file__).with_name(cases)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:logging", str(path)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    assert " passed" in result.stdout
    assert "skipped" not in result.stdout


gpu_only = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.gpu
@gpu_only
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("splits", [None, 1, 50])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "latent", "window"),
    [(6, 2, 80, False, None), (32, 8, 128, False, 40), (16, 1, 576, True, None), (128, 1, 576, True, None)],
)
def test_triton_decode_on_the_gpu(heads, kv_heads, size, latent, window, splits, dtype):
    v_size, layout = (512, "latent") if latent else (size, "interleaved")
    cache = paged_cache([5, 0, 700, 33], kv_heads, size, v_size, 16, dtype=dtype, device="cuda", layout=layout)
    q = torch.randn(4, heads, size, generator=torch.Generator().manual_seed(3)).to("cuda", dtype)
    options = {"scale": size**-0.5, "window": window, "num_kv_splits": splits, "impl": "triton"}
    got = decode_attention(q, *cache[:4], **options)
    assert relative_error(got, decode_oracle(q, cache, size**-0.5, window=window)) < BOUND[dtype]
    assert torch.equal(got, decode_attention(q, *cache[:4], **options))


@pytest.mark.gpu
@gpu_only
@pytest.mark.parametrize("impl", ["triton", "sdpa"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "v_size", "layout"),
    [
        (32, 8, 128, 128, "apart"),
        (16, 16, 192, 128, "apart"),
        (16, 1, 576, 512, "latent"),
        (7, 1, 80, 80, "interleaved"),
        (4, 4, 256, 256, "heads_first"),
    ],
)
def test_prefill_on_the_gpu(heads, kv_heads, size, v_size, layout, window, dtype, impl):
    cache = paged_cache([70, 0, 333, 1], kv_heads, size, v_size, 16, dtype=dtype, device="cuda", layout=layout)
    new = [150, 1, 0, 300]
    make = torch.Generator().manual_seed(5)
    q = torch.randn(sum(new) + 3, heads, size, generator=make).to("cuda", dtype)
    k = torch.randn(sum(new) + 3, kv_heads, size, generator=make).to("cuda", dtype)
    v = k[..., :v_size] if layout == "latent" else torch.randn(len(k), kv_heads, v_size, generator=make).to(k)
    bounds = torch.tensor([0, *new], device="cuda").cumsum(0).int()
    for prefix in (None, PagedPrefix(*cache[:4])):
        got = prefill_attention(q, k, v, bounds, scale=size**-0.5, window=window, prefix=prefix, impl=impl)
        seen = cache if prefix else None
        expected = expected_prefill(q, k, v, bounds, size**-0.5, seen, window=window)
        assert relative_error(got, expected) < BOUND[dtype]
        assert not got[sum(new) :].any()
