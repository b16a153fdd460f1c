"""Kernels that work on whole rows: the sum with the residual and its norm, and the gated product of an MLP.

Shapes: S rows, D columns, F channels.
"""

# Triton gives its decorator and its device functions no types.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

from moe_kernels.step.triton_common import rounded, through, wait


@triton.jit
def row_sum(x_ptr, delta_ptr, also_ptr, column, mask, ADD: tl.constexpr):
    """float32 of ``x + delta`` (ADD 1) or ``x + (delta + also)`` (2), every sum rounded to the dtype of x."""
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    x = tl.load(x_ptr + column, mask=mask, other=0.0).to(tl.float32)
    if ADD > 0:
        delta = tl.load(delta_ptr + column, mask=mask, other=0.0).to(tl.float32)
        if ADD == 2:
            delta = through(delta + tl.load(also_ptr + column, mask=mask, other=0.0).to(tl.float32), DTYPE)
        x = through(x + delta, DTYPE)
    return x


@triton.jit
def add_rms_norm_kernel(
    x_ptr, delta_ptr, also_ptr, weight_ptr, sum_ptr, out_ptr, x_stride, delta_stride, also_stride, eps,
    D: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row a program; rows wider than BLOCK are read twice."""
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    delta_ptr += row * delta_stride
    also_ptr += row * also_stride
    sum_ptr += row * D
    out_ptr += row * D
    column = tl.arange(0, BLOCK)
    if D <= BLOCK:
        mask = column < D
        # The weight does not come from the kernel before.
        weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
        wait(PDL)
        x = row_sum(x_ptr, delta_ptr, also_ptr, column, mask, ADD)
        if ADD > 0:
            tl.store(sum_ptr + column, x.to(DTYPE), mask=mask)
        scale = tl.rsqrt(tl.sum(x * x, axis=0) / D + eps)
        tl.store(out_ptr + column, rounded(weight * (x * scale), DTYPE), mask=mask)
    else:
        wait(PDL)
        squares = tl.zeros([BLOCK], dtype=tl.float32)
        for first in range(0, D, BLOCK):
            x = row_sum(x_ptr, delta_ptr, also_ptr, first + column, first + column < D, ADD)
            squares += x * x
        scale = tl.rsqrt(tl.sum(squares, axis=0) / D + eps)
        for first in range(0, D, BLOCK):
            at = first + column
            mask = at < D
            x = row_sum(x_ptr, delta_ptr, also_ptr, at, mask, ADD)
            if ADD > 0:
                tl.store(sum_ptr + at, x.to(DTYPE), mask=mask)
            weight = tl.load(weight_ptr + at, mask=mask, other=0.0).to(tl.float32)
            tl.store(out_ptr + at, rounded(weight * (x * scale), DTYPE), mask=mask)


@triton.jit
def silu_mul_kernel(x_ptr, out_ptr, x_stride, F: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """BLOCK channels of one row a program: ``silu(gate)``, rounded, times ``up``."""
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    TILES: tl.constexpr = (F + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // TILES).to(tl.int64)
    channel = tl.program_id(0) % TILES * BLOCK + tl.arange(0, BLOCK)
    mask = channel < F
    wait(PDL)
    x_ptr += row * x_stride
    gate = tl.load(x_ptr + channel, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + F + channel, mask=mask, other=0.0).to(tl.float32)
    activated = through(tl.math.div_rn(gate, 1.0 + tl.exp(-gate)), DTYPE)
    tl.store(out_ptr + row * F + channel, rounded(activated * up, DTYPE), mask=mask)
