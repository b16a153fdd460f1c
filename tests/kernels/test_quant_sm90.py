"""The quantisers of activations compile for compute capability 9.0 as they would be launched, with no GPU at hand."""

import re

import pytest
import torch

pytest.importorskip("triton")

from moe_kernels.quant.triton import launch_quantize
from moe_kernels.testing.offline import compile_only

KINDS = [("token", "fp8"), ("token", "int8"), ("block", "fp8"), ("tensor", "fp8")]


def compiled(
    granularity, kind, rows=4096, columns=7168, dtype=torch.bfloat16, static=False, top_k=8, slots=False, **options
):
    x = torch.empty(rows, columns, dtype=dtype, device="meta")
    ids = torch.empty(rows, top_k, dtype=torch.int32, device="meta")
    scale = torch.empty(1, device="meta") if static else None
    with compile_only(90) as kernels:
        launch_quantize(x, granularity, kind, ids, 256, slots, scale, **options)
    return {kernel.name: kernel for kernel in kernels}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [(1, 7168), (4096, 7168), (37, 130), (4096, 2880)], ids=str)
@pytest.mark.parametrize(("granularity", "kind"), KINDS)
def test_every_kernel_divides_and_rounds_exactly(granularity, kind, size, dtype):
    kernels = compiled(granularity, kind, *size, dtype)
    small = size in ((1, 7168), (37, 130))
    names = {"tensor": ["tensor_kernel"] if small else ["amax_kernel", "tensor_kernel"]}
    assert list(kernels) == names.get(granularity, [f"{granularity}_kernel"])
    last = kernels[f"{granularity}_kernel"].ptx
    assert "div.rn.f32" in last
    assert "div.full" not in last
    assert ("cvt.rn.satfinite.e4m3x2" in last) == (kind == "fp8")
    # Sums and products must not be fused: q would round otherwise than the specification.
    assert "fma.rn.f32" not in last


@pytest.mark.parametrize(("granularity", "kind"), KINDS)
def test_prefill_reads_16_bytes_at_once(granularity, kind):
    for kernel in compiled(granularity, kind).values():
        assert "ld.global.v4.b32" in kernel.ptx
    assert re.search(r"st\.global\.(v2|v4)\.b32", compiled(granularity, kind)[f"{granularity}_kernel"].ptx)


def test_one_scale_for_all_takes_two_launches_and_few_programs():
    kernels = compiled("tensor", "fp8")
    assert kernels["amax_kernel"].grid[0] <= 256
    assert not any("atom" in kernel.ptx or "red.global" in kernel.ptx for kernel in kernels.values())
    assert list(compiled("tensor", "fp8", static=True)) == ["tensor_kernel"]


@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize(("granularity", "kind"), KINDS)
def test_dependent_launch(granularity, kind, pdl):
    for kernel in compiled(granularity, kind, pdl=pdl).values():
        assert ("griddepcontrol.wait" in kernel.ptx) == pdl
        assert ("griddepcontrol.launch_dependents" in kernel.ptx) == pdl


@pytest.mark.parametrize("slots", [False, True])
@pytest.mark.parametrize(("granularity", "kind"), KINDS)
def test_odd_sizes_and_one_id_a_row(granularity, kind, slots):
    for rows, columns in ((1, 1), (5, 3), (3, 20000), (70, 130), (300_000, 8192)):
        for top_k in (1, 6):
            assert compiled(granularity, kind, rows, columns, top_k=top_k, slots=slots)


def test_no_rows_compile_nothing():
    for granularity, kind in KINDS:
        assert compiled(granularity, kind, rows=0) == {}
