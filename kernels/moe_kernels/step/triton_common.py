"""Device functions that the kernels of a step share."""

# Triton gives its decorator and its device functions no types.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

from moe_kernels.experts.rules import TRITON_INTERPRETED

INTERPRETED = tl.constexpr(TRITON_INTERPRETED)


@triton.jit
def wait(PDL: tl.constexpr):
    """With PDL: until what the kernels before wrote can be read; from here on the next one may start, too."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """float32 to DTYPE, to nearest even. The interpreter cuts bf16 off instead, so there the rounding comes first."""
    if INTERPRETED and DTYPE == tl.bfloat16:
        bits = tl.where(x == x, x, 0.0).to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        x = tl.where(x == x, bits.to(tl.float32, bitcast=True), float("nan"))
    return x.to(DTYPE)


@triton.jit
def through(x, DTYPE: tl.constexpr):
    """float32 that DTYPE holds: rounded and read again."""
    return rounded(x, DTYPE).to(tl.float32)
