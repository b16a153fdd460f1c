"""`linear` on an NVIDIA GPU: every format, implementation, size, kind of tile; compiled, in graphs, hostile values."""

import dataclasses

import pytest
import torch
from moe_kernels import LinearWeights, Quant, linear, resolve_linear_impl
from moe_kernels.formats import FORMATS
from moe_kernels.projections import ops
from moe_kernels.projections.oracle import linear_budget, linear_oracle, linear_problem
from moe_kernels.projections.reference import quantize
from moe_kernels.projections.tiles import LinearConfig
from moe_kernels.testing.oracle import poison_allocator, relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # Inductor's first import uses a deprecated part of torch.
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
]

CASES = {
    **{quant.value: {"quant": quant.value} for quant in Quant},
    "int4-32-zeros": {"quant": "int4", "group_size": 32, "zero_points": True},
    "fp8_channel-fp16": {"quant": "fp8_channel", "dtype": torch.float16},
    "fp8_tensor-fp32": {"quant": "fp8_tensor", "dtype": torch.float32},
    "int4-fp16": {"quant": "int4", "group_size": 64, "dtype": torch.float16},
    "nvfp4-fp32": {"quant": "nvfp4", "dtype": torch.float32},
}
ROUNDED = [quant.value for quant in Quant if FORMATS[quant].activation]
each_case = pytest.mark.parametrize("case", CASES)


def check(out, x, weights, bias=None):
    assert out.dtype == x.dtype
    assert out.is_contiguous()
    assert relative_error(out, linear_oracle(x, weights, bias)) <= linear_budget(x, weights, bias)


@each_case
@pytest.mark.parametrize("size", [(1, 1, 1), (1, 130, 2048), (17, 77, 257), (300, 200, 520)], ids=str)
def test_triton_within_budget(case, size):
    x, weights, bias = linear_problem(*size, **CASES[case], device="cuda")
    before = x.clone()
    for value in (float("nan"), 1e30):
        poison_allocator("cuda", size[0] * size[1] * x.element_size(), 8 * size[0] * size[1] * 4, value=value)
        out = linear(x, weights, bias=bias, impl="triton")
        check(out, x, weights, bias)
    assert torch.equal(out, linear(x, weights, bias=bias, impl="triton"))
    assert torch.equal(x, before)


@pytest.mark.parametrize("case", ["fp32", "bf16", "fp16", "fp8_tensor", "fp8_channel", "fp8_tensor-fp32"])
@pytest.mark.parametrize("tokens", [1, 5, 300])
def test_torch_within_budget(case, tokens):
    x, weights, bias = linear_problem(tokens, 208, 528, **CASES[case], device="cuda")
    for added in (None, bias):
        check(linear(x, weights, bias=added, impl="torch"), x, weights, added)


@pytest.mark.parametrize("quant", [quant.value for quant in Quant])
def test_real_sizes_and_what_is_chosen(quant):
    for tokens in (1, 8, 40, 512):
        x, weights, _ = linear_problem(tokens, 3072, 2048, quant=quant, device="cuda")
        name = resolve_linear_impl(x, weights)
        assert name != "reference"
        assert torch.equal(linear(x, weights), linear(x, weights, impl=name))
        check(linear(x, weights), x, weights)


@pytest.mark.parametrize(("swap", "split_k"), [(False, 1), (True, 3), (False, 8)])
@pytest.mark.parametrize("quant", ["bf16", "fp8_channel", "fp8_block", "int8", "int4"])
def test_tiles_splits_maps_and_early_starts(quant, swap, split_k):
    x, weights, bias = linear_problem(40, 320, 1056, quant=quant, device="cuda")
    base = LinearConfig(block_m=16, block_n=64, block_k=128, swap_ab=swap, split_k=split_k)
    want = ops.linear_triton(x, weights, bias, base)
    check(want, x, weights, bias)
    changes = [{"pdl": True, "prefetch": 512}, {"use_tma": True, "pdl": True}]
    if quant == "fp8_block":
        changes.append({"inside": True, "pdl": True})
    for change in changes:
        config = dataclasses.replace(base, **change)
        for _ in range(10):
            assert torch.equal(ops.linear_triton(x, weights, bias, config), want), change


@pytest.mark.parametrize("quant", ROUNDED)
def test_rounding_inside_gives_the_same_bits(quant):
    x, weights, _ = linear_problem(1, 70, 2200, quant=quant, device="cuda")
    x[0, 3], x[0, 170] = 6e4, 0.0
    tiles = {"block_m": 1, "block_n": 2, "block_k": 1024, "lanes": True}
    apart, inside = LinearConfig(**tiles), LinearConfig(**tiles, inside=True, prefetch=1024)
    assert torch.equal(ops.linear_triton(x, weights, None, inside), ops.linear_triton(x, weights, None, apart))


