"""Which rows, which columns and which part of the sum a program works on.

A block is up to BLOCK_M routed rows of one expert. Which rows, comes either from ``moe_align`` (sorted), or is worked
out by each program from the ids themselves (INLINE), which saves a launch while the rows are few: the program of row r
goes on only if r is the first, the BLOCK_M-th, the 2*BLOCK_M-th ... row of its expert, and gathers that row's block.
"""

# Triton gives its decorator and its device functions no types.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

from moe_kernels.quant.triton import to_e4m3


@triton.jit
def inline_block(ids_ptr, row, expert, num_rows, BLOCK_M: tl.constexpr, ROWS_P2: tl.constexpr):
    """Rows of the block that ``row`` leads: (leads, rows [BLOCK_M], valid [BLOCK_M]).

    Example with BLOCK_M = 2 and ids [5, 3, 5, 5]: row 0 leads block (0, 2), row 1 leads (1, -), row 3 leads (3, -), and
    row 2, second of its expert, leads none.
    """
    other = tl.arange(0, ROWS_P2)
    same = (tl.load(ids_ptr + other, mask=other < num_rows, other=-1) == expert).to(tl.int32)
    rank = tl.cumsum(same, 0) - 1
    own_rank = tl.sum(tl.where(other < row, same, 0))
    wanted = own_rank + tl.arange(0, BLOCK_M)
    match = (rank[None, :] == wanted[:, None]) & (same[None, :] != 0)
    rows = tl.sum(tl.where(match, other[None, :], 0), axis=1)
    valid = tl.sum(match.to(tl.int32), axis=1) > 0
    return own_rank % BLOCK_M == 0, rows, valid


@triton.jit
def sorted_tile(pid, num_blocks_m, num_tiles_n, GROUP_M: tl.constexpr):
    """Order of tiles: GROUP_M blocks side by side walk the columns together, so that they share weights in L2."""
    per_group = GROUP_M * num_tiles_n
    group = pid // per_group
    first_m = group * GROUP_M
    group_m = tl.maximum(1, tl.minimum(num_blocks_m - first_m, GROUP_M))
    within = pid % per_group
    return first_m + within % group_m, within // group_m


@triton.jit
def find_block(
    ids_ptr, sorted_rows_ptr, block_experts_ptr, num_padded_ptr, num_rows, num_tiles_n,
    E: tl.constexpr, BLOCK_M: tl.constexpr, GROUP_M: tl.constexpr, INLINE: tl.constexpr, ROWS_P2: tl.constexpr,
):  # fmt: skip
    """(whether there is work, expert, rows [BLOCK_M], valid [BLOCK_M], tile of columns) of this program."""
    pid = tl.program_id(0)
    if INLINE:
        row = pid % num_rows
        tile_n = pid // num_rows
        expert = tl.load(ids_ptr + row)
        leads, rows, valid = inline_block(ids_ptr, row, expert, num_rows, BLOCK_M, ROWS_P2)
        active = leads & (expert >= 0) & (expert < E)
    else:
        num_blocks_m = tl.load(num_padded_ptr) // BLOCK_M
        active = pid < num_blocks_m * num_tiles_n
        block_m, tile_n = sorted_tile(pid, num_blocks_m, num_tiles_n, GROUP_M)
        expert = tl.load(block_experts_ptr + block_m, mask=active, other=-1)
        rows = tl.load(sorted_rows_ptr + block_m * BLOCK_M + tl.arange(0, BLOCK_M), mask=active, other=num_rows)
        valid = rows < num_rows
    return active, expert, rows, valid, tile_n


@triton.jit
def split_range(LENGTH: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr):
    """Columns [begin, end) of the sum that this program takes: whole tiles, so that parts do not overlap.

    Example: 1000 columns in tiles of 128 are 8 tiles; with SPLIT_K = 3 parts take 3, 3 and 2 of them.
    """
    if SPLIT_K == 1:
        return 0, LENGTH
    else:
        tiles: tl.constexpr = (LENGTH + BLOCK_K - 1) // BLOCK_K
        part: tl.constexpr = ((tiles + SPLIT_K - 1) // SPLIT_K) * BLOCK_K
        begin = tl.program_id(1) * part
        return begin, tl.minimum(begin + part, LENGTH)


@triton.jit
def product(a, w, acc, SWAP: tl.constexpr, PRECISION: tl.constexpr, IMPRECISE: tl.constexpr):
    """``acc + a . w^T`` [BLOCK_M, BLOCK_N], or with SWAP its transpose, in which weights are the left operand.

    Tensor cores of Hopper take at least 64 rows on the left: with few tokens there are enough weights for that only.
    """
    if acc.dtype == tl.int32:
        if SWAP:
            return tl.dot(w, a.T, acc, out_dtype=tl.int32)
        else:
            return tl.dot(a, w.T, acc, out_dtype=tl.int32)
    else:
        if SWAP:
            return tl.dot(w, a.T, acc, input_precision=PRECISION, max_num_imprecise_acc=IMPRECISE)
        else:
            return tl.dot(a, w.T, acc, input_precision=PRECISION, max_num_imprecise_acc=IMPRECISE)


@triton.jit
def quantize_groups(x):
    """float32 ``[R, 128]`` to (e4m3 ``[R, 128]``, float32 scale ``[R]``), as ``quantize_activation`` does a block."""
    finite = tl.abs(x) < float("inf")
    amax = tl.maximum(tl.max(tl.where(finite, tl.abs(x), 0.0), axis=1), 1e-30)
    inverse = tl.math.div_rn(tl.zeros_like(amax) + 448.0, amax)
    scale = tl.math.div_rn(amax, tl.zeros_like(amax) + 448.0)
    scaled = x * inverse[:, None]
    # Selected, not clamped by minimum and maximum, which would turn a NaN into a number.
    scaled = tl.where(scaled > 448.0, 448.0, tl.where(scaled < -448.0, -448.0, scaled))
    scaled = tl.where(finite, scaled, float("nan"))
    return to_e4m3(scaled), scale
