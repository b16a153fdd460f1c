"""Activations in FP4: the quantiser by hand and compiled, and the specification of the layer on FP4 units."""

import pytest
import torch
from moe_kernels import Quant, fused_experts, resolve_config, resolve_impl, supports_impl
from moe_kernels.experts.config import flatten_config, unflatten_config
from moe_kernels.experts.reference import fused_experts_reference
from moe_kernels.experts.rule_fp4 import check_fp4
from moe_kernels.experts.rules import builtin_reasons
from moe_kernels.formats import FORMATS, format_for
from moe_kernels.quant.fp4 import (
    dequantize_fp4,
    product_columns,
    quantize_fp4,
    quantize_fp4_reference,
    through_fp4,
)
from moe_kernels.quant.pack import E2M1, unpack_nibbles
from moe_kernels.quant.weights import quantize_matrix
from moe_kernels.testing.oracle import error_budget, oracle, random_problem, relative_error

FP4 = [Quant.NVFP4, Quant.MXFP4]
BLOCK = {Quant.NVFP4: 16, Quant.MXFP4: 32}
# What FP4 weights and FP4 activations together do to the output of a layer with normal weights.
WHOLE = 0.35
# T, E, D, F, K
SHAPES = [(1, 1, 1, 1, 1), (5, 3, 40, 24, 3), (17, 5, 200, 72, 2), (3, 4, 130, 258, 1)]
CONFIG = {
    "BLOCK_SIZE_M": 16,
    "BLOCK_SIZE_N": 128,
    "BLOCK_SIZE_K": 128,
    "GROUP_SIZE_M": 4,
    "num_warps": 4,
    "num_stages": 3,
    "SWAP_AB": True,
}
each_format = pytest.mark.parametrize("quant", FP4)


def rows(count, columns, seed=0):
    """Rows and blocks of very different size."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, columns, generator=generator)
    spread = 4.0 ** torch.randint(-6, 7, (count, -(-columns // 16)), generator=generator)
    return x * spread.repeat_interleave(16, dim=1)[:, :columns]


@each_format
def test_ties_go_to_the_even_mantissa_and_large_values_end_at_six(quant):
    # The last column makes every scale 1: 6 is the largest e2m1, and 448 * 6 what nvfp4's whole row is measured by.
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -0.75, -5.0, 0.2501, 0.7499, 5.0001, 6.0]
    want = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 0.0, -1.0, -4.0, 0.5, 0.5, 6.0, 6.0]
    x = torch.zeros(1, 64)
    x[0, : len(ties)] = torch.tensor(ties)
    x[0, 63] = 2688.0
    assert through_fp4(x, quant)[0, : len(ties)].tolist() == want
    assert torch.equal(through_fp4(torch.tensor([[*E2M1, *(-value for value in E2M1)]]), Quant.MXFP4)[0].abs().unique(),
                       torch.tensor(E2M1))  # fmt: skip


def test_mxfp4_scales_by_the_power_of_two_of_the_largest_value():
    x = torch.zeros(1, 128)
    x[0, 0], x[0, 32], x[0, 64], x[0, 96] = 7.9, 1.0, 2.0**-130, 3e38
    got = quantize_fp4(x, Quant.MXFP4)
    assert got.scale.tolist() == [[127, 125, 0, 127 + 127 - 2]]
    assert dequantize_fp4(got, Quant.MXFP4, 128)[0, [0, 32, 96]].tolist() == [6.0, 1.0, 2.0**127 * 1.5]


def test_nvfp4_gives_every_row_a_factor_of_its_own():
    x = rows(7, 100)
    together = quantize_fp4(x, Quant.NVFP4)
    assert together.whole.shape == (7,)
    torch.testing.assert_close(together.whole, x.abs().amax(dim=1) / 2688.0, rtol=1e-6, atol=0)
    for row in range(7):  # what a token becomes depends on nothing else in the batch
        alone = quantize_fp4(x[row : row + 1], Quant.NVFP4)
        assert torch.equal(alone.data[0], together.data[row])
        assert torch.equal(alone.scale[0].view(torch.uint8), together.scale[row].view(torch.uint8))


@pytest.mark.parametrize("shape", [(1, 1), (3, 33), (7, 250), (5, 2880)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@each_format
def test_values_come_back_within_half_a_step(quant, dtype, shape):
    x = rows(*shape).clamp(-6e4, 6e4).to(dtype)
    got = quantize_fp4(x, quant)
    units = -(-shape[1] // 32)
    assert got.data.shape == (shape[0], 16 * units)
    assert got.scale.shape == (shape[0], units * 32 // BLOCK[quant])
    back = dequantize_fp4(got, quant, shape[1])
    padded = torch.nn.functional.pad(x.float(), (0, units * 32 - shape[1]))
    largest = padded.unflatten(1, (-1, BLOCK[quant])).abs().amax(dim=2)
    # e2m1's widest step is 2 of 6, half of it 1. mxfp4 maps the largest to 4 .. 8: up to 2 of 8 are cut off. nvfp4
    # rounds the scale to 4 bits, and small ones to multiples of 2^-9 of the row's: 6 * 2^-10 and half a step of 2^-9.
    allowed = largest * (0.25 if quant is Quant.MXFP4 else 1 / 6 + 1 / 16)
    if quant is Quant.NVFP4:
        allowed = allowed + got.whole[:, None] * 2.0**-9 * 4
    allowed = allowed.repeat_interleave(BLOCK[quant], dim=1)[:, : shape[1]]
    assert bool(((back - x.float()).abs() <= allowed * (1 + 1e-5)).all())


@each_format
def test_activations_are_stored_as_weights_are(quant):
    """One row's activations and the same numbers as a one-row matrix of weights give the same bytes."""
    x = rows(1, 96)
    got, want = quantize_fp4(x, quant), quantize_matrix(x, quant, torch.bfloat16)
    assert torch.equal(got.data, want.data)
    assert torch.equal(got.scale.view(torch.uint8), want.scale.view(torch.uint8))


