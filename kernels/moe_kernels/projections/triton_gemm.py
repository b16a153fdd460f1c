"""A linear layer on tensor cores, weights of eight bits or more.

Scales. X_SCALES: 0 none, 1 one for all rows, 2 one a row, 3 one a row and 128 columns, 4 as 3 but worked out here, from
rows that are not quantised yet. W_SCALES: 0 none, 1 one for all, 2 one a row of weights, 3 one a block of 128x128.
Scales that do not vary along the sum are applied after it; block scales to the product of every tile, in float32.

Shapes: T tokens, N outputs, K inputs. Offsets are 32-bit unless WIDE_W (weights) and WIDE_ROWS (x and the result).
"""

# Triton gives its decorator and its device functions no types.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

from moe_kernels.experts.triton_gemm import block_product, end_scales
from moe_kernels.experts.triton_rows import product, quantize_groups, sorted_tile, split_range
from moe_kernels.projections.triton_rows import ask_ahead, store_tile, wait


@triton.jit(do_not_specialize=["num_tokens"])
def linear_kernel(
    x_ptr, x_scale_ptr, w_ptr, w_desc, w_scale_ptr, bias_ptr, out_ptr, num_tokens, outputs, x_stride,
    K: tl.constexpr, X_SCALES: tl.constexpr, W_SCALES: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    SPLIT_K: tl.constexpr, SWAP: tl.constexpr, USE_TMA: tl.constexpr, WIDE_W: tl.constexpr, WIDE_ROWS: tl.constexpr,
    PRECISION: tl.constexpr, IMPRECISE: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``out[t, n] = w[n] . x[t] + bias[n]``, or this program's part of the sum."""
    BLOCKED: tl.constexpr = X_SCALES >= 3
    KB: tl.constexpr = (K + 127) // 128
    tile_m, tile_n = sorted_tile(tl.program_id(0), tl.cdiv(num_tokens, BLOCK_M), tl.cdiv(outputs, BLOCK_N), GROUP_M)
    begin, end = split_range(K, BLOCK_K, SPLIT_K)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    valid = rows < num_tokens
    offs_n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    # Outputs past N read the last row of weights; they are not stored.
    w_row = tl.minimum(offs_n, outputs - 1)
    if PREFETCH:
        WIDTH: tl.constexpr = w_ptr.dtype.element_ty.primitive_bitwidth // 8
        ask_ahead(w_ptr, w_row, K * WIDTH, begin * WIDTH, PREFETCH)
    # Weights do not come from the kernel before, and may be asked for; all else waits.
    wait(PDL)
    if BLOCKED:
        if BLOCK_N <= 128:
            w_scale_ptrs = w_scale_ptr + tile_n * BLOCK_N // 128 * KB
        else:
            w_scale_ptrs = w_scale_ptr + w_row // 128 * KB
        x_scale_ptrs = x_scale_ptr + rows * KB
    x_row, weight_row = rows, w_row
    if WIDE_ROWS:
        x_row = x_row.to(tl.int64)
    if WIDE_W:
        weight_row = weight_row.to(tl.int64)
    a_ptrs = x_ptr + x_row[:, None] * x_stride + (begin + offs_k)[None, :]
    w_ptrs = w_ptr + weight_row[:, None] * K + (begin + offs_k)[None, :]

    ACC: tl.constexpr = tl.int32 if x_ptr.dtype.element_ty == tl.int8 else tl.float32
    acc = tl.zeros([BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N], dtype=ACC)
    for k in range(begin, end, BLOCK_K):
        if K % BLOCK_K == 0:
            a = tl.load(a_ptrs, mask=valid[:, None], other=0.0)
        else:
            a = tl.load(a_ptrs, mask=valid[:, None] & (offs_k[None, :] < K - k), other=0.0)
        if USE_TMA:
            w = w_desc.load([tile_n * BLOCK_N, k])
        elif K % BLOCK_K == 0:
            w = tl.load(w_ptrs)
        else:
            w = tl.load(w_ptrs, mask=offs_k[None, :] < K - k, other=0.0)
        if BLOCKED:
            w_scale = tl.load(w_scale_ptrs + k // 128)
            if X_SCALES == 4:
                a, x_scale = quantize_groups(a.to(tl.float32))
            else:
                x_scale = tl.load(x_scale_ptrs + k // 128, mask=valid, other=0.0)
            acc = block_product(acc, a, w, x_scale, w_scale, SWAP, BLOCK_N <= 128)
        else:
            acc = product(a, w.to(a.dtype), acc, SWAP, PRECISION, IMPRECISE)
        a_ptrs += BLOCK_K
        w_ptrs += BLOCK_K

    if SWAP:
        acc = acc.T
    if not BLOCKED:
        acc = end_scales(acc, x_scale_ptr, w_scale_ptr, rows, valid, w_row, X_SCALES, W_SCALES)
    store_tile(acc, bias_ptr, out_ptr, rows, valid, offs_n, num_tokens, outputs, HAS_BIAS, SPLIT_K, WIDE_ROWS)
