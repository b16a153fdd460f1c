"""The Triton quantisers of activations against their specification, bit for bit.

test_quant_interpreted.py runs this file in a process that interprets Triton; test_quant_gpu.py in one that does not.
"""

import os

import pytest
import torch
from moe_kernels.quant.api import quantize_activation
from moe_kernels.quant.triton import launch_quantize
from moe_kernels.testing.oracle import poison_allocator

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
# The interpreter is wrong on bfloat16 in places.
DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]
KINDS = [("token", "fp8"), ("token", "int8"), ("block", "fp8"), ("tensor", "fp8"), ("static", "fp8")]
SHAPES = [(1, 1), (1, 7168), (3, 128), (2, 129), (7, 250), (17, 96)]
LARGER = [(65, 1100)] if INTERPRETED else [(65, 1100), (70, 2880), (4096, 7168), (1000, 768), (33, 20000)]


def scale_of(granularity):
    return torch.tensor([0.0123]) if granularity == "static" else None


def on(device, tensor):
    return None if tensor is None else tensor.to(device)


def both(x, granularity, kind, **options):
    """(q, scale) of the kernels and of the specification, on the CPU."""
    scale = scale_of(granularity)
    name = "tensor" if granularity == "static" else granularity
    ids = options.pop("routing_ids", None)
    got = quantize_activation(
        x.to(DEVICE), name, kind, scale=on(DEVICE, scale), routing_ids=on(DEVICE, ids), impl="triton", **options
    )
    want = quantize_activation(x, name, kind, scale=scale, routing_ids=ids, impl="reference", **options)
    return tuple(t.cpu() for t in got), want


def same_bits(got, want):
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    integer = {1: torch.uint8, 4: torch.int32}[got.dtype.itemsize]
    nan = want.isnan() if want.dtype == torch.float32 else torch.zeros(want.shape, dtype=torch.bool)
    assert torch.equal(got.view(integer)[~nan], want.view(integer)[~nan])
    assert bool(got[nan].isnan().all())


def rows(count, columns, dtype, seed=0):
    """Rows of very different size, small enough for float16."""
    generator = torch.Generator().manual_seed(seed)
    spread = 4.0 ** torch.randint(-5, 4, (count, 1), generator=generator)
    return (torch.randn(count, columns, generator=generator) * spread).to(dtype)


