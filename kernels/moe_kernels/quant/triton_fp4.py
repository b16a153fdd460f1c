"""Quantisation of activations to FP4 in Triton; the same bits as the specification in ``quant.fp4``.

Shapes: R rows, C columns.
"""

# Triton gives its decorator and its device functions no types.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from moe_kernels.formats import PACK_UNIT
from moe_kernels.quant.fp4 import Fp4Rows
from moe_kernels.quant.triton import to_e4m3
from moe_kernels.types import Quant

_INT32_MAX = 2**31 - 1


@triton.jit
def e2m1_nibble(x):
    """int32 nibbles of float32 x: nearest, ties to the even mantissa, saturated."""
    size = tl.abs(x)
    # Midpoints between neighbours; at 0.75, 1.75, 3.5 the upper neighbour is the even one, elsewhere the lower.
    nibble = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32)
    nibble += (size >= 1.75).to(tl.int32) + (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32)
    nibble += (size > 5.0).to(tl.int32)
    return nibble | ((x.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit(do_not_specialize=["num_rows"])
def fp4_kernel(
    x_ptr, q_ptr, scale_ptr, whole_ptr, num_rows, x_stride, C: tl.constexpr, UNITS_P2: tl.constexpr,
    NVFP4: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row a program; a line of its tiles is the bytes that share a scale."""
    UNITS: tl.constexpr = (C + 31) // 32
    BYTES: tl.constexpr = 8 if NVFP4 else 16
    SCALES: tl.constexpr = UNITS * (16 // BYTES)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    own = row
    if WIDE:
        row = row.to(tl.int64)
    group = tl.arange(0, UNITS_P2 * (16 // BYTES))
    byte = group[:, None] * BYTES + tl.arange(0, BYTES)[None, :]
    column = byte // 8 * 16 + byte % 8
    low = tl.load(x_ptr + row * x_stride + column, mask=column < C, other=0.0).to(tl.float32)
    high = tl.load(x_ptr + row * x_stride + column + 8, mask=column + 8 < C, other=0.0).to(tl.float32)
    finite_low = tl.abs(low) < float("inf")
    finite_high = tl.abs(high) < float("inf")
    low = tl.where(finite_low, low, 0.0)
    high = tl.where(finite_high, high, 0.0)
    amax = tl.max(tl.maximum(tl.abs(low), tl.abs(high)), axis=1)
    lost = tl.max((~(finite_low & finite_high)).to(tl.int32), axis=1)
    if NVFP4:
        largest = tl.maximum(tl.max(amax, axis=0), 1e-30)
        whole = tl.math.div_rn(largest, tl.full([], 2688.0, tl.float32))
        wanted = tl.math.div_rn(tl.math.div_rn(amax, tl.zeros_like(amax) + 6.0), tl.zeros_like(amax) + whole)
        wanted = tl.minimum(tl.maximum(wanted, 0.001953125), 448.0)
        scale = to_e4m3(tl.where(amax > 0.0, wanted, 0.0))
        step = (scale.to(tl.float32) * whole)[:, None]
        divisor = tl.zeros_like(low) + tl.where(step > 0.0, step, 1.0)
        low = tl.where(step > 0.0, tl.math.div_rn(low, divisor), 0.0)
        high = tl.where(step > 0.0, tl.math.div_rn(high, divisor), 0.0)
        tl.store(whole_ptr + own, tl.where(tl.max(lost, axis=0) > 0, float("nan"), whole))
    else:
        # Exponents by their bits: amax's own less 2, and that of the scale's inverse, a normal number always.
        exponent = tl.maximum((amax.to(tl.int32, bitcast=True) >> 23) - 2, 0)
        inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
        low = low * inverse
        high = high * inverse
        scale = tl.where(lost > 0, 255, exponent).to(tl.uint8)
    both = e2m1_nibble(low) | (e2m1_nibble(high) << 4)
    tl.store(q_ptr + row * (UNITS * 16) + byte, both.to(tl.uint8), mask=byte < UNITS * 16)
    tl.store(scale_ptr + row * SCALES + group, scale, mask=group < SCALES)


def launch_fp4(x_RC: torch.Tensor, quant: Quant, pdl: bool = False) -> Fp4Rows:
    """Store ``x_RC`` ``[R, C]`` as ``quantize_fp4`` does, every row of it, in one launch."""
    if x_RC.stride(1) != 1:
        x_RC = x_RC.contiguous()
    (rows, columns), stride = x_RC.shape, x_RC.stride(0)
    nvfp4, units = quant is Quant.NVFP4, triton.cdiv(columns, PACK_UNIT)
    width = units * PACK_UNIT // 2
    data = torch.empty(rows, width, dtype=torch.uint8, device=x_RC.device)
    if nvfp4:
        scale = torch.empty(rows, 2 * units, dtype=torch.float8_e4m3fn, device=x_RC.device)
        whole = torch.empty(rows, dtype=torch.float32, device=x_RC.device)
    else:
        scale, whole = torch.empty(rows, units, dtype=torch.uint8, device=x_RC.device), None
    units_p2 = triton.next_power_of_2(units)
    if rows:
        fp4_kernel[(rows,)](
            x_RC, data, scale, data if whole is None else whole, rows, stride, C=columns, UNITS_P2=units_p2,
            NVFP4=nvfp4, WIDE=rows * max(stride, width) > _INT32_MAX, PDL=pdl,
            num_warps=min(16, max(1, units_p2 // 16)), **({"launch_pdl": True} if pdl else {}),
        )  # fmt: skip
    return Fp4Rows(data, scale, whole)
