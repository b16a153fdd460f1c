"""Grouped GEMM kernels on tensor cores: gate and up with the activation, and down with the router weight.

A block is up to BLOCK_M routed rows of one expert. Which rows, comes either from ``moe_align`` (sorted), or is worked
out by each program from the ids themselves (INLINE), which saves a launch while the rows are few: the program of row r
goes on only if r is the first, the BLOCK_M-th, the 2*BLOCK_M-th ... row of its expert, and gathers that row's block.

Shapes: T tokens, D model, F ffn, E experts, K experts per token, N = T*K routed rows; row r belongs to token r // K.
Offsets into one expert's weights are 32-bit unless WIDE_W, those into rows unless WIDE_ROWS; an expert's own offset is
always 64-bit.
"""

# Triton gives its decorator and its device functions no types.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl


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
    group_m = tl.minimum(num_blocks_m - first_m, GROUP_M)
    within = pid % per_group
    return first_m + within % group_m, within // group_m


@triton.jit(do_not_specialize=["num_rows"])
def up_kernel(
    x_ptr, w1_ptr, w1_desc, h_ptr, ids_ptr, sorted_rows_ptr, block_experts_ptr, num_padded_ptr, num_rows, x_stride,
    E: tl.constexpr, K: tl.constexpr, D: tl.constexpr, F: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    INLINE: tl.constexpr, ROWS_P2: tl.constexpr, USE_TMA: tl.constexpr, WIDE_W: tl.constexpr, WIDE_ROWS: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``h[r, f] = silu(x[r // K] . w1[e, f]) * (x[r // K] . w1[e, F + f])``."""
    NUM_TILES_N: tl.constexpr = (F + BLOCK_N - 1) // BLOCK_N
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    pid = tl.program_id(0)
    if INLINE:
        row = pid % num_rows
        tile_n = pid // num_rows
        expert = tl.load(ids_ptr + row)
        if (expert < 0) | (expert >= E):
            return
        leads, rows, valid = inline_block(ids_ptr, row, expert, num_rows, BLOCK_M, ROWS_P2)
        if not leads:
            return
    else:
        num_blocks_m = tl.load(num_padded_ptr) // BLOCK_M
        if pid >= num_blocks_m * NUM_TILES_N:
            return
        block_m, tile_n = sorted_tile(pid, num_blocks_m, NUM_TILES_N, GROUP_M)
        expert = tl.load(block_experts_ptr + block_m)
        rows = tl.load(sorted_rows_ptr + block_m * BLOCK_M + tl.arange(0, BLOCK_M))
        valid = rows < num_rows

    offs_n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    token = rows // K
    if WIDE_ROWS:
        token = token.to(tl.int64)
        rows = rows.to(tl.int64)
    a_ptrs = x_ptr + token[:, None] * x_stride + offs_k[None, :]
    # Columns past F read the last one; they are not stored.
    w_row = tl.minimum(offs_n, F - 1)
    if WIDE_W:
        w_row = w_row.to(tl.int64)
    gate_ptrs = w1_ptr + expert.to(tl.int64) * (2 * F * D) + w_row[:, None] * D + offs_k[None, :]
    up_ptrs = gate_ptrs + F * D
    desc_row = expert * (2 * F) + tile_n * BLOCK_N

    gate = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for k in range(0, D, BLOCK_K):
        if D % BLOCK_K == 0:
            a = tl.load(a_ptrs, mask=valid[:, None], other=0.0)
        else:
            a = tl.load(a_ptrs, mask=valid[:, None] & (offs_k[None, :] < D - k), other=0.0)
        if USE_TMA:
            w_gate = w1_desc.load([desc_row, k])
            w_up = w1_desc.load([desc_row + F, k])
        elif D % BLOCK_K == 0:
            w_gate = tl.load(gate_ptrs)
            w_up = tl.load(up_ptrs)
        else:
            w_gate = tl.load(gate_ptrs, mask=offs_k[None, :] < D - k, other=0.0)
            w_up = tl.load(up_ptrs, mask=offs_k[None, :] < D - k, other=0.0)
        gate = tl.dot(a, w_gate.T, gate, input_precision=PRECISION)
        up = tl.dot(a, w_up.T, up, input_precision=PRECISION)
        a_ptrs += BLOCK_K
        gate_ptrs += BLOCK_K
        up_ptrs += BLOCK_K

    h = gate / (1.0 + tl.exp(-gate)) * up
    h_ptrs = h_ptr + rows[:, None] * F + offs_n[None, :]
    tl.store(h_ptrs, h.to(h_ptr.dtype.element_ty), mask=valid[:, None] & (offs_n[None, :] < F))


@triton.jit(do_not_specialize=["num_rows"])
def down_kernel(
    h_ptr, w2_ptr, w2_desc, y_ptr, topk_weights_ptr, ids_ptr, sorted_rows_ptr, block_experts_ptr, num_padded_ptr,
    num_rows,
    E: tl.constexpr, D: tl.constexpr, F: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    INLINE: tl.constexpr, ROWS_P2: tl.constexpr, USE_TMA: tl.constexpr, WIDE_W: tl.constexpr, WIDE_ROWS: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``y[r, d] = topk_weights[r] * (h[r] . w2[e, d])``; rows of dropped ids stay unwritten."""
    NUM_TILES_N: tl.constexpr = (D + BLOCK_N - 1) // BLOCK_N
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    pid = tl.program_id(0)
    if INLINE:
        row = pid % num_rows
        tile_n = pid // num_rows
        expert = tl.load(ids_ptr + row)
        if (expert < 0) | (expert >= E):
            return
        leads, rows, valid = inline_block(ids_ptr, row, expert, num_rows, BLOCK_M, ROWS_P2)
        if not leads:
            return
    else:
        num_blocks_m = tl.load(num_padded_ptr) // BLOCK_M
        if pid >= num_blocks_m * NUM_TILES_N:
            return
        block_m, tile_n = sorted_tile(pid, num_blocks_m, NUM_TILES_N, GROUP_M)
        expert = tl.load(block_experts_ptr + block_m)
        rows = tl.load(sorted_rows_ptr + block_m * BLOCK_M + tl.arange(0, BLOCK_M))
        valid = rows < num_rows

    offs_n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    weight = tl.load(topk_weights_ptr + rows, mask=valid, other=0.0)
    if WIDE_ROWS:
        rows = rows.to(tl.int64)
    a_ptrs = h_ptr + rows[:, None] * F + offs_k[None, :]
    w_row = tl.minimum(offs_n, D - 1)
    if WIDE_W:
        w_row = w_row.to(tl.int64)
    w_ptrs = w2_ptr + expert.to(tl.int64) * (D * F) + w_row[:, None] * F + offs_k[None, :]
    desc_row = expert * D + tile_n * BLOCK_N

    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for k in range(0, F, BLOCK_K):
        if F % BLOCK_K == 0:
            a = tl.load(a_ptrs, mask=valid[:, None], other=0.0)
        else:
            a = tl.load(a_ptrs, mask=valid[:, None] & (offs_k[None, :] < F - k), other=0.0)
        if USE_TMA:
            w = w2_desc.load([desc_row, k])
        elif F % BLOCK_K == 0:
            w = tl.load(w_ptrs)
        else:
            w = tl.load(w_ptrs, mask=offs_k[None, :] < F - k, other=0.0)
        acc = tl.dot(a, w.T, acc, input_precision=PRECISION)
        a_ptrs += BLOCK_K
        w_ptrs += BLOCK_K

    y_ptrs = y_ptr + rows[:, None] * D + offs_n[None, :]
    y = acc * weight[:, None]
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=valid[:, None] & (offs_n[None, :] < D))
