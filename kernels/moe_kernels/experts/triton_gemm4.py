"""Grouped GEMM kernels on tensor cores for weights of four bits: unpacked in registers, then as the compute dtype.

Each tile of bytes gives two tiles of weights, those of the low and those of the high nibbles, and two products with the
columns that belong to them. FORM, GROUP and HAS_ZERO are those of ``triton_unpack``; OUT those of ``triton_gemm``.

Shapes: T tokens, D model, F ffn, E experts, K experts per token, N = T*K routed rows; row r belongs to token r // K.
"""

# Triton gives its decorator and its device functions no types.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

from moe_kernels.experts.triton_gemm import store_down, store_up
from moe_kernels.experts.triton_rows import find_block, product, split_range
from moe_kernels.experts.triton_unpack import SHRUNK, load_scales, unpack


@triton.jit(do_not_specialize=["num_rows"])
def up4_kernel(
    x_ptr, w_ptr, w_desc, scale_ptr, zero_ptr, global_ptr, out_ptr, topk_weights_ptr,
    ids_ptr, sorted_rows_ptr, block_experts_ptr, num_padded_ptr, num_rows, x_stride,
    E: tl.constexpr, K: tl.constexpr, D: tl.constexpr, F: tl.constexpr,
    FORM: tl.constexpr, GROUP: tl.constexpr, HAS_ZERO: tl.constexpr, ASM: tl.constexpr,
    OUT: tl.constexpr, ON_INPUT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    SPLIT_K: tl.constexpr, SWAP: tl.constexpr, INLINE: tl.constexpr, ROWS_P2: tl.constexpr, USE_TMA: tl.constexpr,
    WIDE_W: tl.constexpr, WIDE_ROWS: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``h[r, f] = silu(x[r // K] . w1[e, f]) * (x[r // K] . w1[e, F + f])``, or the parts of both sums."""
    NUM_TILES_N: tl.constexpr = (F + BLOCK_N - 1) // BLOCK_N
    SPAN: tl.constexpr = GROUP if GROUP < BLOCK_K else BLOCK_K
    SCALES: tl.constexpr = BLOCK_K // SPAN
    ROW_BYTES: tl.constexpr = (D + 31) // 32 * 16
    ROW_SCALES: tl.constexpr = 2 * ((D + 31) // 32) if FORM == 1 else (D + GROUP - 1) // GROUP
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    active, expert, rows, valid, tile_n = find_block(
        ids_ptr, sorted_rows_ptr, block_experts_ptr, num_padded_ptr, num_rows, NUM_TILES_N,
        E, BLOCK_M, GROUP_M, INLINE, ROWS_P2,
    )  # fmt: skip
    if not active:
        return
    begin, end = split_range(D, BLOCK_K, SPLIT_K)

    offs_n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_b = tl.arange(0, BLOCK_K // 2)
    low_k = offs_b // 8 * 16 + offs_b % 8
    token = rows // K
    if WIDE_ROWS:
        token = token.to(tl.int64)
        rows = rows.to(tl.int64)
    a_ptrs = x_ptr + token[:, None] * x_stride + (begin + low_k)[None, :]
    # Columns past F read the last one; they are not stored.
    w_row = tl.minimum(offs_n, F - 1)
    if WIDE_W:
        w_row = w_row.to(tl.int64)
    first = expert.to(tl.int64) * (2 * F)
    gate_ptrs = w_ptr + first * ROW_BYTES + w_row[:, None] * ROW_BYTES + (begin // 2 + offs_b)[None, :]
    up_ptrs = gate_ptrs + F * ROW_BYTES
    gate_scales = scale_ptr + first * ROW_SCALES + w_row * ROW_SCALES
    up_scales = gate_scales + F * ROW_SCALES
    gate_zeros = zero_ptr + first * ROW_SCALES + w_row * ROW_SCALES
    up_zeros = gate_zeros + F * ROW_SCALES
    desc_row = expert * (2 * F) + tile_n * BLOCK_N

    gate = tl.zeros([BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N], dtype=tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N], dtype=tl.float32)
    for k in range(begin, end, BLOCK_K):
        if D % BLOCK_K == 0:
            low = tl.load(a_ptrs, mask=valid[:, None], other=0.0)
            high = tl.load(a_ptrs + 8, mask=valid[:, None], other=0.0)
        else:
            low = tl.load(a_ptrs, mask=valid[:, None] & (low_k[None, :] < D - k), other=0.0)
            high = tl.load(a_ptrs + 8, mask=valid[:, None] & (low_k[None, :] + 8 < D - k), other=0.0)
        if USE_TMA:
            gate_bytes = w_desc.load([desc_row, k // 2])
            up_bytes = w_desc.load([desc_row + F, k // 2])
        elif D % BLOCK_K == 0:
            gate_bytes = tl.load(gate_ptrs)
            up_bytes = tl.load(up_ptrs)
        else:
            inside = offs_b[None, :] < ROW_BYTES - k // 2
            gate_bytes = tl.load(gate_ptrs, mask=inside, other=0)
            up_bytes = tl.load(up_ptrs, mask=inside, other=0)
        scale, zero = load_scales(gate_scales, gate_zeros, k, D, SCALES, FORM, GROUP, HAS_ZERO, D % BLOCK_K == 0, ASM)
        w_low, w_high = unpack(gate_bytes, scale, zero, BLOCK_N, SCALES, SPAN, FORM, DTYPE, ASM)
        gate = product(low, w_low, gate, SWAP, PRECISION, 0)
        gate = product(high, w_high, gate, SWAP, PRECISION, 0)
        scale, zero = load_scales(up_scales, up_zeros, k, D, SCALES, FORM, GROUP, HAS_ZERO, D % BLOCK_K == 0, ASM)
        w_low, w_high = unpack(up_bytes, scale, zero, BLOCK_N, SCALES, SPAN, FORM, DTYPE, ASM)
        up = product(low, w_low, up, SWAP, PRECISION, 0)
        up = product(high, w_high, up, SWAP, PRECISION, 0)
        a_ptrs += BLOCK_K
        gate_ptrs += BLOCK_K // 2
        up_ptrs += BLOCK_K // 2

    if SWAP:
        gate = gate.T
        up = up.T
    if ASM and FORM > 0:
        gate = gate * (1.0 / SHRUNK)
        up = up * (1.0 / SHRUNK)
    if FORM == 1:
        gate = gate * tl.load(global_ptr + expert * 2)
        up = up * tl.load(global_ptr + expert * 2 + 1)
    if ON_INPUT:
        weight = tl.load(topk_weights_ptr + rows, mask=valid, other=0.0)
        gate = gate * weight[:, None]
        up = up * weight[:, None]
    store_up(gate, up, out_ptr, out_ptr, rows, valid, offs_n, num_rows, tile_n, F, BLOCK_M, BLOCK_N, OUT, DTYPE)


@triton.jit(do_not_specialize=["num_rows"])
def down4_kernel(
    h_ptr, w_ptr, w_desc, scale_ptr, zero_ptr, global_ptr, out_ptr, topk_weights_ptr,
    ids_ptr, sorted_rows_ptr, block_experts_ptr, num_padded_ptr, num_rows,
    E: tl.constexpr, K: tl.constexpr, D: tl.constexpr, F: tl.constexpr,
    FORM: tl.constexpr, GROUP: tl.constexpr, HAS_ZERO: tl.constexpr, ASM: tl.constexpr,
    OUT: tl.constexpr, ON_INPUT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    SPLIT_K: tl.constexpr, SWAP: tl.constexpr, INLINE: tl.constexpr, ROWS_P2: tl.constexpr, USE_TMA: tl.constexpr,
    WIDE_W: tl.constexpr, WIDE_ROWS: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``y[r, d] = topk_weights[r] * (h[r] . w2[e, d])``; rows of dropped ids stay unwritten."""
    NUM_TILES_N: tl.constexpr = (D + BLOCK_N - 1) // BLOCK_N
    SPAN: tl.constexpr = GROUP if GROUP < BLOCK_K else BLOCK_K
    SCALES: tl.constexpr = BLOCK_K // SPAN
    ROW_BYTES: tl.constexpr = (F + 31) // 32 * 16
    ROW_SCALES: tl.constexpr = 2 * ((F + 31) // 32) if FORM == 1 else (F + GROUP - 1) // GROUP
    DTYPE: tl.constexpr = h_ptr.dtype.element_ty
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    active, expert, rows, valid, tile_n = find_block(
        ids_ptr, sorted_rows_ptr, block_experts_ptr, num_padded_ptr, num_rows, NUM_TILES_N,
        E, BLOCK_M, GROUP_M, INLINE, ROWS_P2,
    )  # fmt: skip
    if not active:
        return
    begin, end = split_range(F, BLOCK_K, SPLIT_K)

    offs_n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_b = tl.arange(0, BLOCK_K // 2)
    low_k = offs_b // 8 * 16 + offs_b % 8
    if not ON_INPUT:
        weight = tl.load(topk_weights_ptr + rows, mask=valid, other=0.0)
    if WIDE_ROWS:
        rows = rows.to(tl.int64)
    a_ptrs = h_ptr + rows[:, None] * F + (begin + low_k)[None, :]
    w_row = tl.minimum(offs_n, D - 1)
    if WIDE_W:
        w_row = w_row.to(tl.int64)
    first = expert.to(tl.int64) * D
    w_ptrs = w_ptr + first * ROW_BYTES + w_row[:, None] * ROW_BYTES + (begin // 2 + offs_b)[None, :]
    scales = scale_ptr + first * ROW_SCALES + w_row * ROW_SCALES
    zeros = zero_ptr + first * ROW_SCALES + w_row * ROW_SCALES
    desc_row = expert * D + tile_n * BLOCK_N

    acc = tl.zeros([BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N], dtype=tl.float32)
    for k in range(begin, end, BLOCK_K):
        if F % BLOCK_K == 0:
            low = tl.load(a_ptrs, mask=valid[:, None], other=0.0)
            high = tl.load(a_ptrs + 8, mask=valid[:, None], other=0.0)
        else:
            low = tl.load(a_ptrs, mask=valid[:, None] & (low_k[None, :] < F - k), other=0.0)
            high = tl.load(a_ptrs + 8, mask=valid[:, None] & (low_k[None, :] + 8 < F - k), other=0.0)
        if USE_TMA:
            w_bytes = w_desc.load([desc_row, k // 2])
        elif F % BLOCK_K == 0:
            w_bytes = tl.load(w_ptrs)
        else:
            w_bytes = tl.load(w_ptrs, mask=offs_b[None, :] < ROW_BYTES - k // 2, other=0)
        scale, zero = load_scales(scales, zeros, k, F, SCALES, FORM, GROUP, HAS_ZERO, F % BLOCK_K == 0, ASM)
        w_low, w_high = unpack(w_bytes, scale, zero, BLOCK_N, SCALES, SPAN, FORM, DTYPE, ASM)
        acc = product(low, w_low, acc, SWAP, PRECISION, 0)
        acc = product(high, w_high, acc, SWAP, PRECISION, 0)
        a_ptrs += BLOCK_K
        w_ptrs += BLOCK_K // 2

    if SWAP:
        acc = acc.T
    if ASM and FORM > 0:
        acc = acc * (1.0 / SHRUNK)
    if FORM == 1:
        acc = acc * tl.load(global_ptr + expert)
    if not ON_INPUT:
        acc = acc * weight[:, None]
    store_down(acc, out_ptr, rows, valid, offs_n, num_rows, K, D, OUT)
