"""Logits of a gate: float32 products of rows in the compute dtype, which are upcast as they are read.

Always in the same order, so that the same call gives the same bits.

Shapes: S rows, E experts, D model.
"""

# Triton gives its decorator and its device functions no types.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

from moe_kernels.step.triton_common import wait


@triton.jit(do_not_specialize=["num_rows"])
def router_row_kernel(
    x_ptr, w_ptr, out_ptr, num_rows, x_stride, w_stride, E: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One expert and ROWS rows a program, on plain lanes in float32."""
    expert = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK)
    there = (row < num_rows)[:, None]
    x_ptrs = x_ptr + row[:, None] * x_stride + d[None, :]
    w_ptrs = w_ptr + expert.to(tl.int64) * w_stride + d
    if D <= BLOCK:
        # The weight does not come from the kernel before.
        w = tl.load(w_ptrs, mask=d < D, other=0.0).to(tl.float32)
        wait(PDL)
        acc = tl.load(x_ptrs, mask=there & (d < D)[None, :], other=0.0).to(tl.float32) * w[None, :]
    else:
        wait(PDL)
        acc = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
        for first in range(0, D, BLOCK):
            w = tl.load(w_ptrs + first, mask=d < D - first, other=0.0).to(tl.float32)
            x = tl.load(x_ptrs + first, mask=there & (d < D - first)[None, :], other=0.0).to(tl.float32)
            acc += x * w[None, :]
    tl.store(out_ptr + row * E + expert, tl.sum(acc, axis=1), mask=row < num_rows)


@triton.jit(do_not_specialize=["num_rows"])
def router_tile_kernel(
    x_ptr, w_ptr, out_ptr, num_rows, x_stride, w_stride, E: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A tile ``[BLOCK_M, BLOCK_E]`` a program, or one of SPLIT parts of its sums, to ``out [SPLIT, S, E]``.

    Each operand is taken apart into two tf32 (a half-precision x is one tf32), whose products are exact: float32 but
    for some 2^-22 of a product, on tensor cores.
    """
    TILES: tl.constexpr = (E + BLOCK_E - 1) // BLOCK_E
    PART: tl.constexpr = ((D + BLOCK - 1) // BLOCK + SPLIT - 1) // SPLIT * BLOCK
    part = tl.program_id(1)
    row = (tl.program_id(0) // TILES).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    expert = tl.program_id(0) % TILES * BLOCK_E + tl.arange(0, BLOCK_E)
    d = tl.arange(0, BLOCK)
    there = row < num_rows
    x_ptrs = x_ptr + row[:, None] * x_stride + d[None, :]
    w_ptrs = w_ptr + expert.to(tl.int64)[None, :] * w_stride + d[:, None]
    wait(PDL)
    acc = tl.zeros([BLOCK_M, BLOCK_E], dtype=tl.float32)
    for first in range(part * PART, tl.minimum(part * PART + PART, D), BLOCK):
        x = tl.load(x_ptrs + first, mask=there[:, None] & (d < D - first)[None, :], other=0.0).to(tl.float32)
        w = tl.load(w_ptrs + first, mask=(d < D - first)[:, None] & (expert < E)[None, :], other=0.0).to(tl.float32)
        acc = tl.dot(x, w, acc, input_precision="tf32x3")
    out_ptr += part.to(tl.int64) * num_rows * E
    tl.store(out_ptr + row[:, None] * E + expert[None, :], acc, mask=there[:, None] & (expert < E)[None, :])
