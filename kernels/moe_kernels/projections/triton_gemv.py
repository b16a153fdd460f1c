"""A linear layer for one or a few rows, on plain lanes.

With one row a tensor core has nothing to share, and what counts is how many bytes of weights are on their way: a
program multiplies one row by BLOCK_N rows of weights in float32. X_SCALES and W_SCALES are those of ``triton_gemm``
(there is no 4: INSIDE says whether scales of x, of every kind, are worked out here), FORM, GROUP and HAS_ZERO those of
``experts.triton_unpack``.

Shapes: T tokens, N outputs, K inputs.
"""

# Triton gives its decorator and its device functions no types.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

from moe_kernels.experts.triton_gemv import round_groups
from moe_kernels.experts.triton_gemv4 import group_sums
from moe_kernels.experts.triton_unpack import load_scales
from moe_kernels.projections.triton_rows import ask_ahead, rounded, scale_of_rows, wait


@triton.jit
def store_row(sums, bias_ptr, out_ptr, row, offs_n, outputs, HAS_BIAS: tl.constexpr):
    """Store ``sums [BLOCK_N]`` plus the bias."""
    mask = offs_n < outputs
    if HAS_BIAS:
        sums += tl.load(bias_ptr + offs_n, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row.to(tl.int64) * outputs + offs_n, sums.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def linear_row_kernel(
    x_ptr, x_scale_ptr, w_ptr, w_scale_ptr, bias_ptr, out_ptr, num_tokens, outputs, x_stride,
    K: tl.constexpr, X_SCALES: tl.constexpr, W_SCALES: tl.constexpr, INSIDE: tl.constexpr, FP8: tl.constexpr,
    HAS_BIAS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr,
    WIDE_W: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``out[t, n] = w[n] . x[t] + bias[n]``, one row and BLOCK_N outputs a program, weights of eight bits or more."""
    KB: tl.constexpr = (K + 127) // 128
    row, tile_n = tl.program_id(0) % num_tokens, tl.program_id(0) // num_tokens
    offs_n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    w_row = tl.minimum(offs_n, outputs - 1)
    if PREFETCH:
        WIDTH: tl.constexpr = w_ptr.dtype.element_ty.primitive_bitwidth // 8
        ask_ahead(w_ptr, w_row, K * WIDTH, 0, PREFETCH)
    # Weights do not come from the kernel before, and may be asked for; all else waits.
    wait(PDL)
    weight_row = w_row
    if WIDE_W:
        weight_row = weight_row.to(tl.int64)
    w_ptrs = w_ptr + weight_row[:, None] * K + offs_k[None, :]
    own = x_ptr + row.to(tl.int64) * x_stride
    x_ptrs = own + offs_k
    if INSIDE and X_SCALES == 1:
        inverse, x_scale = scale_of_rows(x_ptr, num_tokens, x_stride, K, CHUNK, FP8)
    if INSIDE and X_SCALES == 2:
        inverse, x_scale = scale_of_rows(own, 1, x_stride, K, CHUNK, FP8)
    acc = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        if K % BLOCK_K == 0:
            x = tl.load(x_ptrs + k)
            w = tl.load(w_ptrs + k)
        else:
            x = tl.load(x_ptrs + k, mask=offs_k < K - k, other=0.0)
            w = tl.load(w_ptrs + k, mask=offs_k[None, :] < K - k, other=0.0)
        x = x.to(tl.float32)
        if X_SCALES == 3:
            # The weights' scales join the activations: one product less for every weight.
            block = k // 128 + tl.arange(0, BLOCK_K // 128)
            w_scale = tl.load(w_scale_ptr + tile_n * BLOCK_N // 128 * KB + block, mask=block < KB, other=0.0)
            if INSIDE:
                x = round_groups(x, BLOCK_K)
            else:
                x_scale = tl.load(x_scale_ptr + row * KB + block, mask=block < KB, other=0.0)
                x = tl.reshape(x, [BLOCK_K // 128, 128]) * x_scale[:, None]
            x = tl.reshape(x * w_scale[:, None], [BLOCK_K])
        elif INSIDE:
            x = rounded(x, inverse, FP8)
        acc += w.to(tl.float32) * x[None, :]
    sums = tl.sum(acc, axis=1)
    if X_SCALES == 1 and not INSIDE:
        x_scale = tl.load(x_scale_ptr)
    if X_SCALES == 2 and not INSIDE:
        x_scale = tl.load(x_scale_ptr + row)
    if X_SCALES == 1 or X_SCALES == 2:
        sums = sums * x_scale
    if W_SCALES == 1:
        sums = sums * tl.load(w_scale_ptr)
    if W_SCALES == 2:
        sums = sums * tl.load(w_scale_ptr + w_row)
    store_row(sums, bias_ptr, out_ptr, row, offs_n, outputs, HAS_BIAS)


@triton.jit(do_not_specialize=["num_tokens"])
def linear4_row_kernel(
    x_ptr, w_ptr, scale_ptr, zero_ptr, global_ptr, bias_ptr, out_ptr, num_tokens, outputs, x_stride,
    K: tl.constexpr, FORM: tl.constexpr, GROUP: tl.constexpr, HAS_ZERO: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, WIDE_W: tl.constexpr, PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """``out[t, n] = w[n] . x[t] + bias[n]``, one row and BLOCK_N outputs a program, weights of four bits.

    A thread holds whole runs of 16 columns of one scale: it adds their products up and scales the sum.
    """
    SPAN: tl.constexpr = GROUP if GROUP < BLOCK_K else BLOCK_K
    SCALES: tl.constexpr = BLOCK_K // SPAN
    ROW_BYTES: tl.constexpr = (K + 31) // 32 * 16
    ROW_SCALES: tl.constexpr = 2 * ((K + 31) // 32) if FORM == 1 else (K + GROUP - 1) // GROUP
    EVEN: tl.constexpr = K % BLOCK_K == 0
    row, tile_n = tl.program_id(0) % num_tokens, tl.program_id(0) // num_tokens
    offs_n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_b = tl.arange(0, BLOCK_K // 2)
    low_k = offs_b // 8 * 16 + offs_b % 8
    w_row = tl.minimum(offs_n, outputs - 1)
    if PREFETCH:
        ask_ahead(w_ptr, w_row, ROW_BYTES, 0, PREFETCH)
    wait(PDL)
    if WIDE_W:
        w_row = w_row.to(tl.int64)
    x_ptrs = x_ptr + row.to(tl.int64) * x_stride + low_k
    w_ptrs = w_ptr + w_row[:, None] * ROW_BYTES + offs_b[None, :]
    scales, zeros = scale_ptr + w_row * ROW_SCALES, zero_ptr + w_row * ROW_SCALES
    acc = tl.zeros([BLOCK_N, SCALES], dtype=tl.float32)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        low = tl.load(x_ptrs + k, mask=low_k < K - k, other=0.0).to(tl.float32)
        high = tl.load(x_ptrs + k + 8, mask=low_k + 8 < K - k, other=0.0).to(tl.float32)
        inside = None if EVEN else offs_b[None, :] < ROW_BYTES - k // 2
        packed = tl.load(w_ptrs + k // 2, mask=inside)
        scale, zero = load_scales(scales, zeros, k, K, SCALES, FORM, GROUP, HAS_ZERO, EVEN, False)
        acc += group_sums(packed, low, high, scale, zero, BLOCK_N, SCALES, SPAN, FORM)
    sums = tl.sum(acc, axis=1)
    if FORM == 1:
        sums = sums * tl.load(global_ptr)
    store_row(sums, bias_ptr, out_ptr, row, offs_n, outputs, HAS_BIAS)
