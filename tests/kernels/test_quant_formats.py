"""Conversion of weights: packing by hand, steps, zeros, large values, tails, and the same bits compiled."""

import pytest
import torch
from moe_kernels import ExpertWeights, Quant
from moe_kernels.quant.pack import E2M1, from_e2m1, pack_nibbles, to_e2m1, unpack_nibbles
from moe_kernels.quant.weights import Stored, dequantize_matrix, e8m0_value, quantize_matrix

FORMATS = {
    "fp8_tensor": ("fp8_tensor", {}),
    "fp8_channel": ("fp8_channel", {}),
    "fp8_block": ("fp8_block", {}),
    "int8": ("int8", {}),
    "int8_weight": ("int8_weight", {}),
    "int4-32": ("int4", {"group_size": 32}),
    "int4-64-zeros": ("int4", {"group_size": 64, "zero_points": True}),
    "int4-128": ("int4", {"group_size": 128}),
    "int4-128-zeros": ("int4", {"group_size": 128, "zero_points": True}),
    "nvfp4": ("nvfp4", {}),
    "mxfp4": ("mxfp4", {}),
}
EIGHT_BITS = ("fp8_tensor", "fp8_channel", "fp8_block", "int8", "int8_weight")
PACKED = tuple(name for name in FORMATS if name not in EIGHT_BITS)
each_format = pytest.mark.parametrize("form", FORMATS)


def store(w, form, dtype=torch.bfloat16):
    quant, options = FORMATS[form]
    return quantize_matrix(w, Quant(quant), dtype, **options)


def restore(stored, form, columns):
    quant, options = FORMATS[form]
    return dequantize_matrix(stored, Quant(quant), columns, options.get("group_size", 0))


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def spread(rows, columns, seed=0):
    """Rows up to 1000 times larger than others."""
    return randn(rows, columns, seed=seed) * 10.0 ** (torch.arange(rows) % 4)[:, None]


def scales_of_columns(stored, form, columns, rows):
    """float32 ``[rows, columns]``: the scale that each weight is stored with."""
    quant, options = FORMATS[form]
    scale = e8m0_value(stored.scale) if quant == "mxfp4" else stored.scale.float()
    if quant == "fp8_block":
        return scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    width = {"nvfp4": 16, "mxfp4": 32, "int4": options.get("group_size")}.get(quant, columns)
    scale = scale.repeat_interleave(width, 1)[:, :columns]
    return (scale * stored.whole if quant == "nvfp4" else scale).expand(rows, columns)


@pytest.mark.parametrize("shape", [(1, 1), (3, 33), (130, 200), (258, 129), (5, 2880)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@each_format
def test_values_come_back_within_half_a_step(form, dtype, shape):
    w = spread(*shape)
    stored = store(w, form, dtype)
    got = restore(stored, form, shape[1])
    assert got.shape == w.shape
    assert got.dtype == torch.float32
    scale = scales_of_columns(stored, form, shape[1], shape[0])
    scaled = w.double().abs() / scale.double().clamp_min(1e-300)
    quant = FORMATS[form][0]
    if quant.startswith("int"):
        step = torch.ones_like(scaled)
    else:
        # Steps of a float format: a power of two below the value, but never below the subnormals' own.
        mantissa, smallest = (3, -9) if quant.startswith("fp8") else (1, -1)
        step = torch.exp2(torch.floor(torch.log2(scaled.clamp_min(1e-300))) - mantissa).clamp_min(2.0**smallest)
        if quant.endswith("fp4"):
            # From 4 on steps are 2. mxfp4 cuts values between 6 and 8 off, as its scale is a power of two.
            step = step.clamp_max(2.0) + 2 * (scaled - 7).clamp_min(0.0)
    error = (got.double() - w.double()).abs()
    # A few roundings in float32, and the largest value over a scale that was rounded down to dtype.
    slack = 2.0**-20 * w.double().abs() + (2.0**-7 * w.double().abs() if quant == "int4" else 0.0)
    assert bool((error <= step / 2 * scale + slack).all())
    assert (got - w).norm() / w.norm() < {"fp8": 0.05, "int": 0.17, "nvf": 0.13, "mxf": 0.2}[quant[:3]]


def test_packing_by_hand():
    nibbles = torch.zeros(2, 64, dtype=torch.uint8)
    nibbles[0, 0], nibbles[0, 8], nibbles[0, 7], nibbles[0, 15] = 0x1, 0x2, 0x3, 0x4
    nibbles[1, 32], nibbles[1, 40], nibbles[1, 33] = 0xF, 0xE, 0x7
    packed = pack_nibbles(nibbles)
    assert packed.shape == (2, 32)
    assert (packed[0, 0].item(), packed[0, 7].item(), packed[1, 16].item(), packed[1, 17].item()) == (
        0x21, 0x43, 0xEF, 0x07,
    )  # fmt: skip
    assert int((packed != 0).sum()) == 4
    assert torch.equal(unpack_nibbles(packed), nibbles)


def test_e2m1_by_hand():
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert list(E2M1) == values
    assert to_e2m1(torch.tensor(values)).tolist() == list(range(8))
    assert to_e2m1(-torch.tensor(values[1:])).tolist() == list(range(9, 16))
    assert from_e2m1(torch.arange(16).to(torch.uint8)).tolist() == values + [-v for v in values]
    # Ties go to the even mantissa: 0.25 -> 0, 0.75 -> 1, 1.25 -> 1, 1.75 -> 2, 2.5 -> 2, 3.5 -> 4, 5 -> 4; 6 is most.
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.01, 7.9, -1.75, -0.75, 0.2501])
    assert from_e2m1(to_e2m1(ties)).tolist() == [0, 1, 1, 2, 2, 4, 4, 6, 6, -2, -1, 0.5]


