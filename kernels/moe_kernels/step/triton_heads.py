"""A matrix of its own for every head: ``out[s, h] = a[s, h] . w[h]``, each weight read once while the rows are few.

Sums are float32, rounded once.

Shapes: S rows, H heads, I inputs and J outputs of a head.
"""

# Triton gives its decorator and its device functions no types.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

from moe_kernels.step.triton_common import INTERPRETED, rounded, wait


@triton.jit
def head_row_kernel(
    a_ptr, w_ptr, out_ptr, a_stride, a_head, a_column, w_head, w_in, w_out, out_stride, out_head, out_column,
    IN: tl.constexpr, OUT: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK_J outputs of one head of one row a program, on plain lanes."""
    TILES: tl.constexpr = (OUT + BLOCK_J - 1) // BLOCK_J
    head = (tl.program_id(0) // TILES).to(tl.int64)
    row = tl.program_id(1).to(tl.int64)
    i = tl.arange(0, BLOCK_I)
    j = tl.program_id(0) % TILES * BLOCK_J + tl.arange(0, BLOCK_J)
    a_ptrs = a_ptr + row * a_stride + head * a_head + i * a_column
    w_ptrs = w_ptr + head * w_head + i[:, None] * w_in + j[None, :] * w_out
    if IN <= BLOCK_I:
        # Weights do not come from the kernel before, and are asked for while it ends.
        w = tl.load(w_ptrs, mask=(i < IN)[:, None] & (j < OUT)[None, :], other=0.0)
        wait(PDL)
        a = tl.load(a_ptrs, mask=i < IN, other=0.0).to(tl.float32)
        acc = w.to(tl.float32) * a[:, None]
    else:
        wait(PDL)
        acc = tl.zeros([BLOCK_I, BLOCK_J], dtype=tl.float32)
        for first in range(0, IN, BLOCK_I):
            a = tl.load(a_ptrs + first * a_column, mask=i < IN - first, other=0.0).to(tl.float32)
            w = tl.load(w_ptrs + first * w_in, mask=(i < IN - first)[:, None] & (j < OUT)[None, :], other=0.0)
            acc += w.to(tl.float32) * a[:, None]
    out = rounded(tl.sum(acc, axis=0), out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * out_stride + head * out_head + j * out_column, out, mask=j < OUT)


@triton.jit(do_not_specialize=["num_rows"])
def head_tile_kernel(
    a_ptr, w_ptr, out_ptr, num_rows, a_stride, a_head, a_column, w_head, w_in, w_out, out_stride, out_head,
    out_column, IN: tl.constexpr, OUT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_I: tl.constexpr,
    BLOCK_J: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A tile ``[BLOCK_M, BLOCK_J]`` of one head a program; those of the same weights lie beside one another."""
    TILES: tl.constexpr = (OUT + BLOCK_J - 1) // BLOCK_J
    tiles_m = tl.cdiv(num_rows, BLOCK_M)
    pid = tl.program_id(0)
    tile_m, tile_j, head = pid % tiles_m, pid // tiles_m % TILES, (pid // tiles_m // TILES).to(tl.int64)
    row = (tile_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    i = tl.arange(0, BLOCK_I)
    j = tile_j * BLOCK_J + tl.arange(0, BLOCK_J)
    there = row < num_rows
    a_ptrs = a_ptr + row[:, None] * a_stride + head * a_head + i[None, :] * a_column
    w_ptrs = w_ptr + head * w_head + i[:, None] * w_in + j[None, :] * w_out
    wait(PDL)
    acc = tl.zeros([BLOCK_M, BLOCK_J], dtype=tl.float32)
    for first in range(0, IN, BLOCK_I):
        a = tl.load(a_ptrs + first * a_column, mask=there[:, None] & (i < IN - first)[None, :], other=0.0)
        w = tl.load(w_ptrs + first * w_in, mask=(i < IN - first)[:, None] & (j < OUT)[None, :], other=0.0)
        if INTERPRETED:
            # The interpreter multiplies bf16 matrices wrongly; the products are the same.
            a, w = a.to(tl.float32), w.to(tl.float32)
        acc = tl.dot(a, w, acc, input_precision="ieee")
    out_ptrs = out_ptr + row[:, None] * out_stride + head * out_head + j[None, :] * out_column
    tl.store(out_ptrs, rounded(acc, out_ptr.dtype.element_ty), mask=there[:, None] & (j < OUT)[None, :])
