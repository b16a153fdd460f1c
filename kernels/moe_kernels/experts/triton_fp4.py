"""Grouped GEMM kernels on FP4 units: weights and activations both in nvfp4, or both in mxfp4, by ``tl.dot_scaled``.

Both operands are packed as ``quant.pack`` says. A byte's two columns are 8 apart, not neighbours as ``dot_scaled`` has
it, but the same ones on either side and under the same scales, so the product is the same (``quant.fp4``). NVFP4:
scales e4m3 of 16 columns, and factors of an activation row and of a weight matrix, applied after the sum; else e8m0 of
32.

With SWAP weights are the left operand. Tensor cores of compute capability 10 take whole tiles of 128 rows there.

Shapes: T tokens, D model, F ffn, E experts, K experts per token, N = T*K routed rows; row r belongs to token r // K.
"""

# Triton gives its decorator and its device functions no types.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

from moe_kernels.experts.triton_gemm import store_down, store_up
from moe_kernels.experts.triton_rows import find_block


@triton.jit
def load_columns(ptrs, first, valid, LENGTH: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr):
    """``[R, WIDTH]`` from ``first`` on of rows that start at ``ptrs`` ``[R]``; zeros past LENGTH and in rows not valid.

    ``valid`` is None where all rows are; EVEN where no tile reaches past LENGTH.
    """
    column = first + tl.arange(0, WIDTH)[None, :]
    if valid is None:
        if EVEN:
            return tl.load(ptrs[:, None] + column)
        else:
            return tl.load(ptrs[:, None] + column, mask=column < LENGTH, other=0.0)
    elif EVEN:
        return tl.load(ptrs[:, None] + column, mask=valid[:, None], other=0.0)
    else:
        return tl.load(ptrs[:, None] + column, mask=valid[:, None] & (column < LENGTH), other=0.0)