@pytest.mark.parametrize(
    ("shape", "dtype"), [*((s, d) for s in SHAPES for d in DTYPES), *((s, DTYPES[-1]) for s in LARGER)], ids=str
)
@pytest.mark.parametrize(("granularity", "kind"), KINDS)
def test_same_bits_as_the_specification(granularity, kind, shape, dtype):
    count, columns = shape
    poison_allocator(DEVICE, count * columns, 4 * count * -(-columns // 128), 1024)
    got, want = both(rows(*shape, dtype), granularity, kind)
    same_bits(got[0], want[0])
    same_bits(got[1], want[1])


@pytest.mark.parametrize(("granularity", "kind"), KINDS)
def test_every_float16_value_rounds_as_torch_rounds_it(granularity, kind):
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    x = x[torch.isfinite(x)].reshape(62, -1)
    got, want = both(x, granularity, kind)
    same_bits(got[0], want[0])
    same_bits(got[1], want[1])


@pytest.mark.parametrize(("granularity", "kind"), KINDS)
@pytest.mark.parametrize("hostile", [float("nan"), -float("inf")])
def test_values_that_are_not_finite(hostile, granularity, kind):
    x = rows(5, 260, torch.float32)
    clean, _ = both(x, granularity, kind)
    x[3, 200] = hostile
    x[1, :128] = hostile
    got, want = both(x, granularity, kind)
    same_bits(got[1], want[1])
    same_bits(got[0], want[0])
    if kind == "int8":
        assert got[1].isnan().tolist() == [False, True, False, True, False]
    else:
        assert bool(torch.isfinite(got[1]).all())
        assert torch.equal(got[0].float().isnan(), ~torch.isfinite(x))
    if granularity != "tensor":
        for whole in (0, 2, 4):
            same_bits(got[0][whole], clean[0][whole])


@pytest.mark.parametrize(("granularity", "kind"), KINDS)
def test_zero_and_tiny_rows(granularity, kind):
    x = rows(6, 300, torch.float32)
    x[1], x[2], x[3], x[4, 128:] = 0.0, 1e-30, 1e-40, 0.0
    x[5, 7] = -0.0
    got, want = both(x, granularity, kind)
    same_bits(got[0], want[0])
    same_bits(got[1], want[1])
    assert bool(torch.isfinite(got[1]).all())
    assert bool((got[1] > 0).all())
    assert not got[0][1].float().any()
    assert not got[0][4, 128:].float().any()


@pytest.mark.parametrize("slots", [False, True])
@pytest.mark.parametrize("hostile", [float("nan"), float("inf"), 1e30][2 * INTERPRETED :])
@pytest.mark.parametrize(("granularity", "kind"), KINDS)
def test_rows_out_of_use_do_not_count(granularity, kind, hostile, slots):
    generator = torch.Generator().manual_seed(1)
    # The fewer are seen in one launch, the others in two.
    for tokens, top_k, columns in ((6, 1, 400), (12, 2, 1000)) if INTERPRETED else ((8, 1, 400), (300, 3, 1000)):
        ids = torch.randint(0, 5, (tokens, top_k), generator=generator).int()
        ids[tokens // 2 :] = torch.tensor([-1, 5, 2**31 - 1])[:top_k]
        used = ((ids >= 0) & (ids < 5)).reshape(-1) if slots else (ids == ids.clamp(0, 4)).any(dim=1)
        x = rows(used.numel(), columns, torch.float32, seed=columns)
        dirty = torch.where(used[:, None], x, hostile)
        options = {"routing_ids": ids, "num_experts": 5, "rows": "slots" if slots else "tokens"}
        got, want = both(dirty, granularity, kind, **options)
        clean, _ = both(torch.where(used[:, None], x, 0.0), granularity, kind, **options)
        same_bits(got[0][used], want[0][used])
        same_bits(got[0][used], clean[0][used])
        for each in (want, clean):
            same_bits(*((got[1], each[1]) if got[1].numel() == 1 else (got[1][used], each[1][used])))


@pytest.mark.parametrize(("granularity", "kind"), KINDS)
def test_rows_with_a_stride(granularity, kind):
    x = rows(9, 140, torch.float16)
    wide = torch.full((9, 300), float("nan"), dtype=torch.float16)
    wide[:, 150:290] = x
    _, want = both(x, granularity, kind)
    name = "tensor" if granularity == "static" else granularity
    scale = on(DEVICE, scale_of(granularity))
    for view in (wide.to(DEVICE)[:, 150:290], x.T.contiguous().to(DEVICE).T):
        q, made = quantize_activation(view, name, kind, scale=scale, impl="triton")
        same_bits(q.cpu(), want[0])
        same_bits(made.cpu(), want[1])


@pytest.mark.parametrize(("granularity", "kind"), KINDS)
def test_no_rows(granularity, kind):
    got, want = both(torch.empty(0, 300), granularity, kind)
    assert [t.shape for t in got] == [t.shape for t in want]


@pytest.mark.parametrize(("granularity", "kind"), KINDS)
def test_wide_offsets_give_the_same(granularity, kind, monkeypatch):
    x = rows(70, 300, torch.float16)
    _, want = both(x, granularity, kind)
    monkeypatch.setattr("moe_kernels.quant.triton._INT32_MAX", 0)
    got, _ = both(x, granularity, kind)
    same_bits(got[0], want[0])
    same_bits(got[1], want[1])


@pytest.mark.parametrize(("granularity", "kind"), KINDS)
def test_the_op_runs_the_kernels_and_passes_opcheck(granularity, kind):
    x = rows(5, 260, torch.float16).to(DEVICE)
    name = "tensor" if granularity == "static" else granularity
    scale = on(DEVICE, scale_of(granularity))
    q, made = quantize_activation(x, name, kind, scale=scale)
    want = quantize_activation(x, name, kind, scale=scale, impl="triton")
    same_bits(q.cpu(), want[0].cpu())
    same_bits(made.cpu(), want[1].cpu())
    ids = torch.zeros(5, 1, dtype=torch.int32, device=DEVICE)
    torch.library.opcheck(
        torch.ops.moe_kernels.quantize_activation.default, (x, name, kind, scale, ids, 1, False),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )  # fmt: skip


def test_a_static_scale_is_returned_as_it_came():
    scale = torch.tensor([0.5], device=DEVICE)
    ids = torch.zeros(3, 1, dtype=torch.int32, device=DEVICE)
    q, made = launch_quantize(torch.full((3, 40), 1.25, device=DEVICE), "tensor", "fp8", ids, 1, False, scale)
    assert made is scale
    assert set(q.float().flatten().tolist()) == {2.5}
