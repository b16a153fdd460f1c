"""DeepGEMM as a backend: what it needs, its kernels for the GPU that is not there, and the layer where there is one."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from moe_kernels import ExpertWeights, Routing, fused_experts, register_backend, unregister_backend

from workbench.check.activations import roundings
from workbench.check.budget import kernel_budget
from workbench.check.difference import difference
from workbench.check.oracle import dequantized, oracle, plain_layer
from workbench.peers import deep_gemm

pytest.importorskip("triton")
HERE = Path(__file__).parent
KEYWORDS = {
    "device_type": "cuda",
    "dtype": torch.bfloat16,
    "num_experts": 8,
    "hidden_size": 256,
    "intermediate_size": 128,
    "top_k": 2,
    "quant": "fp8_block",
}


def test_what_it_needs_is_said() -> None:
    def said(**values: object) -> str:
        return " ".join(deep_gemm.supports(**{**KEYWORDS, **values}))  # type: ignore[arg-type]

    assert "hidden_size must be a multiple of 128 for deep_gemm's blocks, not 200" in said(hidden_size=200)
    assert "intermediate_size must be a multiple of 128 for deep_gemm's blocks, not 704" in said(intermediate_size=704)
    assert "quant fp8_block, not int8" in said(quant="int8")
    assert "runs on cuda, not cpu" in said(device_type="cpu")
    assert "torch.compile cannot trace" in said(compile=True)
    assert "computes in bf16, not torch.float16" in said(dtype=torch.float16)
    assert ("not installed" in said()) == (find_spec("deep_gemm") is None)


def test_no_tokens_need_no_library() -> None:
    x = torch.empty(0, 128, dtype=torch.bfloat16)
    routing = Routing(torch.empty(0, 2), torch.empty(0, 2, dtype=torch.int32))
    assert find_spec("deep_gemm") is None or torch.cuda.is_available()
    assert deep_gemm.deep_gemm_experts(x, None, routing).shape == (0, 128)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tokens", "hidden", "ffn", "top_k"), [(1, 2048, 768, 8), (4096, 7168, 2048, 8), (37, 128, 128, 3)]
)
def test_the_kernels_compile_for_hopper(tokens: int, hidden: int, ffn: int, top_k: int) -> None:
    from moe_kernels.align.reference import max_blocks
    from moe_kernels.testing.offline import compile_only
    from triton.runtime.jit import JITFunction

    from workbench.peers import deep_gemm_kernels as kernels

    def empty(*sizes: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(*sizes, dtype=dtype, device="meta")

    padded = 128 * max_blocks(tokens * top_k, 16, 128)
    try:
        with compile_only(90) as compiled:
            q, scale, expert, place = kernels.launch_gather_quantize(
                empty(tokens, hidden, dtype=torch.bfloat16), empty(padded), empty(padded // 128), empty(1), top_k, 128,
                deep_gemm.LIMITS,
            )  # fmt: skip
            inner, inner_scale = kernels.launch_silu_quantize(
                empty(padded, 2 * ffn, dtype=torch.bfloat16), empty(1), deep_gemm.LIMITS
            )
            weights = empty(tokens, top_k, dtype=torch.float32)
            out = kernels.launch_weighted_sum(
                empty(padded, hidden, dtype=torch.bfloat16), place, weights, empty(tokens, top_k), 16
            )
    finally:
        for value in vars(kernels).values():
            if isinstance(value, JITFunction):
                value.device_caches.clear()
    assert [kernel.name for kernel in compiled] == [
        "gather_quantize_kernel", "silu_quantize_kernel", "weighted_sum_kernel",
    ]  # fmt: skip
    assert all("cvt.rn.satfinite.e4m3x2" in kernel.ptx for kernel in compiled[:2])
    assert (q.shape, scale.shape, scale.stride()) == ((padded, hidden), (padded, hidden // 128), (1, padded))
    assert (inner.shape, inner_scale.shape) == ((padded, ffn), (padded, ffn // 128))
    assert (expert.shape, place.shape, out.shape) == ((padded,), (tokens * top_k,), (tokens, hidden))


@pytest.mark.slow
def test_the_layer_over_a_stand_in_of_the_library_in_the_interpreter() -> None:
    file = HERE / "interpreted_deep_gemm.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:logging", str(file)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_rows_on_a_gpu_are_quantised_to_the_bit() -> None:
    from workbench.check.activations import quantized
    from workbench.peers.deep_gemm_kernels import launch_gather_quantize

    x = torch.randn(37, 640, device="cuda").to(torch.bfloat16)[:, :512]  # a row stride of its own
    x[3, 7], x[4, 200], x[5, :128] = float("inf"), float("nan"), 0.0
    ids = torch.rand(37, 5, device="cuda").topk(2).indices.to(torch.int32)
    rows, experts, count = deep_gemm.moe_align(ids, 5, 128)
    q, scale, expert, place = launch_gather_quantize(x, rows, experts, count, 2, 128, deep_gemm.LIMITS)
    at = place.long()
    got = q[at].double() * scale[at].double().repeat_interleave(128, dim=1)
    whole = torch.isfinite(x).repeat_interleave(2, dim=0)
    want = quantized(torch.where(torch.isfinite(x), x, 0), "fp8", "block").repeat_interleave(2, dim=0)
    assert torch.equal(got[whole], want[whole])
    assert bool(torch.isnan(got[~whole]).all())
    assert torch.equal(expert[at], ids.reshape(-1))


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or find_spec("deep_gemm") is None, reason="needs an NVIDIA GPU and deep_gemm"
)
@pytest.mark.parametrize(("tokens", "experts", "hidden", "ffn", "top_k"), [(1, 8, 256, 128, 2), (67, 5, 512, 384, 3)])
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_the_layer_on_a_gpu(tokens: int, experts: int, hidden: int, ffn: int, top_k: int, graph: bool) -> None:
    torch.manual_seed(tokens)
    w1 = torch.randn(experts, 2 * ffn, hidden, device="cuda") / hidden**0.5
    w2 = torch.randn(experts, hidden, ffn, device="cuda") / ffn**0.5
    weights = ExpertWeights.from_dense(w1, w2, "fp8_block")
    x = torch.randn(tokens, hidden, device="cuda").to(torch.bfloat16)
    ids = torch.rand(tokens, experts, device="cuda").topk(top_k).indices.to(torch.int32)
    if tokens > 2:
        ids[1] = -1
    routing = Routing(torch.rand(tokens, top_k, device="cuda"), ids)
    register_backend("deep_gemm", deep_gemm.run, deep_gemm.supports)
    try:
        got = fused_experts(x, weights, routing, impl="deep_gemm")
        if graph:
            recorded = torch.cuda.CUDAGraph()
            with torch.cuda.graph(recorded):
                again = fused_experts(x, weights, routing, impl="deep_gemm")
            again.fill_(float("nan"))
            recorded.replay()
            assert torch.equal(again, got)
    finally:
        unregister_backend("deep_gemm")
    rounding = roundings(weights)
    want = oracle(x, routing, dequantized(weights), experts, rounding)
    eager = plain_layer(x, routing, dequantized(weights), experts, rounding, torch.bfloat16)
    budget = kernel_budget(difference(eager, want).relative_l2, torch.bfloat16, max(hidden, ffn))
    error = difference(got, want).relative_l2
    assert error is not None
    assert error < budget
    if tokens > 2:
        assert not got[1].any()