@pytest.mark.parametrize("quant", ROUNDED)
def test_activations_are_rounded_as_the_specification_does(quant):
    """Weights of one single one in every row show what is left of each activation."""
    for tokens in (1, 6, 70):
        x, _, _ = linear_problem(tokens, 1, 256, quant=quant, device="cuda")
        weights = LinearWeights.from_dense(torch.eye(256), quant).to("cuda")
        q, scale = quantize(x, weights)
        form = FORMATS[weights.quant]
        rows = scale.reshape(-1, 1) if form.granularity != "block" else scale.repeat_interleave(128, dim=1)
        want = (q.float() * rows).to(x.dtype)
        out = linear(x, weights, impl="triton")
        torch.testing.assert_close(out.float(), want.float(), rtol=2**-7, atol=0.0)


@pytest.mark.parametrize("tokens", [1, 70])
@pytest.mark.parametrize("quant", [quant.value for quant in Quant])
def test_a_value_that_is_not_finite_stays_in_its_row(quant, tokens):
    x, weights, _ = linear_problem(tokens, 66, 520, quant=quant, device="cuda")
    clean = linear(x, weights, impl="triton")
    x[tokens // 2, 7] = float("nan")
    out = linear(x, weights, impl="triton")
    assert bool(torch.isnan(out[tokens // 2]).all())
    keep = torch.arange(tokens, device="cuda") != tokens // 2
    assert bool(torch.isfinite(out[keep]).all())
    if FORMATS[weights.quant].granularity != "tensor":
        assert torch.equal(out[keep], clean[keep])


def test_zero_rows_of_x_and_of_weights():
    for quant in Quant:
        w = torch.randn(40, 160, generator=torch.Generator().manual_seed(3))
        w[5] = 0
        weights = LinearWeights.from_dense(w, quant.value).to("cuda")
        for tokens in (1, 6):
            x = torch.randn(tokens, 160, device="cuda").to(weights.dtype)
            x[tokens - 1] = 0
            out = linear(x, weights, impl="triton")
            assert bool((out[tokens - 1] == 0).all()), quant
            assert bool((out[:, 5] == 0).all()), quant
        assert linear(x[:0], weights, bias=x[0, :40], impl="triton").shape == (0, 40)
        assert linear(x[:0], weights).shape == (0, 40)


@pytest.mark.parametrize("impl", [None, "triton"])
@pytest.mark.parametrize("case", ["bf16", "fp8_tensor", "fp8_channel", "fp8_block", "int8", "int4", "nvfp4"])
def test_graph_replays_equal_eager(case, impl):
    for tokens in (1, 8, 96):
        x, weights, bias = linear_problem(tokens, 576, 2048, **CASES[case], device="cuda")
        others = [linear_problem(tokens, 576, 2048, **CASES[case], seed=seed, device="cuda")[0] for seed in (0, 5, 9)]
        want = [linear(other, weights, bias=bias, impl=impl) for other in others]
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            # What comes before writes x, so that a launch that does not wait reads too early.
            x.mul_(1.0)
            out = linear(x, weights, bias=bias, impl=impl)
        for index in (1, 2, 0, 1):
            x.copy_(others[index])
            out.fill_(float("nan"))
            graph.replay()
            assert torch.equal(out, want[index])


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("case", ["bf16", "fp8_tensor", "fp8_block", "int4", "nvfp4"])
def test_compiled_equals_eager(case, mode):
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, w, b: linear(x, w, bias=b) * 2, fullgraph=True, mode=mode)
    for tokens in (8, 96):
        x, weights, bias = linear_problem(tokens, 160, 512, **CASES[case], device="cuda")
        torch.compiler.cudagraph_mark_step_begin()
        got = compiled(x, weights, bias)
        torch.testing.assert_close(got, linear(x, weights, bias=bias) * 2, rtol=2**-7, atol=2**-7)


def test_nothing_waits_for_the_device():
    problems = [
        linear_problem(tokens, 160, 512, quant=quant.value, device="cuda") for quant in Quant for tokens in (1, 96)
    ]
    for x, weights, bias in problems:
        linear(x, weights, bias=bias)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for x, weights, bias in problems:
            linear(x, weights, bias=bias)
            linear(x, weights, bias=bias, impl="triton")
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_many_rows():
    x, weights, _ = linear_problem(8192, 272, 512, quant="fp8_block", device="cuda")
    out = linear(x, weights, impl="triton")
    check(out, x, weights)
    part = linear(x[-70:], weights, impl="triton")
    torch.testing.assert_close(out[-70:], part, rtol=2**-7, atol=2**-7)


def test_offsets_beyond_32_bits():
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB of free device memory")
    torch.manual_seed(0)
    w = torch.zeros(70_000, 32_768, dtype=torch.bfloat16, device="cuda")
    w[-3:] = torch.randn(3, 32_768, device="cuda").to(w.dtype)
    weights = LinearWeights(w=w, quant=Quant.BF16, dtype=w.dtype, N=70_000, K=32_768)
    last = dataclasses.replace(weights, w=w[-3:].contiguous(), N=3)
    for tokens in (1, 3, 80):
        x = torch.randn(tokens, 32_768, device="cuda").to(w.dtype)
        out = linear(x, weights, impl="triton")
        check(out[:, -3:].contiguous(), x, last)
        assert not out[:, :-3].any()
