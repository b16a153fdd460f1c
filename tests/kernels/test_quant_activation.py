"""quantize_activation on the CPU: the formula by hand, what counts for a scale, large values, compiled code."""

import pytest
import torch
from moe_kernels.quant.api import quantize_activation
from moe_kernels.quant.reference import dequantize

KINDS = [("token", "fp8"), ("token", "int8"), ("block", "fp8"), ("tensor", "fp8")]
each_kind = pytest.mark.parametrize(("granularity", "kind"), KINDS)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 128), (17, 129), (64, 2880)], ids=str)
@each_kind
def test_formula(granularity, kind, shape, dtype):
    """Groups one by one, in numpy's float32, whose divisions are IEEE's."""
    x = (randn(*shape) * 4.0 ** (torch.arange(shape[0]) % 5)[:, None]).to(dtype)
    q, scale = quantize_activation(x, granularity, kind)
    assert q.dtype == (torch.float8_e4m3fn if kind == "fp8" else torch.int8)
    assert scale.dtype == torch.float32
    width = {"token": shape[1], "block": 128, "tensor": shape[0] * shape[1]}[granularity]
    groups = list((x.reshape(1, -1) if granularity == "tensor" else x).float().split(width, dim=1))
    most = torch.tensor(448.0 if kind == "fp8" else 127.0).numpy()
    columns = []
    for part in groups:
        a = part.abs().amax(dim=1).clamp_min(1e-30).numpy()
        scaled = torch.from_numpy(part.numpy() * (most / a)[:, None]).clamp(-float(most), float(most))
        columns.append((scaled if kind == "fp8" else scaled.round()).to(q.dtype).float())
    want_scale = torch.stack([torch.from_numpy(p.abs().amax(dim=1).clamp_min(1e-30).numpy() / most) for p in groups], 1)
    assert torch.equal(q.float(), torch.cat(columns, dim=1).reshape(shape))
    assert torch.equal(scale.flatten(), want_scale.flatten())
    assert scale.shape == {"token": (shape[0],), "block": (shape[0], len(groups)), "tensor": (1,)}[granularity]
    half_step = dequantize(torch.ones(shape), scale, granularity) * (2.0**-10 if kind == "fp8" else 0.5)
    if kind == "fp8":
        half_step = torch.maximum(half_step, x.float().abs() / 16)
    assert bool(((dequantize(q, scale, granularity) - x.float()).abs() <= half_step * 1.00001).all())


def test_by_hand():
    x = torch.tensor([[448.0, -224.0, 1.0, 0.0], [0.875, 0.25, -0.0625, 0.0]])
    q, scale = quantize_activation(x, "token")
    assert scale.tolist() == [1.0, 0.875 / 448]
    assert q.float().tolist() == [[448.0, -224.0, 1.0, 0.0], [448.0, 128.0, -32.0, 0.0]]
    # 0.5 and 1.5 go to the even neighbours.
    q, scale = quantize_activation(torch.tensor([[127.0, 0.5, 1.5, -2.5]]), "token", "int8")
    assert (q.tolist(), scale.tolist()) == ([[127, 0, 2, -2]], [1.0])
    q, scale = quantize_activation(torch.tensor([[3.0, 1000.0, -1000.0]]), "tensor", scale=torch.tensor([2.0]))
    assert (q.float().tolist(), scale.tolist()) == ([[1.5, 448.0, -448.0]], [2.0])


