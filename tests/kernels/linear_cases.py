"""Linear layers through Triton's interpreter; test_linear_interpreted.py runs this file in a process that interprets.

The interpreter multiplies bf16 wrongly, so activations are float32 or float16 here.
"""

import pytest
import torch
from moe_kernels import LinearWeights, linear, resolve_linear_impl
from moe_kernels.projections import ops
from moe_kernels.projections.oracle import linear_budget, linear_oracle, linear_problem
from moe_kernels.projections.tiles import LinearConfig
from moe_kernels.testing.oracle import poison_allocator, relative_error

HALF = {"dtype": torch.float16}
FORMATS = {
    "fp32": {"quant": "fp32"},
    "fp16": {"quant": "fp16"},
    "fp8_tensor": {"quant": "fp8_tensor", **HALF},
    "fp8_channel": {"quant": "fp8_channel", **HALF},
    "fp8_block": {"quant": "fp8_block", **HALF},
    "int8": {"quant": "int8", **HALF},
    "int8_weight": {"quant": "int8_weight", **HALF},
    "int4-32": {"quant": "int4", "group_size": 32, **HALF},
    "int4-64": {"quant": "int4", "group_size": 64, "dtype": torch.float32},
    "int4-128-zeros": {"quant": "int4", "group_size": 128, "zero_points": True, **HALF},
    "nvfp4": {"quant": "nvfp4", **HALF},
    "mxfp4": {"quant": "mxfp4", **HALF},
}
QUANTIZED = ("fp8_tensor", "fp8_channel", "fp8_block", "int8")
CONFIGS = {
    "tiles": LinearConfig(block_m=16, block_n=16, block_k=64, group_m=2),
    "swapped": LinearConfig(block_m=16, block_n=64, block_k=128, swap_ab=True),
    "split": LinearConfig(block_m=16, block_n=32, block_k=64, split_k=3),
    "lanes": LinearConfig(block_m=1, block_n=4, block_k=128, lanes=True),
}
INSIDE = {
    "lanes-inside": LinearConfig(block_m=1, block_n=2, block_k=256, lanes=True, inside=True),
    "inside": LinearConfig(block_m=16, block_n=32, block_k=128, inside=True),
    "inside-split": LinearConfig(block_m=16, block_n=256, block_k=128, inside=True, swap_ab=True, split_k=2),
}
# The interpreter takes a second or so a case: one kind of tile for every format, all of them on a GPU.
CASES = [
    *((form, name) for form, name in zip(FORMATS, [*list(CONFIGS)[:3]] * 4, strict=True)),
    *((form, "lanes") for form in FORMATS),
    *((form, "lanes-inside") for form in QUANTIZED),
    *(("fp8_block", name) for name in ("tiles", "swapped", "inside", "inside-split")),
]


def check(out, problem, bias=None):
    assert out.dtype == problem[0].dtype
    assert relative_error(out, linear_oracle(*problem[:2], bias)) <= linear_budget(*problem[:2], bias)


@pytest.mark.parametrize(("form", "name"), CASES)
def test_within_budget(form, name):
    # Tails everywhere: neither N nor K is a multiple of 16, 32 or 128.
    config = {**CONFIGS, **INSIDE}[name]
    tokens, outputs = (2, 9) if config.lanes else (5, 137)
    x, weights, bias = linear_problem(tokens, outputs, 168, **FORMATS[form])
    before = x.clone()
    poison_allocator("cpu", tokens * outputs * 4, tokens * outputs * 2, config.split_k * tokens * outputs * 4)
    check(ops.linear_triton(x, weights, bias, config), (x, weights), bias)
    assert torch.equal(x, before)


@pytest.mark.parametrize("form", FORMATS)
def test_default_tiles_at_odd_sizes(form):
    for size in ((1, 1, 1), (1, 7, 257), (2, 1, 33), (35, 9, 129)):
        x, weights, _ = linear_problem(*size, **FORMATS[form])
        poison_allocator("cpu", size[0] * size[1] * 4, size[0] * size[1] * 2)
        check(linear(x, weights, impl="triton"), (x, weights))


@pytest.mark.parametrize(("form", "split_k"), [("fp16", 2), ("fp8_block", 5), ("nvfp4", 8), ("int8", 16)])
def test_splits_of_any_number_repeat_bit_by_bit(form, split_k):
    x, weights, bias = linear_problem(4, 40, 1000, **FORMATS[form])
    config = LinearConfig(block_m=16, block_n=32, block_k=128, split_k=split_k)
    results = []
    for value in (float("nan"), 1e30):
        poison_allocator("cpu", split_k * 4 * 40 * 4, 4 * 40 * 2, value=value)
        results.append(ops.linear_triton(x, weights, bias, config))
        check(results[-1], (x, weights), bias)
    assert torch.equal(*results)


@pytest.mark.parametrize("form", QUANTIZED)
def test_rounding_inside_gives_the_same_bits(form):
    x, weights, _ = linear_problem(2, 5, 200, **FORMATS[form])
    x[0, 3], x[1, 170] = 6e4, 0.0
    config = INSIDE["lanes-inside"]
    inside = ops.linear_triton(x, weights, None, config)
    apart = LinearConfig(block_m=1, block_n=2, block_k=256, lanes=True)
    assert torch.equal(inside, ops.linear_triton(x, weights, None, apart))


