"""The parts of split attention, merged in order.

Shapes: R rows (sequences x heads), S parts, DV columns.
"""

# Triton gives its decorator and its device functions no types.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_splits"])
def merge_kernel(
    part_ptr, lse_ptr, out_ptr, num_splits,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_LSE: tl.constexpr, BLOCK_S: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``out[r] = sum_s 2^lse[r, s] * part[r, s] / sum_s 2^lse[r, s]``; zeros where every lse is -inf."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    lse_ptr += row * num_splits
    part_ptr += row * num_splits * DV
    offs_d = tl.program_id(1) * BLOCK_DV + tl.arange(0, BLOCK_DV)
    tops = tl.full([BLOCK_LSE], float("-inf"), tl.float32)
    for first in range(0, num_splits, BLOCK_LSE):
        offs = first + tl.arange(0, BLOCK_LSE)
        tops = tl.maximum(tops, tl.load(lse_ptr + offs, mask=offs < num_splits, other=float("-inf")))
    top = tl.max(tops, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros([BLOCK_S], tl.float32)
    acc = tl.zeros([BLOCK_DV], tl.float32)
    for first in range(0, num_splits, BLOCK_S):
        offs = first + tl.arange(0, BLOCK_S)
        lse = tl.load(lse_ptr + offs, mask=offs < num_splits, other=float("-inf"))
        weight = tl.exp2(lse - top)
        # Parts without keys are not read.
        used = (lse != float("-inf"))[:, None] & (offs_d[None, :] < DV)
        part = tl.load(part_ptr + offs[:, None] * DV + offs_d[None, :], mask=used, other=0.0)
        total += weight
        acc += tl.sum(part * weight[:, None], 0)
    total = tl.sum(total, 0)
    acc = acc / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + row * DV + offs_d, acc.to(out_ptr.dtype.element_ty), mask=offs_d < DV)