@each_format
def test_zero_rows_and_blocks_are_exact_zeros(quant):
    x = rows(6, 130)
    x[1], x[2], x[3], x[4, 32:64] = 0.0, 1e-38, -0.0, 0.0
    x[5] = 1e-40
    got = quantize_fp4(x, quant)
    back = dequantize_fp4(got, quant, 130)
    assert not back[[1, 3]].any()
    assert not back[4, 32:64].any()
    assert back.isfinite().all()
    assert got.scale.float().isfinite().all()
    if quant is Quant.NVFP4:
        assert bool((got.whole > 0).all())
        assert not got.scale[1].float().any()
    else:
        assert int(got.scale.max()) < 255
        assert not got.scale[1].any()


@pytest.mark.parametrize("hostile", [float("nan"), float("inf"), -float("inf")])
@each_format
def test_values_that_are_not_finite_spoil_their_own_row(quant, hostile):
    x = rows(5, 140)
    clean = through_fp4(x, quant)
    x[3, 100] = hostile
    back = through_fp4(x, quant)
    spoilt = back.isnan()
    assert bool(spoilt[3, 96:128].all())
    assert bool(spoilt[3].all()) == (quant is Quant.NVFP4)
    assert not spoilt[[0, 1, 2, 4]].any()
    assert torch.equal(back[[0, 1, 2, 4]], clean[[0, 1, 2, 4]])


@pytest.mark.slow
# Inductor's first import uses a deprecated part of torch.
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@each_format
def test_compiled_and_eager_give_the_same_bits(quant, dtype):
    x = rows(9, 200).to(dtype)
    x[2], x[4, 16:48] = 0.0, 0.0
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: tuple(t for t in quantize_fp4(x, quant) if t is not None), fullgraph=True)
    want = [t for t in quantize_fp4(x, quant) if t is not None]
    spec = [t for t in quantize_fp4_reference(x, quant) if t is not None]
    for got, eager, exact in zip(compiled(x), want, spec, strict=True):
        assert (got.dtype, got.shape) == (eager.dtype, eager.shape)
        assert torch.equal(got.view(torch.uint8), eager.view(torch.uint8))
        assert torch.equal(exact.view(torch.uint8), eager.view(torch.uint8))


@each_format
def test_the_op_passes_opcheck(quant):
    torch.library.opcheck(
        torch.ops.moe_kernels.quantize_fp4.default, (rows(3, 40), quant.value),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )  # fmt: skip
    assert [t.shape[0] for t in quantize_fp4(torch.empty(0, 40), quant) if t is not None][:2] == [0, 0]


