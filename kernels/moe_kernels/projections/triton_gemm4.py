"""A linear layer on tensor cores, weights of four bits: unpacked in registers, then as the compute dtype.

Each tile of bytes gives two tiles of weights, those of the low and those of the high nibbles, and two products with the
columns that belong to them. FORM, GROUP and HAS_ZERO are those of ``experts.triton_unpack``.

Shapes: T tokens, N outputs, K inputs. Offsets are 32-bit unless WIDE_W (weights) and WIDE_ROWS (x and the result).
"""

# Triton gives its decorator and its device functions no types.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

from moe_kernels.experts.triton_rows import product, sorted_tile, split_range
from moe_kernels.experts.triton_unpack import SHRUNK, load_scales, unpack
from moe_kernels.projections.triton_rows import ask_ahead, store_tile, wait


@triton.jit(do_not_specialize=["num_tokens"])
def linear4_kernel(
    x_ptr, w_ptr, w_desc, scale_ptr, zero_ptr, global_ptr, bias_ptr, out_ptr, num_tokens, outputs, x_stride,
    K: tl.constexpr, FORM: tl.constexpr, GROUP: tl.constexpr, HAS_ZERO: tl.constexpr, ASM: tl.constexpr,
    HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, SPLIT_K: tl.constexpr, SWAP: tl.constexpr, USE_TMA: tl.constexpr, WIDE_W: tl.constexpr,
    WIDE_ROWS: tl.constexpr, PRECISION: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``out[t, n] = w[n] . x[t] + bias[n]``, or this program's part of the sum."""
    SPAN: tl.constexpr = GROUP if GROUP < BLOCK_K else BLOCK_K
    SCALES: tl.constexpr = BLOCK_K // SPAN
    ROW_BYTES: tl.constexpr = (K + 31) // 32 * 16
    ROW_SCALES: tl.constexpr = 2 * ((K + 31) // 32) if FORM == 1 else (K + GROUP - 1) // GROUP
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    EVEN: tl.constexpr = K % BLOCK_K == 0
    tile_m, tile_n = sorted_tile(tl.program_id(0), tl.cdiv(num_tokens, BLOCK_M), tl.cdiv(outputs, BLOCK_N), GROUP_M)
    begin, end = split_range(K, BLOCK_K, SPLIT_K)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    valid = rows < num_tokens
    offs_n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_b = tl.arange(0, BLOCK_K // 2)
    low_k = offs_b // 8 * 16 + offs_b % 8
    # Outputs past N read the last row of weights; they are not stored.
    w_row = tl.minimum(offs_n, outputs - 1)
    if PREFETCH:
        ask_ahead(w_ptr, w_row, ROW_BYTES, begin // 2, PREFETCH)
    # Weights do not come from the kernel before, and may be asked for; all else waits.
    wait(PDL)
    x_row = rows
    if WIDE_ROWS:
        x_row = x_row.to(tl.int64)
    if WIDE_W:
        w_row = w_row.to(tl.int64)
    a_ptrs = x_ptr + x_row[:, None] * x_stride + (begin + low_k)[None, :]
    w_ptrs = w_ptr + w_row[:, None] * ROW_BYTES + (begin // 2 + offs_b)[None, :]
    scales, zeros = scale_ptr + w_row * ROW_SCALES, zero_ptr + w_row * ROW_SCALES

    acc = tl.zeros([BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N], dtype=tl.float32)
    for k in range(begin, end, BLOCK_K):
        if EVEN:
            low = tl.load(a_ptrs, mask=valid[:, None], other=0.0)
            high = tl.load(a_ptrs + 8, mask=valid[:, None], other=0.0)
        else:
            low = tl.load(a_ptrs, mask=valid[:, None] & (low_k[None, :] < K - k), other=0.0)
            high = tl.load(a_ptrs + 8, mask=valid[:, None] & (low_k[None, :] + 8 < K - k), other=0.0)
        if USE_TMA:
            packed = w_desc.load([tile_n * BLOCK_N, k // 2])
        elif EVEN:
            packed = tl.load(w_ptrs)
        else:
            packed = tl.load(w_ptrs, mask=offs_b[None, :] < ROW_BYTES - k // 2, other=0)
        scale, zero = load_scales(scales, zeros, k, K, SCALES, FORM, GROUP, HAS_ZERO, EVEN, ASM)
        w_low, w_high = unpack(packed, scale, zero, BLOCK_N, SCALES, SPAN, FORM, DTYPE, ASM)
        acc = product(low, w_low, acc, SWAP, PRECISION, 0)
        acc = product(high, w_high, acc, SWAP, PRECISION, 0)
        a_ptrs += BLOCK_K
        w_ptrs += BLOCK_K // 2

    if SWAP:
        acc = acc.T
    if ASM and FORM > 0:
        acc = acc * (1.0 / SHRUNK)
    if FORM == 1:
        acc = acc * tl.load(global_ptr)
    store_tile(acc, bias_ptr, out_ptr, rows, valid, offs_n, num_tokens, outputs, HAS_BIAS, SPLIT_K, WIDE_ROWS)