def test_int4_by_hand():
    w = torch.zeros(1, 33)
    w[0, :4], w[0, 32] = torch.tensor([7.0, -7.0, 3.4, -2.5]), 14.0
    stored = quantize_matrix(w, Quant.INT4, torch.float32, 32)
    assert stored.scale.tolist() == [[1.0, 2.0]]
    assert stored.data.shape == (1, 32)
    assert [byte & 15 for byte in stored.data[0, :5].tolist()] == [15, 1, 11, 6, 8]
    assert stored.data[0, 16].item() == 0x8F  # column 32, and column 40, which is padding and stands for zero
    assert restore(stored, "int4-32", 33)[0, [0, 1, 2, 3, 32]].tolist() == [7, -7, 3, -2, 14]
    w[0, :4] = torch.tensor([10.0, -5.0, 4.6, 0.0])
    stored = quantize_matrix(w[:, :32].contiguous(), Quant.INT4, torch.float32, 32, True)
    assert (stored.scale.item(), stored.zero.item()) == (1.0, 5)
    assert [byte & 15 for byte in stored.data[0, :5].tolist()] == [15, 0, 10, 5, 5]


def test_fp4_scales_by_hand():
    w = torch.zeros(2, 32)
    w[0, 0], w[0, 8], w[0, 16], w[1, 5] = 6 * 448.0, -6 * 448.0, 6.0, -3.0
    stored = quantize_matrix(w, Quant.NVFP4, torch.bfloat16)
    assert stored.whole.item() == 1.0
    assert stored.scale.float().tolist() == [[448.0, 1.0], [0.5, 0.0]]
    assert (stored.data[0, 0].item(), stored.data[0, 8].item()) == (0xF7, 0x07)
    assert (stored.data[1, 5].item() & 15) == 15
    w = torch.tensor([[1.0, 7.9, 0.0] + [0.0] * 29, [0.011] + [0.0] * 31])
    stored = quantize_matrix(w, Quant.MXFP4, torch.bfloat16)
    # 7.9 is in [4, 8), the range of the largest power of two of e2m1: scale 1. 0.011 is in [2^-7, 2^-6): 2^-9.
    assert stored.scale.flatten().tolist() == [127, 127 - 9]
    assert restore(stored, "mxfp4", 3)[0].tolist() == [1.0, 6.0, 0.0]


def test_e8m0_reaches_every_power_of_two():
    stored = torch.arange(255).to(torch.uint8)
    assert torch.equal(e8m0_value(stored).double(), 2.0 ** (torch.arange(255).double() - 127))