def test_a_product_of_packed_rows_only_moves_columns_within_a_block():
    x, w = rows(4, 96, seed=1), rows(5, 96, seed=2)
    got, other = quantize_fp4(x, Quant.MXFP4), quantize_fp4(w, Quant.MXFP4)
    order = product_columns(96)
    assert sorted(order.tolist()) == list(range(96))
    assert torch.equal(order // 16, torch.arange(96) // 16)
    nibbles = torch.stack((got.data & 15, got.data >> 4), dim=-1).flatten(1)  # as the tensor cores count columns
    assert torch.equal(nibbles, unpack_nibbles(got.data)[:, order])
    a, b = (dequantize_fp4(each, Quant.MXFP4, 96).double() for each in (got, other))
    torch.testing.assert_close(a[:, order] @ b[:, order].T, a @ b.T, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@each_format
def test_specification_within_a_few_roundings_of_float64(quant, shape, dtype):
    problem = random_problem(*shape, quant, dtype=dtype)
    problem[2].topk_ids[-1, -1] = -1
    out = fused_experts_reference(*problem, impl="triton_fp4")
    assert out.dtype == dtype
    error = relative_error(out, oracle(*problem, impl="triton_fp4"))
    assert error <= error_budget(*problem, impl="triton_fp4")
    # Products are float32 there: nothing but one value gone the other way and roundings of the output.
    bound = 3 * torch.finfo(dtype).eps + 1e-6 * max(shape) ** 0.5 + 1.0 / (shape[0] * shape[4] * shape[3]) ** 0.5
    assert error <= bound


@each_format
def test_activations_in_fp4_are_seen_by_the_oracle(quant):
    """The oracle of the weight-only path and that of FP4 units differ by what FP4 does to activations, and no more."""
    shape = (33, 4, 256, 128, 2)
    problem = random_problem(*shape, quant)
    _, plain, _ = random_problem(*shape, "fp32")
    out = fused_experts_reference(*problem, impl="triton_fp4")
    exact = oracle(problem[0].float(), plain, problem[2])
    assert relative_error(out, oracle(*problem)) > 2 * error_budget(*problem)
    assert 0.05 < relative_error(out, oracle(*problem)) < 0.25
    assert relative_error(out, exact) < WHOLE
    assert torch.equal(fused_experts(*problem), fused_experts_reference(*problem))  # weight-only as it was


@pytest.mark.slow
@each_format
def test_specification_compiles_into_one_graph(quant):
    problem = random_problem(5, 3, 72, 40, 2, quant, dtype=torch.float32)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x, routing: fused_experts_reference(x, problem[1], routing, impl="triton_fp4"),
        fullgraph=True,
        backend="aot_eager",
    )
    out = compiled(problem[0], problem[2])
    assert relative_error(out, oracle(*problem, impl="triton_fp4")) <= error_budget(*problem, impl="triton_fp4")


def test_formats_say_how_activations_are_treated():
    assert format_for(Quant.NVFP4) is FORMATS[Quant.NVFP4]
    assert format_for(Quant.NVFP4, "triton").weight_only
    native = format_for(Quant.MXFP4, "triton_fp4")
    assert (native.activation, native.granularity, native.weight_only) == ("fp4", "group", False)
    assert format_for(Quant.FP8_BLOCK, "triton_fp4") is FORMATS[Quant.FP8_BLOCK]


ASKED = {
    "num_experts": 8, "hidden_size": 64, "intermediate_size": 32, "compile": False, "graph": False,
}  # fmt: skip


def reasons(device_type, capability, quant="nvfp4", **more):
    asked = {**ASKED, "device_type": device_type, "quant": quant, "capability": capability, **more}
    return builtin_reasons("triton_fp4", **asked)


@each_format
def test_refused_in_one_sentence_where_there_are_no_fp4_units(quant):
    pytest.importorskip("triton")
    needs = "triton_fp4 needs FP4 units, which GPUs of compute capability 10.x and 12.x (Blackwell) have; "
    assert reasons("cuda", (9, 0), quant, device_name="NVIDIA H200") == [needs + "this device, NVIDIA H200, has 9.0."]
    assert reasons("cuda", (8, 9), quant) == [needs + "this device has 8.9."]
    assert reasons("cuda", (11, 0), quant) == [needs + "this device has 11.0."]
    assert reasons("cpu", None, quant) == [needs + "this device is of type cpu."]
    for capability in ((10, 0), (10, 3), (12, 0), (12, 1), None):
        assert reasons("cuda", capability, quant, compile=True, graph=True) == []


def test_other_formats_are_refused_by_name():
    pytest.importorskip("triton")
    for quant in ("bf16", "fp8_block", "int4"):
        assert reasons("cuda", (10, 0), quant) == [f"triton_fp4 multiplies nvfp4 and mxfp4, not {quant}."]


@each_format
def test_a_cpu_refuses_at_the_call(quant):
    pytest.importorskip("triton")
    problem = random_problem(3, 4, 64, 32, 2, quant)
    with pytest.raises(
        NotImplementedError, match=r"^impl 'triton_fp4' does not run here: triton_fp4 needs FP4 units.*"
    ):
        fused_experts(*problem, impl="triton_fp4")
    with pytest.raises(NotImplementedError, match="this device is of type cpu"):
        resolve_impl(*problem, "triton_fp4")
    assert resolve_impl(*problem) == "reference"
    ask = {"num_experts": 4, "hidden_size": 64, "intermediate_size": 32, "top_k": 2, "quant": quant.value}
    assert len(supports_impl("triton_fp4", device_type="cpu", dtype="bf16", **ask)) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@each_format
def test_a_gpu_without_fp4_units_refuses_at_the_call(quant):
    major, minor = torch.cuda.get_device_capability()
    if major in (10, 12):
        pytest.skip("this GPU has FP4 units")
    problem = random_problem(3, 4, 64, 32, 2, quant, device="cuda")
    with pytest.raises(NotImplementedError) as caught:
        fused_experts(*problem, impl="triton_fp4")
    assert f"{torch.cuda.get_device_name()}, has {major}.{minor}." in str(caught.value)
    assert resolve_impl(*problem) == "triton"


def test_the_configuration_is_told_and_checked():
    ask = {"num_experts": 8, "hidden_size": 256, "intermediate_size": 128, "top_k": 2, "dtype": torch.bfloat16}
    for tokens in (1, 64, 300, 4096):
        config, source = resolve_config(num_tokens=tokens, **ask, quant="nvfp4", impl="triton_fp4")
        assert "FP4 units" in source
        check_fp4(unflatten_config(tuple(flatten_config(config))), 2 * tokens)
    with pytest.raises(ValueError, match=r"^impl must be triton or triton_fp4; got 'reference'"):
        resolve_config(num_tokens=1, **ask, impl="reference")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"LAYOUT": "token", "BLOCK_SIZE_M": 1, "SWAP_AB": False}, "LAYOUT of up must be sorted or inline"),
        ({"SPLIT_K": 2}, "SPLIT_K of up must be 1"),
        ({"USE_TMA": True}, "USE_TMA of up must be False"),
        ({"BLOCK_SIZE_K": 32}, "BLOCK_SIZE_K of up must be at least 64"),
        ({"num_warps": 2}, "num_warps of up must be 4 or 8"),
        ({"BLOCK_SIZE_N": 32}, "BLOCK_SIZE_N of up must be at least 64 for triton_fp4 where SWAP_AB is set"),
        ({"BLOCK_SIZE_N": 64}, "BLOCK_SIZE_N of down must be at least 128 for triton_fp4 where SWAP_AB is set"),
        ({"BLOCK_SIZE_N": 256}, "BLOCK_SIZE_N of up must be at most 128"),
        ({"SWAP_AB": False}, "BLOCK_SIZE_M of up must be at least 128 for triton_fp4 without SWAP_AB"),
        ({"LAYOUT": "inline"}, "LAYOUT inline of up takes up to 1024 routed rows, not 2000"),
    ],
)
def test_what_would_leave_the_fp4_units_is_refused(change, message):
    config = unflatten_config(tuple(flatten_config({**CONFIG, **change})))
    with pytest.raises(ValueError, match=message):
        check_fp4(config, 2000)
