"""Quantisation on an NVIDIA GPU: the kernels' bits, graphs, compiled code, and weights as on the CPU."""

import os
import pathlib
import subprocess
import sys

import pytest
import torch
from moe_kernels import ExpertWeights
from moe_kernels.quant.api import quantize_activation
from moe_kernels.quant.triton import launch_quantize

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # Inductor's first import uses a deprecated part of torch.
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
]

CASES = pathlib.Path(__file__).with_name("quant_cases.py")
KINDS = [("token", "fp8"), ("token", "int8"), ("block", "fp8"), ("tensor", "fp8")]
FORMATS = {
    "fp8_tensor": {},
    "fp8_channel": {},
    "fp8_block": {},
    "int8": {},
    "int8_weight": {},
    "int4": {"group_size": 64, "zero_points": True},
    "nvfp4": {},
    "mxfp4": {},
}
each_kind = pytest.mark.parametrize(("granularity", "kind"), KINDS)


def bits(tensor):
    return tensor.cpu().contiguous().view(torch.uint8)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_cases_pass_compiled():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:logging", str(CASES)]
    # Of what this process was told, neither to interpret nor to be a worker of another pytest.
    environment = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET" and not n.startswith("PYTEST_")}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    assert "skipped" not in result.stdout


@each_kind
def test_the_specification_gives_the_same_bits_on_both_devices(granularity, kind):
    x = randn(40, 1100) * 4.0 ** (torch.arange(40) % 7)[:, None]
    want = quantize_activation(x, granularity, kind, impl="reference")
    for got, own in zip(quantize_activation(x.cuda(), granularity, kind, impl="reference"), want, strict=True):
        assert torch.equal(bits(got), bits(own))


@pytest.mark.parametrize("form", FORMATS)
def test_weights_are_stored_with_the_same_bits_on_both_devices(form):
    w1, w2 = randn(3, 2 * 72, 200), randn(3, 200, 72, seed=1)
    w1[1], w1[0, 3], w2[2, 7], w2[1, 5, 32:64] = 0.0, 1e-30, 1e4, 0.0
    here = ExpertWeights.from_dense(w1, w2, form, **FORMATS[form])
    there = ExpertWeights.from_dense(w1.cuda(), w2.cuda(), form, **FORMATS[form])
    assert here.tensors().keys() == there.tensors().keys()
    for name, tensor in here.tensors().items():
        assert torch.equal(bits(tensor), bits(there.tensors()[name])), name
    for one, two in zip(here.dequantize(), there.dequantize(), strict=True):
        assert torch.equal(one, two.cpu())


@pytest.mark.parametrize("form", FORMATS)
def test_experts_on_the_device_peak_at_the_result_and_one_expert(form):
    experts, hidden, ffn = 8, 2048, 1024
    one = 3 * hidden * ffn * 4

    def source():
        for index in range(experts):
            generator = torch.Generator("cuda").manual_seed(index)
            w1 = torch.randn(2 * ffn, hidden, device="cuda", generator=generator)
            yield w1, torch.randn(hidden, ffn, device="cuda", generator=generator)

    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    weights = ExpertWeights.from_experts(source(), experts, form, **FORMATS[form])
    # Beside one expert in float32, a few float32 copies of one of its matrices.
    assert torch.cuda.max_memory_allocated() - before < weights.nbytes + 4 * one
    assert torch.cuda.memory_allocated() - before < weights.nbytes + one + 2**20


@pytest.mark.parametrize("pdl", [False, True])
@each_kind
def test_graph_replay_and_dependent_launch(granularity, kind, pdl):
    for rows, columns in ((1, 7168), (16, 768), (300, 2880)):
        ids = torch.zeros(rows, 2, dtype=torch.int32, device="cuda")
        ids[rows // 2 :, 1] = -1
        xs = [randn(rows, columns, seed=seed).to(torch.bfloat16).cuda() for seed in (0, 1)]
        x = xs[0].clone()
        args = (granularity, kind, ids, 4, False)
        launch_quantize(x, *args, pdl=pdl)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            # What comes before writes x, so that a launch that does not wait reads too early.
            x.mul_(1.0)
            q, scale = launch_quantize(x, *args, pdl=pdl)
        for new in xs * 2:
            x.copy_(new)
            scale.fill_(float("nan"))
            graph.replay()
            want_q, want_scale = quantize_activation(new.cpu(), granularity, kind, impl="reference")
            assert torch.equal(bits(q), bits(want_q))
            assert torch.equal(bits(scale), bits(want_scale))


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@each_kind
def test_compiled_gives_the_same_bits(granularity, kind, mode):
    torch._dynamo.reset()
    run = torch.compile(lambda x: quantize_activation(x, granularity, kind), fullgraph=True, mode=mode)
    torch.use_deterministic_algorithms(True)
    try:
        for x in (randn(7, 260) * 1e4, torch.zeros(7, 260), randn(7, 260)):
            torch.compiler.cudagraph_mark_step_begin()
            for got, want in zip(run(x.cuda()), quantize_activation(x, granularity, kind), strict=True):
                assert torch.equal(bits(got), bits(want))
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_end_of_e4m3_saturates():
    x = torch.tensor([[448.0, 464.0, 465.0, 1000.0, -1000.0, 1e4, -1e4, 3e38]], device="cuda")
    q, _ = quantize_activation(x, "tensor", scale=torch.ones(1, device="cuda"))
    assert q.float().tolist() == [[448.0] * 4 + [-448.0, 448.0, -448.0, 448.0]]


@each_kind
def test_offsets_beyond_32_bits(granularity, kind):
    rows, columns = 300_000, 7168 + 1024
    if torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.skip("needs 12 GiB of free device memory")
    x = torch.zeros(rows, columns, dtype=torch.bfloat16, device="cuda")
    x[-2:] = randn(2, columns).cuda()
    q, scale = quantize_activation(x, granularity, kind)
    want, own = quantize_activation(x[-2:].cpu(), granularity, kind)
    assert torch.equal(bits(q[-2:]), bits(want))
    assert torch.equal(bits(scale if granularity == "tensor" else scale[-2:]), bits(own))
    assert not q[:-2].view(torch.uint8).any()
