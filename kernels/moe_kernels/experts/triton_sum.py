"""Kernels that finish what was left in parts: the sum over a token's experts, and sums that were split over K.

Shapes: T tokens, D model, F ffn, E experts, K experts per token, N = T*K routed rows, S parts of a split sum.
"""

# Triton gives its decorator and its device functions no types.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows"])
def sum_kernel(
    y_ptr, ids_ptr, out_ptr, num_rows,
    E: tl.constexpr, K: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr, BLOCK_D: tl.constexpr,
    WIDE_ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``out[t, d] = sum over k and s of y[s, t*K + k, d]`` in float32; rows of dropped ids, unwritten, are not read.

    Every thread walks its own columns through all rows, so that as many loads are on their way as there are rows, and
    the order of the sum is fixed.
    """
    NUM_TILES: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    pid = tl.program_id(0)
    token = pid // NUM_TILES
    offs_d = (pid % NUM_TILES) * BLOCK_D + tl.arange(0, BLOCK_D)
    if WIDE_ROWS:
        token = token.to(tl.int64)
    acc = tl.zeros([BLOCK_D], dtype=tl.float32)
    if K * PARTS <= 16:
        for k in tl.static_range(K):
            expert = tl.load(ids_ptr + token * K + k)
            mask = (offs_d < D) & (expert >= 0) & (expert < E)
            for s in tl.static_range(PARTS):
                row = token * K + k + s * num_rows
                acc += tl.load(y_ptr + row * D + offs_d, mask=mask, other=0.0).to(tl.float32)
    else:
        for k in range(K):
            expert = tl.load(ids_ptr + token * K + k)
            mask = (offs_d < D) & (expert >= 0) & (expert < E)
            for s in range(PARTS):
                row = token * K + k + s * num_rows
                acc += tl.load(y_ptr + row * D + offs_d, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * D + offs_d, acc.to(out_ptr.dtype.element_ty), mask=offs_d < D)


@triton.jit(do_not_specialize=["num_rows"])
def activate_kernel(
    parts_ptr, ids_ptr, h_ptr, num_rows,
    E: tl.constexpr, F: tl.constexpr, PARTS: tl.constexpr, BLOCK_F: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``h[r, f] = silu(sum of gate's parts) * (sum of up's parts)``, float32 ``parts [S, N, 2F]``, in fixed order."""
    NUM_TILES: tl.constexpr = (F + BLOCK_F - 1) // BLOCK_F
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    pid = tl.program_id(0)
    row = pid // NUM_TILES
    offs_f = (pid % NUM_TILES) * BLOCK_F + tl.arange(0, BLOCK_F)
    expert = tl.load(ids_ptr + row)
    if (expert < 0) | (expert >= E):
        return
    row = row.to(tl.int64)
    gate = tl.zeros([BLOCK_F], dtype=tl.float32)
    up = tl.zeros([BLOCK_F], dtype=tl.float32)
    for s in range(PARTS):
        ptrs = parts_ptr + (row + s * num_rows) * (2 * F) + offs_f
        gate += tl.load(ptrs, mask=offs_f < F, other=0.0)
        up += tl.load(ptrs + F, mask=offs_f < F, other=0.0)
    h = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(h_ptr + row * F + offs_f, h.to(h_ptr.dtype.element_ty), mask=offs_f < F)
