"""ExpertWeights in every format: what is stored where, how much of it, moving, joining, and what is refused."""

import pytest
import torch
from moe_kernels import ExpertWeights
from moe_kernels.formats import FORMATS as FACTS
from moe_kernels.formats import expert_bytes

E, D, F = 3, 200, 72
FORMATS = {
    "fp32": {},
    "bf16": {},
    "fp16": {},
    "fp8_tensor": {},
    "fp8_channel": {},
    "fp8_block": {},
    "int8": {},
    "int8_weight": {},
    "int4": {"group_size": 64, "zero_points": True},
    "nvfp4": {},
    "mxfp4": {},
}
each_format = pytest.mark.parametrize("quant", FORMATS)
QUANTIZED = [name for name in FORMATS if FACTS[name].quantized]


def dense(experts=E, hidden=D, ffn=F, seed=0):
    generator = torch.Generator().manual_seed(seed)
    w1 = torch.randn(experts, 2 * ffn, hidden, generator=generator) / hidden**0.5
    return w1, torch.randn(experts, hidden, ffn, generator=generator) / ffn**0.5


def made(quant, *sizes, **options):
    return ExpertWeights.from_dense(*dense(*sizes), quant, **{**FORMATS[quant], **options})


def same(first, second):
    assert first.tensors().keys() == second.tensors().keys()
    for name, tensor in first.tensors().items():
        other = second.tensors()[name]
        assert (tensor.dtype, tensor.shape) == (other.dtype, other.shape)
        assert torch.equal(tensor.view(torch.uint8), other.view(torch.uint8)), name


@each_format
def test_shapes_dtypes_and_bytes(quant):
    weights = made(quant)
    f32, f8, u8 = torch.float32, torch.float8_e4m3fn, torch.uint8
    shapes = {"w1": (E, 2 * F, D), "w2": (E, D, F)}
    packed = {"w1": (E, 2 * F, 112), "w2": (E, D, 48)}  # 200 columns are 7 units of 16 bytes, 72 are 3
    rows = {"w1_scale": (E, 2, F, 1), "w2_scale": (E, D, 1)}
    want = {
        "fp8_tensor": (f8, f32, shapes | {"w1_scale": (E, 2, 1, 1), "w2_scale": (E, 1, 1)}),
        "fp8_channel": (f8, f32, shapes | rows),
        "fp8_block": (f8, f32, shapes | {"w1_scale": (E, 2, 1, 2), "w2_scale": (E, 2, 1)}),
        "int8": (torch.int8, f32, shapes | rows),
        "int8_weight": (torch.int8, f32, shapes | rows),
        "int4": (u8, torch.bfloat16, packed | {"w1_scale": (E, 2, F, 4), "w2_scale": (E, D, 2)}),
        "nvfp4": (u8, f8, packed | {"w1_scale": (E, 2, F, 14), "w2_scale": (E, D, 6)}),
        "mxfp4": (u8, u8, packed | {"w1_scale": (E, 2, F, 7), "w2_scale": (E, D, 3)}),
    }
    plain = {"fp32": f32, "bf16": torch.bfloat16, "fp16": torch.float16}
    data, scale, sizes = want.get(quant, (plain.get(quant), None, shapes))
    if quant == "int4":
        sizes |= {"w1_zero": sizes["w1_scale"], "w2_zero": sizes["w2_scale"]}
        assert weights.w1_zero.dtype == weights.w2_zero.dtype == u8
    if quant == "nvfp4":
        sizes |= {"w1_global": (E, 2), "w2_global": (E,)}
        assert weights.w1_global.dtype == weights.w2_global.dtype == f32
    assert {name: tuple(t.shape) for name, t in weights.tensors().items()} == sizes
    assert weights.w1.dtype == weights.w2.dtype == data
    assert scale is None or weights.w1_scale.dtype == weights.w2_scale.dtype == scale
    assert all(t.is_contiguous() for t in weights.tensors().values())
    assert (weights.hidden_size, weights.intermediate_size) == (D, F)
    assert (weights.num_experts, weights.num_routed, weights.num_shared) == (E, E, 0)
    assert weights.dtype == plain.get(quant, torch.bfloat16)
    assert weights.group_size == (64 if quant == "int4" else 0)
    options = {"group_size": 64, "zero_points": True} if quant == "int4" else {}
    assert weights.nbytes == expert_bytes(quant, D, F, **options) * E


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("quant", QUANTIZED)
def test_dtype_of_activations_beside_quantised_weights(quant, dtype):
    weights = made(quant, dtype=dtype)
    assert weights.dtype == dtype
    if quant == "int4":
        assert weights.w1_scale.dtype == dtype


