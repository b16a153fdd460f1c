"""Attention under torch.compile and in CUDA graphs, backends of others, and flashinfer's arguments."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types

import pytest
import torch
from attention_problems import BOUND, expected_decode, expected_prefill, paged, relative_error
from moe_kernels import PagedPrefix, decode_attention, mla_decode_attention, prefill_attention
from moe_kernels.attention import flashinfer
from moe_kernels.attention.registry import (
    attention_backends,
    register_attention_backend,
    unregister_attention_backend,
)
from moe_kernels.attention.support import attention_reasons, resolve_attention_impl
from moe_kernels.testing.attention import decode_oracle, paged_cache

ASK = {"device_type": "cuda", "dtype": "bf16", "num_heads": 8, "num_kv_heads": 2, "head_dim": 128, "v_head_dim": 128}


@pytest.mark.parametrize("impl", ["reference", "sdpa"])
def test_ops_say_what_they_return(impl):
    k, v, table, lens = paged([5, 9], 2, 16, 8, 4, torch.float32)
    q = torch.randn(2, 4, 16)
    options = (0.25, 0, 0, impl, [])
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(
        torch.ops.moe_kernels.decode_attention.default, (q, k, v, table, lens, *options), test_utils=checks
    )
    bounds = torch.tensor([0, 1, 2], dtype=torch.int32)
    new = torch.randn(2, 2, 16)
    for prefix in ((None, None, None, None), (k, v, table, lens)):
        arguments = (q, new, new[..., :8], bounds, 0.25, True, 0, *prefix, impl, [])
        torch.library.opcheck(torch.ops.moe_kernels.prefill_attention.default, arguments, test_utils=checks)


def test_a_compiled_step_is_one_graph_and_gives_what_eager_gives():
    def step(q, k, v, table, lens, rows, bounds):
        out = decode_attention(q + 1, k, v, table, lens, scale=0.25, impl="sdpa") * 2
        prefix = PagedPrefix(k, v, table, lens)
        new = rows[:, :2]
        return out, prefill_attention(rows, new, new[..., :8], bounds, scale=0.25, prefix=prefix, impl="sdpa") + 1

    k, v, table, lens = paged([5, 9], 2, 16, 8, 4, torch.float32)
    arguments = (torch.randn(2, 4, 16), k, v, table, lens, torch.randn(3, 4, 16), torch.tensor([0, 1, 3]).int())
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for got, expected in zip(compiled(*arguments), step(*arguments), strict=True):
        assert got.stride() == expected.stride()
        torch.testing.assert_close(got, expected)


def test_a_registered_backend_runs_and_says_what_it_does_not():
    seen = []

    def decode(*tensors, scale, window):
        seen.append((scale, window))
        return torch.full_like(tensors[0], 7.0)

    def supports(*, kind, dtype, **_):
        return [] if dtype == "fp32" else [f"mine runs {kind} in fp32."]

    register_attention_backend("mine", {"decode": decode}, supports)
    try:
        k, v, table, lens = paged([5], 2, 16, 16, 4, torch.float32)
        q = torch.randn(1, 4, 16)
        assert decode_attention(q, k, v, table, lens, scale=0.5, window=3, impl="mine").unique().tolist() == [7.0]
        assert seen == [(0.5, 3)]
        with pytest.raises(NotImplementedError, match="mine has no prefill; it has decode"):
            prefill_attention(q, k[0, :1], v[0, :1], torch.tensor([0, 1]).int(), scale=0.5, impl="mine")
        with pytest.raises(NotImplementedError, match="mine runs decode in fp32"):
            decode_attention(q.half(), k.half(), v.half(), table, lens, scale=0.5, impl="mine")
        with pytest.raises(ValueError, match="num_kv_splits is for impl 'triton'"):
            decode_attention(q, k, v, table, lens, scale=0.5, num_kv_splits=2, impl="mine")
        with pytest.raises(ValueError, match="registered already"):
            register_attention_backend("mine", {"decode": decode}, supports)
        with pytest.raises(ValueError, match="built in"):
            register_attention_backend("sdpa", {"decode": decode}, supports)
    finally:
        unregister_attention_backend("mine")
    with pytest.raises(ValueError, match="impl must be one of reference, sdpa, triton, flashinfer"):
        decode_attention(q, k, v, table, lens, scale=0.5, impl="mine")


def test_the_best_is_named_before_it_runs():
    assert resolve_attention_impl("decode", **{**ASK, "device_type": "cpu"}) == "sdpa"
    reasons = attention_reasons("triton", "decode", **{**ASK, "head_dim": 1024})
    assert "Triton attention takes head_dim up to 640, not 1024." in reasons or "not installed" in reasons[0]
    assert attention_reasons("sdpa", "prefill", **ASK, graph=True)


@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is not None, reason="flashinfer is installed")
def test_flashinfer_that_is_not_installed_is_refused_with_the_reason():
    assert "flashinfer" in attention_backends()
    k, v, table, lens = paged([5], 2, 64, 64, 4, torch.float32)
    with pytest.raises(NotImplementedError, match=r"'flashinfer' does not run here: flashinfer is not installed"):
        decode_attention(torch.randn(1, 4, 64), k, v, table, lens, scale=0.5, impl="flashinfer")


@pytest.fixture
def installed(monkeypatch):
    """A flashinfer whose wrappers compute, from the arguments that the real ones take, by the formula."""

    class Decode:
        def __init__(self, workspace, layout, *, use_tensor_cores):
            assert (workspace.dtype, layout, use_tensor_cores) == (torch.uint8, "NHD", True)

        def plan(self, bounds, pages, last, heads, kv_heads, size, page, **options):
            self.plan = bounds, pages, last, page, options["window_left"], options["sm_scale"]

        def run(self, q, caches):
            bounds, pages, last, page, left, scale = self.plan
            width = int(bounds.diff().max())
            table = torch.zeros(len(q), width, dtype=torch.int32)
            for b in range(len(q)):
                mine = pages[bounds[b] : bounds[b + 1]]
                table[b, : len(mine)] = mine
            lens = (bounds.diff() - 1) * page + last
            return expected_decode(q, *caches, table, lens, scale, None if left < 0 else left + 1).to(q.dtype)

    class Latent(Decode):
        def __init__(self, workspace):
            assert workspace.dtype == torch.uint8

        def plan(self, rows, bounds, pages, lens, heads, rank, rope, page, causal, scale, *dtypes):
            assert rows.tolist() == list(range(len(rows)))
            assert (rank, rope, causal) == (512, 64, False)
            self.plan = bounds, pages, (lens - 1) % page + 1, page, -1, scale

        def run(self, q_nope, q_rope, ckv, kpe):
            keys = torch.cat([ckv, kpe], dim=-1)[:, :, None]
            return super().run(torch.cat([q_nope, q_rope], dim=-1), (keys, ckv[:, :, None]))

    class Prefill:
        def __init__(self, workspace, layout):
            assert layout == "NHD"

        def plan(self, q_bounds, kv_bounds, heads, kv_heads, size, **options):
            assert q_bounds is kv_bounds
            self.plan = q_bounds, options

        def run(self, q, k, v):
            bounds, options = self.plan
            window = None if options["window_left"] < 0 else options["window_left"] + 1
            scale, causal = options["sm_scale"], options["causal"]
            return expected_prefill(q, k, v, bounds, scale, causal=causal, window=window).to(q.dtype)

    modules = {name: types.ModuleType(name) for name in ("flashinfer", "flashinfer.mla")}
    modules["flashinfer"].BatchDecodeWithPagedKVCacheWrapper = Decode
    modules["flashinfer"].BatchPrefillWithRaggedKVCacheWrapper = Prefill
    modules["flashinfer.mla"].BatchMLAPagedAttentionWrapper = Latent
    for name, module in modules.items():
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("window", [None, 6])
def test_flashinfer_is_given_pages_lengths_and_windows(window, installed):
    cache = paged_cache([21, 0, 8, 1], 2, 64, 64, 4, dtype=torch.float32)
    q = torch.randn(4, 4, 64)
    got = flashinfer.flashinfer_decode(q, *cache[:4], scale=0.1, window=window)
    assert relative_error(got, decode_oracle(q, cache, 0.1, window=window)) < BOUND[torch.float32]
    bounds = torch.tensor([0, 3, 3, 9], dtype=torch.int32)
    rows, new = torch.randn(11, 4, 64), torch.randn(11, 2, 64)
    got = flashinfer.flashinfer_prefill(rows, new, new, bounds, scale=0.1, causal=True, window=window, prefix=None)
    assert relative_error(got, expected_prefill(rows, new, new, bounds, 0.1, window=window)) < BOUND[torch.float32]
    assert not got[9:].any()


def test_flashinfer_is_given_the_latent_in_two_parts(installed):
    cache = paged_cache([9, 3], 1, 576, 512, 4, dtype=torch.float32, layout="latent")
    q = torch.randn(2, 3, 576)
    latent = cache.k_cache[:, :, 0]
    got = flashinfer.flashinfer_mla_decode(q, latent, cache.page_table, cache.lens, kv_lora_rank=512, scale=0.1)
    assert relative_error(got, decode_oracle(q, cache, 0.1)) < BOUND[torch.float32]


def test_flashinfer_says_what_it_does_not_run(installed):
    def reasons(kind="decode", **changes):
        return attention_reasons("flashinfer", kind, **{**ASK, **changes})

    assert reasons() == []
    assert reasons("prefill", head_dim=192) == []
    assert reasons("mla_decode", head_dim=576, v_head_dim=512, num_kv_heads=1) == []
    assert "runs on cuda, not cpu" in reasons(device_type="cpu")[0]
    assert "not fp32" in reasons(dtype="fp32")[0]
    assert "not 80 and 80" in reasons(head_dim=80, v_head_dim=80)[0]
    assert "not 320 of 256" in reasons("mla_decode", head_dim=320, v_head_dim=256)[0]
    assert "paged prefix" in reasons("prefill", page_size=16)[0]
    assert "CUDA graph" in reasons(graph=True)[0]
    assert "torch.compile" in reasons(compile=True)[0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("latent", [False, True])
def test_a_captured_step_serves_other_lengths(latent):
    size, v_size, kv_heads = (576, 512, 1) if latent else (128, 128, 2)
    layout = "latent" if latent else "apart"
    long, short = (
        paged_cache(lens, kv_heads, size, v_size, 16, dtype=torch.bfloat16, device="cuda", layout=layout)
        for lens in ([700, 33, 1], [1, 700, 0])
    )
    k, v = (torch.cat([a, b]) for a, b in ((long.k_cache, short.k_cache), (long.v_cache, short.v_cache)))
    if latent:
        v = k[..., :v_size]
    q = torch.randn(3, 8, size, dtype=torch.bfloat16, device="cuda")
    width = max(long.page_table.shape[1], short.page_table.shape[1])
    table = torch.zeros(3, width, dtype=torch.int32, device="cuda")
    lens = torch.zeros(3, dtype=torch.int32, device="cuda")

    def fill(cache, offset):
        table[:, : cache.page_table.shape[1]] = cache.page_table + offset
        lens.copy_(cache.lens)

    def step():
        if latent:
            return mla_decode_attention(q, k[:, :, 0], table, lens, kv_lora_rank=v_size, scale=0.05)
        return decode_attention(q, k, v, table, lens, scale=0.05)

    fill(long, 0)
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for cache, offset in ((short, len(long.k_cache)), (long, 0), (short, len(long.k_cache))):
        fill(cache, offset)
        graph.replay()
        assert relative_error(out, decode_oracle(q, cache, 0.05)) < BOUND[torch.bfloat16]
        assert torch.equal(out, step())
