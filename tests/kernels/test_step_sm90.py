"""The kernels of a step compile for compute capability 9.0 as they would be launched, with no GPU at hand."""

import re

import pytest
import torch

pytest.importorskip("triton")

from moe_kernels.projections import triton_rows as projections
from moe_kernels.step import launch, triton_heads, triton_router, triton_rows, triton_turn
from moe_kernels.testing.offline import compile_only
from triton.runtime.jit import JITFunction

SHARED_LIMIT = 232448  # bytes a block may have on compute capability 9.0
# Least that GPUs have which Triton compiles these for (8.6, 8.9).
SMALL_SHARED = 101376
MODULES = (triton_heads, triton_router, triton_rows, triton_turn, projections)
BF16, FP32 = torch.bfloat16, torch.float32


def empty(*sizes, dtype=BF16):
    return torch.empty(*sizes, dtype=dtype, device="meta")


def compiled(run, *arguments):
    try:
        with compile_only(90) as kernels:
            run(*arguments)
    finally:
        # In-process caches would otherwise keep binaries for the absent GPU.
        for module in MODULES:
            for value in vars(module).values():
                if isinstance(value, JITFunction):
                    value.device_caches.clear()
    assert all(kernel.shared <= SHARED_LIMIT for kernel in kernels)
    # No local memory: nothing spills.
    assert not any(re.search(r"\.local \.align", kernel.ptx) for kernel in kernels)
    return kernels


def turn(rows, dim):
    return empty(rows, 1, dim, dtype=FP32), empty(rows, 1, dim, dtype=FP32)


@pytest.mark.parametrize("width", [2048, 4096, 7168])
@pytest.mark.parametrize("add", [0, 1, 2])
def test_norms(width, add):
    x = empty(8, width)
    (kernel,) = compiled(
        launch.launch_norm, x, x if add else None, x if add == 2 else None, empty(width), 1e-6, add == 1
    )
    assert kernel.grid == (8,)
    assert "ld.global.v4" in kernel.ptx
    assert ("griddepcontrol.wait" in kernel.ptx) == (add == 1)
    # Read once: a row is held by its program.
    assert len(re.findall(r"ld\.global", kernel.ptx)) <= (2 + add) * -(-width // 2048)


@pytest.mark.parametrize(("dtype", "width"), [(torch.float16, 20000), (FP32, 576), (BF16, 77)])
def test_norms_of_other_rows(dtype, width):
    x = empty(3, width, dtype=dtype)
    compiled(launch.launch_norm, x, x, None, empty(width, dtype=dtype), 1e-6, False)


@pytest.mark.parametrize(("rows", "channels"), [(1, 2816), (32, 14336), (512, 18432)])
def test_silu_mul(rows, channels):
    (kernel,) = compiled(launch.launch_silu_mul, empty(rows, 2 * channels), False)
    assert "ld.global" in kernel.ptx
    assert kernel.grid[0] >= rows * channels // 1024


@pytest.mark.parametrize(("heads", "kv_heads", "size", "normed"), [
    (16, 16, 64, False), (32, 8, 128, False), (128, 8, 128, False), (32, 4, 128, True),
])  # fmt: skip
@pytest.mark.parametrize("pdl", [False, True])
def test_turns(heads, kv_heads, size, normed, pdl):
    norms = (empty(size), empty(size)) if normed else (None, None)
    cache, slots = empty(100, 16, kv_heads, size), empty(8, dtype=torch.int64)
    qkv = empty(8, (heads + 2 * kv_heads) * size)
    (kernel,) = compiled(
        launch.launch_turn, qkv, *turn(8, size), cache, cache, slots, heads, kv_heads, *norms, 1e-6, pdl
    )
    assert "ld.global.v" in kernel.ptx
    # A product joined with a sum would give other bits than plain code.
    assert "fma.rn" not in kernel.ptx
    assert ("griddepcontrol.wait" in kernel.ptx) == pdl


@pytest.mark.parametrize("heads", [16, 32, 128])
@pytest.mark.parametrize("rows", [1, 512])
def test_latent_turns(heads, rows):
    q, down = empty(rows, heads * 192), empty(rows, heads * 192 + 576)
    cache, slots = empty(100, 64, 576), empty(rows, dtype=torch.int64)
    (kernel,) = compiled(
        launch.launch_latent_turn, q, down, *turn(rows, 64), empty(512), cache, empty(rows, heads, 576), slots, 128,
        1e-6, True,
    )  # fmt: skip
    assert "fma.rn" not in kernel.ptx
    assert kernel.grid == (rows * (-(-heads // 16) + 1),)


@pytest.mark.parametrize(("rows", "heads", "dtype"), [
    (1, 16, BF16), (8, 16, BF16), (32, 128, BF16), (128, 16, BF16), (512, 128, BF16), (1, 16, FP32), (64, 16, FP32),
])  # fmt: skip
def test_heads(rows, heads, dtype):
    whole = empty(heads, 256, 512, dtype=dtype)
    w_uk, w_uv = whole.split([128, 128], dim=1)
    q, q_out = empty(rows, heads, 192, dtype=dtype)[..., :128], empty(rows, heads, 576, dtype=dtype)[..., :512]
    mixed, out = empty(rows, heads, 512, dtype=dtype), empty(rows, heads, 128, dtype=dtype)
    for arguments in ((q, w_uk, q_out), (mixed, w_uv.transpose(1, 2), out)):
        (kernel,) = compiled(launch.launch_head_products, *arguments, False)
        assert kernel.shared <= SMALL_SHARED
        assert kernel.name == ("head_row_kernel" if rows == 1 else "head_tile_kernel")
        assert ("mma" in kernel.ptx) == (rows > 1 and dtype == BF16)
        # Enough programs to ask for weights with.
        assert kernel.grid[0] >= 128 or rows > 1
        assert "ld.global.v4" in kernel.ptx or "cp.async" in kernel.ptx


@pytest.mark.parametrize(("experts", "width"), [(64, 2048), (8, 4096), (256, 7168), (60, 3584)])
@pytest.mark.parametrize("rows", [1, 8, 32, 4096])
def test_routers(rows, experts, width):
    kernels = compiled(launch.launch_router, empty(rows, width), empty(experts, width, dtype=FP32), False)
    names = [kernel.name for kernel in kernels]
    if rows <= 8:
        assert names == ["router_row_kernel"]
        assert "tf32" not in kernels[0].ptx
    else:
        assert names[0] == "router_tile_kernel"
        assert names[1:] in ([], ["sum_parts_kernel"])
        assert "tf32" in kernels[0].ptx
        assert kernels[0].shared <= SMALL_SHARED


def test_no_rows_compile_nothing():
    cache, slots = empty(4, 4, 1, 8), empty(0, dtype=torch.int64)
    assert compiled(launch.launch_norm, empty(0, 8), empty(0, 8), None, empty(8), 1e-6) == []
    assert compiled(launch.launch_silu_mul, empty(0, 8)) == []
    assert compiled(launch.launch_turn, empty(0, 24), *turn(0, 8), cache, cache, slots, 1, 1, None, None, 0.0) == []
    assert compiled(launch.launch_head_products, empty(0, 2, 8), empty(2, 8, 8), empty(0, 2, 8)) == []
    assert compiled(launch.launch_router, empty(0, 8), empty(4, 8, dtype=FP32)) == []