@each_format
def test_dequantised_values(quant):
    weights = made(quant)
    w1, w2 = weights.dequantize()
    assert w1.dtype == w2.dtype == torch.float32
    for got, want in zip((w1, w2), dense(), strict=True):
        assert got.shape == want.shape
        assert (got - want).norm() < 0.17 * want.norm()
    for index in range(E):
        one, two = weights.dequantize_expert(index)
        assert torch.equal(one, w1[index])
        assert torch.equal(two, w2[index])


@each_format
def test_experts_come_one_by_one(quant):
    """No expert is asked for before the one before it was stored; the result is that of dense weights."""
    w1, w2 = dense()
    asked = []

    def experts():
        for index in range(E):
            asked.append(index)
            pair = w1[index].clone(), w2[index].clone()
            yield pair
            for tensor in pair:  # whoever kept it keeps nonsense
                tensor.fill_(float("nan"))

    weights = ExpertWeights.from_experts(experts(), E, quant, **FORMATS[quant])
    assert asked == [0, 1, 2]
    same(weights, made(quant))


@each_format
def test_sources_of_any_dtype_that_require_gradients(quant):
    w1, w2 = (w.to(torch.float64).requires_grad_() for w in dense())
    weights = ExpertWeights.from_dense(w1, w2, quant, **FORMATS[quant])
    same(weights, made(quant))
    assert not any(t.requires_grad for t in weights.tensors().values())
    pairs = ((a, b) for a, b in zip(w1, w2, strict=True))
    streamed = ExpertWeights.from_experts(pairs, E, quant, **FORMATS[quant])
    assert not any(t.requires_grad for t in streamed.tensors().values())


@each_format
def test_moved_weights_are_the_same(quant):
    options = {"x_scale": 0.5, "h_scale": 0.25} if quant == "fp8_tensor" else {}
    weights = made(quant, **options)
    same(weights.to("cpu"), weights)
    moved = weights.to("meta")
    assert {t.device.type for t in moved.tensors().values()} == {"meta"}
    assert (moved.quant, moved.dtype, moved.group_size) == (weights.quant, weights.dtype, weights.group_size)


@each_format
def test_shared_experts_come_last(quant):
    routed, shared = made(quant), ExpertWeights.from_dense(*dense(2, seed=7), quant, **FORMATS[quant])
    joined = routed.with_shared(shared)
    assert (joined.num_experts, joined.num_shared, joined.num_routed) == (E + 2, 2, E)
    both = [torch.cat(pair) for pair in zip(dense(), dense(2, seed=7), strict=True)]
    same(joined, ExpertWeights.from_dense(*both, quant, **FORMATS[quant]))
    assert joined.with_shared(shared).num_shared == 4


def test_static_scales():
    weights = made("fp8_tensor", x_scale=0.5, h_scale=torch.tensor(0.25))
    assert (weights.x_scale.tolist(), weights.h_scale.tolist()) == ([0.5], [0.25])
    assert weights.x_scale.dtype == torch.float32
    assert made("fp8_tensor").x_scale is None
    joined = weights.with_shared(weights)
    assert joined.x_scale.tolist() == [0.5]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e300])
@pytest.mark.parametrize("quant", QUANTIZED)
def test_weights_that_are_not_finite_are_refused(quant, value):
    w1, w2 = (w.double() for w in dense())
    w1[2, 5, 7] = value
    with pytest.raises(ValueError, match=r"^w1 of expert 2 must hold finite values to be quantised"):
        ExpertWeights.from_dense(w1, w2, quant, **FORMATS[quant])
    w1, w2 = (w.double() for w in dense())
    w2[0, 1, 1] = value
    with pytest.raises(ValueError, match=r"^w2 of expert 0 must hold finite values"):
        ExpertWeights.from_dense(w1, w2, quant, **FORMATS[quant])