def test_the_end_of_e4m3_saturates():
    x = torch.tensor([[448.0, 464.0, 465.0, 1000.0, -1000.0, 1e4, -1e4, 3e38]])
    q, _ = quantize_activation(x, "tensor", scale=torch.ones(1))
    assert q.float().tolist() == [[448.0] * 4 + [-448.0, 448.0, -448.0, 448.0]]
    q, _ = quantize_activation(x, "tensor", scale=torch.tensor([1e-30]))
    assert bool(torch.isfinite(q.float()).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@each_kind
def test_large_values_are_finite(granularity, kind, dtype):
    x = (randn(9, 300) * 1e4).clamp(-1e4, 1e4).to(dtype)
    q, scale = quantize_activation(x, granularity, kind)
    assert bool(torch.isfinite(q.float()).all())
    assert bool(torch.isfinite(scale).all())
    got = dequantize(q, scale, granularity)
    assert (got - x.float()).norm() < 0.04 * x.float().norm()


@each_kind
def test_zero_rows_stay_zero_and_leave_others_alone(granularity, kind):
    x = randn(6, 300)
    want, _ = quantize_activation(x, granularity, kind)
    x[3], x[4, :128], x[5] = 0.0, 0.0, 1e-30
    q, scale = quantize_activation(x, granularity, kind)
    assert not q[3].float().any()
    assert not q[4, :128].float().any()
    assert bool(torch.isfinite(scale).all())
    assert bool((scale > 0).all())
    if granularity != "tensor":
        assert torch.equal(bits(q[:3]), bits(want[:3]))
        # A row of 1e-30 is the smallest that is seen.
        assert q[5].float().abs().unique().tolist() == [448.0 if kind == "fp8" else 127.0]


def test_rows_far_apart_do_not_share_a_scale():
    x = randn(64, 256)
    x[32:] *= 100.0
    for granularity, kind in KINDS[:3]:
        q, scale = quantize_activation(x, granularity, kind)
        for half, other in ((slice(0, 32), x[:32]), (slice(32, 64), x[32:])):
            alone, own = quantize_activation(other, granularity, kind)
            assert torch.equal(bits(q[half]), bits(alone))
            assert torch.equal(scale[half], own)
    # One scale for all is one for the whole call, whatever the order of rows; small rows do not vanish.
    q, scale = quantize_activation(x, "tensor")
    flipped, same = quantize_activation(x.flip(0), "tensor")
    assert torch.equal(scale, same)
    assert torch.equal(bits(q), bits(flipped.flip(0)))
    assert (dequantize(q, scale, "tensor")[:32] - x[:32]).norm() < 0.05 * x[:32].norm()


@pytest.mark.parametrize("rows", ["tokens", "slots"])
@pytest.mark.parametrize("hostile", [float("nan"), float("inf"), 1e30])
@each_kind
def test_rows_that_only_pad_do_not_count(granularity, kind, hostile, rows):
    ids = torch.tensor([[2, -1], [0, 4], [-1, -1], [5, 2**31 - 1]], dtype=torch.int32)
    used = torch.tensor([True, False, True, True] + [False] * 4 if rows == "slots" else [True, True, False, False])
    x = randn(used.numel(), 150)
    options = {"routing_ids": ids, "num_experts": 5, "rows": rows}
    clean = torch.where(used[:, None], x, 0.0)
    dirty = torch.where(used[:, None], x, hostile)
    (q, scale), (want, want_scale) = (quantize_activation(v, granularity, kind, **options) for v in (dirty, clean))
    assert torch.equal(bits(q[used]), bits(want[used]))
    assert torch.equal(scale if granularity == "tensor" else scale[used], want_scale[used[: want_scale.shape[0]]])


@pytest.mark.parametrize("hostile", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_show(hostile):
    x = randn(3, 260)
    for granularity, kind in KINDS:
        clean, own = quantize_activation(x, granularity, kind)
        bad = x.clone()
        bad[1, 200] = hostile
        q, scale = quantize_activation(bad, granularity, kind)
        got = dequantize(q, scale, granularity)
        assert got[1].isnan().any()
        assert bool(torch.isfinite(got[[0, 2]]).all())
        if granularity != "tensor":
            assert torch.equal(bits(q[[0, 2]]), bits(clean[[0, 2]]))
            assert torch.equal(scale[[0, 2]], own[[0, 2]])


# Inductor's first import uses a deprecated part of torch.
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@each_kind
def test_compiled_gives_the_same_bits(granularity, kind, backend):
    torch._dynamo.reset()
    run = torch.compile(lambda x: quantize_activation(x, granularity, kind), fullgraph=True, backend=backend)
    torch.use_deterministic_algorithms(True)
    try:
        for x in (randn(7, 260) * 1e4, randn(7, 260).to(torch.bfloat16), torch.zeros(7, 260)):
            for got, want in zip(run(x), quantize_activation(x, granularity, kind), strict=True):
                assert (got.dtype, got.shape, got.stride()) == (want.dtype, want.shape, want.stride())
                assert torch.equal(bits(got), bits(want))
    finally:
        torch.use_deterministic_algorithms(False)


@each_kind
def test_the_op_passes_opcheck(granularity, kind):
    ids = torch.tensor([[0, 1], [-1, -1], [2, 7]], dtype=torch.int32)
    scales = [None] + [torch.tensor([0.5])] * (granularity == "tensor")
    for x, slots in ((randn(3, 140), False), (randn(6, 5), True), (randn(6, 10)[:, ::2], True)):
        for scale in scales:
            torch.library.opcheck(
                torch.ops.moe_kernels.quantize_activation.default, (x, granularity, kind, scale, ids, 3, slots)
            )


def test_arguments_are_refused_by_name():
    x, ids = randn(4, 8), torch.zeros(2, 2, dtype=torch.int32)
    for match, args, options in (
        (r"^granularity must be one of tensor, token, block; got 'row'", ("row",), {}),
        (r"^kind must be fp8, or int8 where granularity is token; got 'int8'", ("block", "int8"), {}),
        (r"^kind must be fp8", ("token", "fp4"), {}),
        (r"^rows must be tokens or slots; got 'all'", ("token",), {"rows": "all"}),
        (r"^impl must be None, reference or triton; got 'fast'", ("token",), {"impl": "fast"}),
        (r"^scale must be float32 \[1\], and is for granularity tensor", ("token",), {"scale": torch.ones(1)}),
        (r"^scale must be float32 \[1\]", ("tensor",), {"scale": torch.ones(2)}),
        (r"^routing_ids and num_experts must be given together", ("tensor",), {"routing_ids": ids}),
        (r"^routing_ids must be int32 \[T, K\] with 4 tokens", ("tensor",), {"routing_ids": ids, "num_experts": 2}),
    ):
        with pytest.raises(ValueError, match=match):
            quantize_activation(x, *args, **options)
    for bad in (x[0], x.int(), x[:, :0]):
        with pytest.raises(ValueError, match=r"^x_RC must be a floating-point tensor \[R, C\] with C >= 1"):
            quantize_activation(bad, "token")