@each_format
def test_zeros_stay_zeros_and_leave_others_alone(form):
    w = randn(260, 300)
    w[3], w[128:256, 128:256], w[7, 32:64], w[9], w[11] = 0.0, 0.0, 0.0, 1e-30, 1e-42
    stored = store(w, form)
    got = restore(stored, form, 300)
    assert not got[3].any()
    assert not got[128:256, 128:256].any()
    assert not got[7, 32:64].any()
    assert bool(torch.isfinite(got).all())
    assert bool(torch.isfinite(stored.scale.float()).all())
    assert stored.whole is None or bool(torch.isfinite(stored.whole) & (stored.whole > 0))
    if form != "nvfp4":  # a zero block's own scale is 0 there, and nothing is divided by it
        assert bool((stored.scale.float() > 0).all()) or form == "mxfp4"
    if form not in ("fp8_tensor", "nvfp4"):
        single = store(w[5:6], form)
        if form != "fp8_block":
            assert torch.equal(restore(single, form, 300), got[5:6])
    zero = store(torch.zeros(130, 64), form)
    assert not restore(zero, form, 64).any()
    assert bool(torch.isfinite(zero.scale.float()).all())


@pytest.mark.parametrize("factor", [1.0, 1e4, 1e30, 1e-30])
@each_format
def test_large_and_small_weights_stay_finite(form, factor):
    w = randn(40, 200) * factor
    stored = store(w, form)
    got = restore(stored, form, 200)
    assert bool(torch.isfinite(got).all())
    if not (form.startswith("int4") and factor == 1e-30):
        assert (got / factor - w / factor).norm() < 0.2 * (w / factor).norm()


def test_int4_scales_past_float16_saturate():
    stored = quantize_matrix(torch.full((2, 64), 1e30), Quant.INT4, torch.float16, 64)
    assert stored.scale.tolist() == [[65504.0]] * 2
    stored = quantize_matrix(torch.full((2, 64), 1e-20), Quant.INT4, torch.float16, 64)
    assert bool((stored.scale > 0).all())
    assert not restore(stored, "int4-64-zeros", 64).any()


def test_rows_far_apart_keep_their_own_scales():
    w = randn(64, 256)
    w[32:] *= 100.0
    for form in ("fp8_channel", "int8", "int8_weight", "int4-32", "mxfp4", "nvfp4"):
        got = restore(store(w, form), form, 256)
        for half in (slice(0, 32), slice(32, 64)):
            assert (got[half] - w[half]).norm() < 0.22 * w[half].norm()


@each_format
def test_scales_of_gate_and_up_are_their_own(form):
    quant, options = FORMATS[form]
    w1, w2 = randn(2, 2 * 70, 96), randn(2, 96, 70, seed=1)
    w1[:, :70] *= 1.0 / w1[:, :70].abs().amax()
    w1[:, 70:] *= 10.0 / w1[:, 70:].abs().amax()
    weights = ExpertWeights.from_dense(w1, w2, quant, **options)
    got, _ = weights.dequantize()
    for half in (slice(0, 70), slice(70, 140)):
        assert (got[:, half] - w1[:, half]).norm() < 0.2 * w1[:, half].norm()
    if quant == "nvfp4":
        assert weights.w1_global.shape == (2, 2)
        largest = w1.view(2, 2, -1).abs().amax(dim=2)
        torch.testing.assert_close(weights.w1_global, largest / (6 * 448), rtol=1e-6, atol=0)
        torch.testing.assert_close(weights.w2_global, w2.abs().amax(dim=(1, 2)) / (6 * 448), rtol=1e-6, atol=0)
    if quant == "fp8_tensor":
        torch.testing.assert_close(weights.w1_scale.flatten(2)[:, 1].amax(), torch.tensor(10 / 448), rtol=1e-6, atol=0)