def test_plain_formats_keep_what_is_not_finite():
    w1, w2 = dense()
    w1[0, 0, 0] = float("inf")
    assert ExpertWeights.from_dense(w1, w2, "bf16").w1[0, 0, 0].item() == float("inf")


def test_arguments_are_refused_by_name():
    w1, w2 = dense()
    for match, options in (
        (r"^quant must be one of fp32, bf16, .*mxfp4; got 'int3'", {"quant": "int3"}),
        (r"^dtype must be None or torch.bfloat16 for bf16; got torch.float16", {"dtype": torch.float16}),
        (r"^dtype must be one of", {"quant": "int8", "dtype": torch.float64}),
        (r"^group_size must be one of 32, 64, 128; got 48", {"quant": "int4", "group_size": 48}),
        (r"^zero_points must be False for mxfp4", {"quant": "mxfp4", "zero_points": True}),
        (r"^x_scale and h_scale must be given together", {"quant": "fp8_tensor", "x_scale": 1.0}),
        (r"^x_scale and h_scale must be None for fp8_block", {"quant": "fp8_block", "x_scale": 1.0, "h_scale": 1.0}),
        (r"^x_scale and h_scale must be None for bf16", {"x_scale": 1.0, "h_scale": 1.0}),
        (r"^x_scale must be a finite number above 0; got 0", {"quant": "fp8_tensor", "x_scale": 0.0, "h_scale": 1.0}),
        (r"^h_scale must be a finite", {"quant": "fp8_tensor", "x_scale": 1.0, "h_scale": float("nan")}),
    ):
        with pytest.raises(ValueError, match=match):
            ExpertWeights.from_dense(w1, w2, **options)
    for bad in (w1[0], w1[:, :-1], w1[:, :, :-1], w1.int()):
        with pytest.raises(ValueError, match=r"^w1_E2FD"):
            ExpertWeights.from_dense(bad, w2, "int8")
    pairs = list(zip(w1, w2, strict=True))
    for count in (2, 4):
        with pytest.raises(ValueError, match=rf"^experts must be {count}, as num_experts says"):
            ExpertWeights.from_experts(iter(pairs), count, "nvfp4")
    with pytest.raises(ValueError, match=r"^expert 1 must have w1 \[144, 200\] and w2 \[200, 72\]; got"):
        ExpertWeights.from_experts([pairs[0], (w1[1, :-2], w2[1])], 2, "int8")


def test_shared_experts_of_another_kind_are_refused():
    weights = made("int4")
    for field, other in (
        ("quant", made("nvfp4")),
        ("dtype", made("int4", dtype=torch.float16)),
        ("intermediate_size", made("int4", 1, D, 64)),
        ("group_size", made("int4", group_size=32)),
    ):
        with pytest.raises(ValueError, match=rf"^{field} of shared must be that of the routed experts"):
            weights.with_shared(other)
    with pytest.raises(ValueError, match=r"^shared must have zero points"):
        weights.with_shared(made("int4", zero_points=False))
    static = made("fp8_tensor", x_scale=0.5, h_scale=0.5)
    for other in (made("fp8_tensor"), made("fp8_tensor", x_scale=0.25, h_scale=0.5)):
        with pytest.raises(ValueError, match=r"static scales"):
            static.with_shared(other)


def test_mxfp4_refuses_what_its_kernels_cannot_scale():
    w1, w2 = torch.full((2, 8, 32), 0.5), torch.full((2, 32, 4), 0.5)
    w2[1, 3, 2] = -(2.0**24)
    with pytest.raises(ValueError, match=r"^w2 of expert 1 must stay below 2\^24 in magnitude for mxfp4"):
        ExpertWeights.from_dense(w1, w2, "mxfp4")
    w2[1, 3, 2] = -(2.0**23)
    weights = ExpertWeights.from_dense(w1, w2, "mxfp4")
    assert int(weights.w2_scale.max()) + 106 <= 254
    assert float(weights.dequantize_expert(1)[1].amin()) == -(2.0**23)