@triton.jit
def load_tile(ptrs, scale_ptrs, valid, k, LENGTH: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr):
    """(bytes ``[R, BLOCK_K / 2]``, scales ``[R, BLOCK_K / GROUP]``) of the columns from k on."""
    PADDED: tl.constexpr = (LENGTH + 31) // 32 * 32
    EVEN: tl.constexpr = PADDED % BLOCK_K == 0
    data = load_columns(ptrs, k // 2, valid, PADDED // 2, BLOCK_K // 2, EVEN)
    scale = load_columns(scale_ptrs, k // GROUP, valid, PADDED // GROUP, BLOCK_K // GROUP, EVEN)
    return data, scale


@triton.jit
def scaled_product(a, a_scale, w, w_scale, acc, SWAP: tl.constexpr):
    """``acc + a . w^T`` [BLOCK_M, BLOCK_N], or with SWAP its transpose; sums in float32."""
    if SWAP:
        return tl.dot_scaled(w, w_scale, "e2m1", a.T, a_scale, "e2m1", acc)
    else:
        return tl.dot_scaled(a, a_scale, "e2m1", w.T, w_scale, "e2m1", acc)


@triton.jit(do_not_specialize=["num_rows"])
def up_fp4_kernel(
    x_ptr, x_scale_ptr, x_whole_ptr, w_ptr, w_scale_ptr, w_whole_ptr, out_ptr, topk_weights_ptr,
    ids_ptr, sorted_rows_ptr, block_experts_ptr, num_padded_ptr, num_rows,
    E: tl.constexpr, K: tl.constexpr, D: tl.constexpr, F: tl.constexpr, NVFP4: tl.constexpr, ON_INPUT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    SWAP: tl.constexpr, INLINE: tl.constexpr, ROWS_P2: tl.constexpr, WIDE_W: tl.constexpr, WIDE_ROWS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """``h[r, f] = silu(x[r // K] . w1[e, f]) * (x[r // K] . w1[e, F + f])``; rows of dropped ids stay unwritten."""
    NUM_TILES_N: tl.constexpr = (F + BLOCK_N - 1) // BLOCK_N
    GROUP: tl.constexpr = 16 if NVFP4 else 32
    ROW_BYTES: tl.constexpr = (D + 31) // 32 * 16
    ROW_SCALES: tl.constexpr = (D + 31) // 32 * (32 // GROUP)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    active, expert, rows, valid, tile_n = find_block(
        ids_ptr, sorted_rows_ptr, block_experts_ptr, num_padded_ptr, num_rows, NUM_TILES_N,
        E, BLOCK_M, GROUP_M, INLINE, ROWS_P2,
    )  # fmt: skip
    if not active:
        return

    offs_n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    token = rows // K
    if WIDE_ROWS:
        token = token.to(tl.int64)
        rows = rows.to(tl.int64)
    x_rows = x_ptr + token * ROW_BYTES
    x_scales = x_scale_ptr + token * ROW_SCALES
    # Gate and up take turns, so that one product gives both: of two that share scales Triton 3.6 compiles none for
    # compute capability 10. Columns past F read the last one and are not stored.
    turn = tl.arange(0, 2 * BLOCK_N)
    w_row = tl.minimum(tile_n * BLOCK_N + turn // 2, F - 1) + turn % 2 * F
    if WIDE_W:
        w_row = w_row.to(tl.int64)
    first = expert.to(tl.int64) * (2 * F)
    w_rows = w_ptr + first * ROW_BYTES + w_row * ROW_BYTES
    w_scales = w_scale_ptr + first * ROW_SCALES + w_row * ROW_SCALES

    acc = tl.zeros([2 * BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, 2 * BLOCK_N], dtype=tl.float32)
    for k in range(0, D, BLOCK_K):
        a, a_scale = load_tile(x_rows, x_scales, valid, k, D, BLOCK_K, GROUP)
        w, w_scale = load_tile(w_rows, w_scales, None, k, D, BLOCK_K, GROUP)
        acc = scaled_product(a, a_scale, w, w_scale, acc, SWAP)

    if SWAP:
        acc = acc.T
    gate, up = tl.split(tl.reshape(acc, [BLOCK_M, BLOCK_N, 2]))
    if NVFP4:
        whole = tl.load(x_whole_ptr + token, mask=valid, other=0.0)
        gate = gate * (whole * tl.load(w_whole_ptr + expert * 2))[:, None]
        up = up * (whole * tl.load(w_whole_ptr + expert * 2 + 1))[:, None]
    if ON_INPUT:
        weight = tl.load(topk_weights_ptr + rows, mask=valid, other=0.0)
        gate = gate * weight[:, None]
        up = up * weight[:, None]
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    store_up(gate, up, out_ptr, out_ptr, rows, valid, offs_n, num_rows, tile_n, F, BLOCK_M, BLOCK_N, 0, DTYPE)


@triton.jit(do_not_specialize=["num_rows"])
def down_fp4_kernel(
    h_ptr, h_scale_ptr, h_whole_ptr, w_ptr, w_scale_ptr, w_whole_ptr, out_ptr, topk_weights_ptr,
    ids_ptr, sorted_rows_ptr, block_experts_ptr, num_padded_ptr, num_rows,
    E: tl.constexpr, K: tl.constexpr, D: tl.constexpr, F: tl.constexpr, NVFP4: tl.constexpr, ON_INPUT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    SWAP: tl.constexpr, INLINE: tl.constexpr, ROWS_P2: tl.constexpr, WIDE_W: tl.constexpr, WIDE_ROWS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """``y[r, d] = topk_weights[r] * (h[r] . w2[e, d])``; rows of dropped ids stay unwritten."""
    NUM_TILES_N: tl.constexpr = (D + BLOCK_N - 1) // BLOCK_N
    GROUP: tl.constexpr = 16 if NVFP4 else 32
    ROW_BYTES: tl.constexpr = (F + 31) // 32 * 16
    ROW_SCALES: tl.constexpr = (F + 31) // 32 * (32 // GROUP)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    active, expert, rows, valid, tile_n = find_block(
        ids_ptr, sorted_rows_ptr, block_experts_ptr, num_padded_ptr, num_rows, NUM_TILES_N,
        E, BLOCK_M, GROUP_M, INLINE, ROWS_P2,
    )  # fmt: skip
    if not active:
        return

    offs_n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    if WIDE_ROWS:
        rows = rows.to(tl.int64)
    h_rows = h_ptr + rows * ROW_BYTES
    h_scales = h_scale_ptr + rows * ROW_SCALES
    w_row = tl.minimum(offs_n, D - 1)
    if WIDE_W:
        w_row = w_row.to(tl.int64)
    first = expert.to(tl.int64) * D
    w_rows = w_ptr + first * ROW_BYTES + w_row * ROW_BYTES
    w_scales = w_scale_ptr + first * ROW_SCALES + w_row * ROW_SCALES

    acc = tl.zeros([BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N], dtype=tl.float32)
    for k in range(0, F, BLOCK_K):
        a, a_scale = load_tile(h_rows, h_scales, valid, k, F, BLOCK_K, GROUP)
        w, w_scale = load_tile(w_rows, w_scales, None, k, F, BLOCK_K, GROUP)
        acc = scaled_product(a, a_scale, w, w_scale, acc, SWAP)

    if SWAP:
        acc = acc.T
    if NVFP4:
        whole = tl.load(h_whole_ptr + rows, mask=valid, other=0.0)
        acc = acc * (whole * tl.load(w_whole_ptr + expert))[:, None]
    if not ON_INPUT:
        acc = acc * tl.load(topk_weights_ptr + rows, mask=valid, other=0.0)[:, None]
    store_down(acc, out_ptr, rows, valid, offs_n, num_rows, K, D, 0)