# The interpreter makes a number of a NaN in e4m3: test_linear_gpu.py has the formats that quantise to it.
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize(
    ("form", "name"), [("fp16", "tiles"), ("int4-32", "tiles"), ("int8", "tiles"), ("int8", "lanes-inside")]
)
def test_a_value_that_is_not_finite_stays_in_its_row(form, name):
    x, weights, _ = linear_problem(4, 6, 168, **FORMATS[form])
    x[1, 7], x[2, 160] = float("nan"), float("inf")
    out = ops.linear_triton(x, weights, None, {**CONFIGS, **INSIDE}[name])
    want = linear(x, weights, impl="reference")
    assert torch.equal(torch.isfinite(out), torch.isfinite(want))
    assert bool(torch.isnan(out[1]).all())
    torch.testing.assert_close(out[::3], want[::3], rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("config", [None, CONFIGS["split"], CONFIGS["lanes"]], ids=["default", "split", "lanes"])
@pytest.mark.parametrize("form", ["fp32", "fp8_block", "int4-32"])
def test_x_as_a_view_and_wide_offsets(form, config, monkeypatch):
    x, weights, bias = linear_problem(2, 9, 96, **FORMATS[form])
    want = ops.linear_triton(x, weights, bias, config)
    wide = torch.full((2, 200), float("nan"), dtype=x.dtype)
    wide[:, 7:103] = x
    assert torch.equal(ops.linear_triton(wide[:, 7:103], weights, bias, config), want)
    wide[:, 0:192:2] = x
    assert torch.equal(ops.linear_triton(wide[:, 0:192:2], weights, bias, config), want)
    monkeypatch.setattr("moe_kernels.projections.triton._INT32_MAX", 0)
    assert torch.equal(ops.linear_triton(x, weights, bias, config), want)


@pytest.mark.parametrize("form", ["fp16", "fp8_channel", "mxfp4"])
def test_tensor_maps_give_the_same(form):
    x, weights, _ = linear_problem(5, 70, 96, **FORMATS[form])
    for swap in (False, True):
        config = LinearConfig(block_m=16, block_n=32, block_k=64, swap_ab=swap)
        maps = LinearConfig(block_m=16, block_n=32, block_k=64, swap_ab=swap, use_tma=True)
        assert torch.equal(ops.linear_triton(x, weights, None, maps), ops.linear_triton(x, weights, None, config))


def test_rows_do_not_depend_on_their_batch():
    x, weights, _ = linear_problem(20, 33, 136, **FORMATS["fp8_channel"])
    whole = linear(x, weights, impl="triton")
    for start, end in ((0, 1), (1, 4), (4, 20)):
        torch.testing.assert_close(linear(x[start:end], weights, impl="triton"), whole[start:end], rtol=2e-3, atol=1e-3)


def test_no_tokens():
    weights = LinearWeights.from_dense(torch.ones(3, 40), "int8", dtype=torch.float32)
    assert linear(torch.empty(0, 40), weights, bias=torch.ones(3), impl="triton").shape == (0, 3)
    assert ops.linear_triton(torch.empty(0, 40), weights).shape == (0, 3)


@pytest.mark.parametrize("form", ["fp16", "fp8_block", "int4-128-zeros", "nvfp4"])
def test_compiled_public_function_and_opcheck(form):
    x, weights, bias = linear_problem(3, 17, 40, **FORMATS[form])
    compiled = torch.compile(
        lambda x, w, b: linear(x, w, bias=b, impl="triton"), fullgraph=True, backend="aot_eager", dynamic=True
    )
    for rows in (x, x[:2]):
        assert torch.equal(compiled(rows, weights, bias), linear(rows, weights, bias=bias, impl="triton"))
    stored = (weights.w, weights.scale, weights.zero, weights.global_scale)
    before = [None if tensor is None else tensor.clone() for tensor in stored]
    args = (x, *stored, bias, weights.quant.value, 17, weights.group_size, [])
    # Whether an argument was written to is asked by a product, which torch does not have for e4m3.
    e4m3 = any(tensor is not None and tensor.dtype == torch.float8_e4m3fn for tensor in stored)
    utils = ("test_schema",) * (not e4m3) + (
        "test_autograd_registration",
        "test_faketensor",
        "test_aot_dispatch_dynamic",
    )
    torch.library.opcheck(torch.ops.moe_kernels.linear_triton.default, args, test_utils=utils)
    for tensor, copy in zip(stored, before, strict=True):
        assert tensor is None or torch.equal(tensor.float(), copy.float())


def test_interpreter_is_told():
    x, weights, _ = linear_problem(2, 5, 32, "fp16")
    assert resolve_linear_impl(x, weights, "triton") == "triton"
    with pytest.raises(NotImplementedError, match="bf16 matrices wrongly"):
        linear(x.bfloat16(), LinearWeights.from_dense(torch.ones(5, 32)), impl="triton")
