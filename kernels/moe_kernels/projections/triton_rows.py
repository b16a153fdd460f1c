"""Around the products: activations rounded row by row, parts of a sum put together, and shared device functions.

Shapes: T tokens, N outputs, K inputs, S parts of a split sum.
"""

# Triton gives its decorator and its device functions no types.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

from moe_kernels.quant.triton import group_scales, store, to_e4m3


@triton.jit
def wait(PDL: tl.constexpr):
    """With PDL: until what the kernels before wrote can be read; from here on the next one may start, too."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def ask_ahead(w_ptr, w_row, row_bytes, first, BYTES: tl.constexpr):
    """Ask the L2 cache for BYTES of every row of weights from byte ``first`` on; of a row's end, its last line."""
    at = tl.minimum(first + tl.arange(0, BYTES // 128) * 128, row_bytes - 1)
    ptrs = w_ptr.to(tl.pointer_type(tl.uint8)) + w_row.to(tl.int64)[:, None] * row_bytes + at[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [ptrs], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def store_tile(
    acc, bias_ptr, out_ptr, rows, valid, offs_n, num_tokens, outputs, HAS_BIAS: tl.constexpr, SPLIT_K: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Store ``acc [BLOCK_M, BLOCK_N]`` in the dtype of the result; of a split sum this program's part, unrounded."""
    if HAS_BIAS:
        # Once: with the first part of the sum.
        first = tl.program_id(1) == 0
        bias = tl.load(bias_ptr + offs_n, mask=(offs_n < outputs) & first, other=0.0)
        acc += bias.to(tl.float32)[None, :]
    if WIDE:
        rows = rows.to(tl.int64)
    if SPLIT_K > 1:
        out_ptr += tl.program_id(1).to(tl.int64) * num_tokens * outputs
    mask = valid[:, None] & (offs_n < outputs)[None, :]
    tl.store(out_ptr + rows[:, None] * outputs + offs_n[None, :], acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def sum_parts_kernel(
    parts_ptr, out_ptr, size, PARTS: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """``out[i] = sum over s of parts[s, i]`` in float32, always in the same order; ``size`` is T * N."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    if WIDE:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        mask = at < size
        size = size.to(tl.int64)
    wait(PDL)
    acc = tl.load(parts_ptr + at, mask=mask, other=0.0)
    for s in tl.static_range(1, PARTS):
        acc += tl.load(parts_ptr + s * size + at, mask=mask, other=0.0)
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def round_rows_kernel(
    x_ptr, q_ptr, scale_ptr, x_stride, C: tl.constexpr, C_P2: tl.constexpr, FP8: tl.constexpr, WIDE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One row a program, one scale each: ``quantize_activation`` of whole rows where none only pads the batch."""
    wait(PDL)
    row = tl.program_id(0)
    own = row
    if WIDE:
        row = row.to(tl.int64)
    column = tl.arange(0, C_P2)[None, :]
    mask = column < C
    x = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    finite = tl.abs(x) < float("inf")
    inverse, scale = group_scales(x, finite, FP8)
    if FP8:
        scaled = tl.where(finite, x * inverse[:, None], float("nan"))
    else:
        scaled = tl.where(finite, x * inverse[:, None], 0.0)
        scale = tl.where(tl.max(tl.where(finite, 0, 1), axis=1) > 0, float("nan"), scale)
    store(q_ptr + row * C + column, scaled, mask, FP8)
    tl.store(scale_ptr + own + tl.arange(0, 1), scale)


@triton.jit
def scale_of_rows(x_ptr, count, x_stride, K: tl.constexpr, CHUNK: tl.constexpr, FP8: tl.constexpr):
    """(inverse, scale), float32 numbers, that ``quantize_activation`` finds for ``count`` rows together."""
    LARGEST: tl.constexpr = 448.0 if FP8 else 127.0
    column = tl.arange(0, CHUNK)
    amax = tl.zeros([CHUNK], dtype=tl.float32)
    bad = tl.zeros([CHUNK], dtype=tl.int32)
    for _ in range(count):
        for k in range(0, K, CHUNK):
            x = tl.load(x_ptr + k + column, mask=column < K - k, other=0.0).to(tl.float32)
            finite = tl.abs(x) < float("inf")
            amax = tl.maximum(amax, tl.where(finite, tl.abs(x), 0.0))
            bad = bad | tl.where(finite, 0, 1)
        x_ptr += x_stride
    most = tl.maximum(tl.max(amax, axis=0), 1e-30)
    largest = tl.full([], LARGEST, tl.float32)
    scale = tl.math.div_rn(most, largest)
    if not FP8:
        scale = tl.where(tl.max(bad, axis=0) > 0, float("nan"), scale)
    return tl.math.div_rn(largest, most), scale


@triton.jit
def rounded(x, inverse, FP8: tl.constexpr):
    """float32 ``x * inverse`` as e4m3 or int8 holds it, as float32."""
    LARGEST: tl.constexpr = 448.0 if FP8 else 127.0
    finite = tl.abs(x) < float("inf")
    scaled = tl.where(finite, x * inverse, float("nan") if FP8 else 0.0)
    # Selected, not clamped by minimum and maximum, which would turn a NaN into a number.
    scaled = tl.where(scaled > LARGEST, LARGEST, tl.where(scaled < -LARGEST, -LARGEST, scaled))
    if FP8:
        return to_e4m3(scaled).to(tl.float32)
    else:
        # The sum has no bits left behind the point.
        return (scaled + 12582912.0) - 12582912.0
