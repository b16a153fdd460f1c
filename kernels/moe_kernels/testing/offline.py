"""Compile what a Triton launcher would launch, for a GPU that is not there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction, KernelInterface


class Compiled(NamedTuple):
    """One kernel that a launcher asked for."""

    name: str
    grid: tuple[int, ...]
    shared: int
    ptx: str


class _AbsentGpu:
    """Stands in for the device driver: says which GPU to compile for, and launches nothing."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compile_only(capability: int = 90) -> Iterator[list[Compiled]]:
    """Within, ``kernel[grid](...)`` compiles for that compute capability and records; tensors may be on ``meta``."""
    compiled: list[Compiled] = []
    before, launch = driver._active, KernelInterface.__getitem__

    def record(kernel: Any, grid: tuple[int, ...]) -> Any:
        def run(*args: Any, **options: Any) -> None:
            binary = kernel.run(*args, grid=grid, warmup=True, **options)
            compiled.append(Compiled(kernel.__name__, grid, binary.metadata.shared, binary.asm["ptx"]))

        return run

    driver._active = _AbsentGpu(capability)
    KernelInterface.__getitem__ = record
    try:
        yield compiled
    finally:
        driver._active = before
        KernelInterface.__getitem__ = launch
        for function in _kernels():
            function.device_caches.clear()


def _kernels() -> list[Any]:
    """Kernels whose in-process caches would otherwise keep binaries for the absent GPU."""
    from moe_kernels.align import triton as align
    from moe_kernels.attention import triton_decode, triton_merge, triton_prefill
    from moe_kernels.experts import triton_fp4, triton_gemm, triton_gemm4, triton_gemv, triton_gemv4, triton_sum
    from moe_kernels.projections import triton_gemm as linear_gemm
    from moe_kernels.projections import triton_gemm4 as linear_gemm4
    from moe_kernels.projections import triton_gemv as linear_gemv
    from moe_kernels.projections import triton_rows as linear_rows
    from moe_kernels.quant import triton as quant
    from moe_kernels.quant import triton_fp4 as quant_fp4
    from moe_kernels.routing import triton as routing
    from moe_kernels.step import triton_heads, triton_router, triton_rows, triton_turn

    experts = (triton_fp4, triton_gemm, triton_gemm4, triton_gemv, triton_gemv4, triton_sum)
    step = (triton_heads, triton_router, triton_rows, triton_turn)
    attention = (triton_decode, triton_merge, triton_prefill)
    projections = (linear_gemm, linear_gemm4, linear_gemv, linear_rows)
    modules = (align, *attention, *experts, *projections, quant, quant_fp4, routing, *step)
    return [value for module in modules for value in vars(module).values() if isinstance(value, JITFunction)]