@pytest.mark.parametrize(("rows", "columns"), [(258, 32), (258, 2880), (192, 1344), (80, 33), (96, 320), (64, 384)])
@each_format
def test_tails_of_rows_and_columns(form, rows, columns):
    """What lies past the end changes nothing: a matrix cut out of a wider, zero one gives the same."""
    w = spread(rows, columns)
    stored = store(w, form)
    units, groups = -(-columns // 32), FORMATS[form][1].get("group_size", 1)
    assert stored.data.shape == (rows, 16 * units if form in PACKED else columns)
    scales = {"fp8_tensor": (1, 1), "fp8_block": (-(-rows // 128), -(-columns // 128)), "nvfp4": (rows, 2 * units)}
    scales |= {"mxfp4": (rows, units)} | {name: (rows, -(-columns // groups)) for name in FORMATS if "int4" in name}
    assert stored.scale.shape == scales.get(form, (rows, 1))
    wide = torch.zeros(-(-rows // 128) * 128, -(-columns // 128) * 128)
    wide[:rows, :columns] = w
    got = restore(store(wide, form), form, wide.shape[1])
    assert torch.equal(got[:rows, :columns], restore(stored, form, columns))
    assert not got[rows:].any()
    assert not got[:, columns:].any()


@pytest.mark.parametrize("rows", [64, 80, 96, 192, 320, 384])
def test_blocks_begin_anew_with_up(rows):
    """Gate and up have blocks of their own, also where F is no multiple of 128; scales by hand."""
    w1, w2 = randn(2, 2 * rows, 256), randn(2, 256, rows, seed=1)
    weights = ExpertWeights.from_dense(w1, w2, "fp8_block")
    blocks = -(-rows // 128)
    assert weights.w1_scale.shape == (2, 2, blocks, 2)
    assert weights.w2_scale.shape == (2, 2, blocks)
    for half in (0, 1):
        matrix = w1[1, half * rows : (half + 1) * rows]
        for n in range(blocks):
            for k in range(2):
                largest = matrix[n * 128 : (n + 1) * 128, k * 128 : (k + 1) * 128].abs().amax()
                assert weights.w1_scale[1, half, n, k] == largest / torch.tensor(448.0)
    got_w1, got_w2 = weights.dequantize()
    assert (got_w1 - w1).norm() < 0.04 * w1.norm()
    assert (got_w2 - w2).norm() < 0.04 * w2.norm()


def hostile_matrix():
    w = spread(130, 200)
    w[3], w[5, 0], w[7], w[8], w[11], w[40, 32:64] = 0.0, -0.0, 1e-30, 1e4, 1e-42, 0.0
    w[12] *= 1e30
    return w


# Inductor's first import uses a deprecated part of torch.
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.slow
@each_format
def test_compiled_gives_the_same_bits(form):
    w = hostile_matrix()
    for dtype in (torch.bfloat16, torch.float16):
        want = [t for t in store(w, form, dtype) if t is not None]
        torch._dynamo.reset()
        got = torch.compile(lambda w, d=dtype: [t for t in store(w, form, d) if t is not None], fullgraph=True)(w)
        assert len(got) == len(want)
        for g, t in zip(got, want, strict=True):
            assert (g.dtype, g.shape) == (t.dtype, t.shape)
            assert torch.equal(g.reshape(-1).view(torch.uint8), t.reshape(-1).view(torch.uint8))


@each_format
def test_the_op_passes_opcheck(form):
    quant, options = FORMATS[form]
    args = (randn(40, 70), quant, torch.bfloat16, options.get("group_size", 128), options.get("zero_points", False))
    torch.library.opcheck(
        torch.ops.moe_kernels.quantize_matrix.default, args, test_utils=("test_schema", "test_faketensor")
    )


def test_values_at_the_end_of_e4m3():
    """Clamped before they are converted: a scale of 1 comes of a largest value of 448."""
    w = torch.tensor([[448.0, 447.9, -448.0, 432.1, 17.0, 2.0**-10]])
    got = restore(store(w, "fp8_tensor"), "fp8_tensor", 6)
    assert got.tolist() == [[448.0, 448.0, -448.0, 448.0, 16.0, 0.0]]


@each_format
def test_deterministic_algorithms_and_weights_of_one_element(form):
    quant, options = FORMATS[form]
    torch.use_deterministic_algorithms(True)
    try:
        weights = ExpertWeights.from_dense(torch.tensor([[[3.0], [-2.0]]]), torch.tensor([[[0.5]]]), quant, **options)
        w1, w2 = weights.dequantize()
    finally:
        torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(w1, torch.tensor([[[3.0], [-2.0]]]), rtol=0.07, atol=0)
    torch.testing.assert_close(w2, torch.tensor([[[0.5]]]), rtol=0.07, atol=0)


def test_stored_names_what_is_absent():
    stored = store(randn(3, 32), "int8")
    assert isinstance(stored, Stored)
    assert stored.zero is None
    assert stored.whole is None
