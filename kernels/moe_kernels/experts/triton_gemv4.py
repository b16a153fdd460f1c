"""Kernels for one or a few tokens, weights of four bits: as ``triton_gemv``, unpacked on the way.

A thread holds whole runs of 16 columns of one scale: it adds their products up and scales the sum.

Shapes: T tokens, D model, F ffn, E experts, K experts per token, N = T*K routed rows; row r belongs to token r // K.
"""

# Triton gives its decorator and its device functions no types.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

from moe_kernels.experts.triton_unpack import e2m1, load_scales


@triton.jit
def group_sums(
    packed, x_low, x_high, scale, zero,
    ROWS: tl.constexpr, SCALES: tl.constexpr, SPAN: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Products of bytes ``[ROWS, SCALES * SPAN / 2]`` with their columns, added up and scaled: ``[ROWS, SCALES]``."""
    both = tl.reshape(packed, [ROWS, SCALES, SPAN // 2]).to(tl.int32)
    x_low = tl.reshape(x_low, [SCALES, SPAN // 2])[None, :, :]
    x_high = tl.reshape(x_high, [SCALES, SPAN // 2])[None, :, :]
    if FORM == 0:
        low = (both & 15).to(tl.float32) - zero[:, :, None]
        high = (both >> 4).to(tl.float32) - zero[:, :, None]
    else:
        low = e2m1(both & 15)
        high = e2m1(both >> 4)
    return tl.sum(low * x_low + high * x_high, axis=2) * scale


@triton.jit(do_not_specialize=["num_rows"])
def up4_row_kernel(
    x_ptr, w_ptr, scale_ptr, zero_ptr, global_ptr, h_ptr, topk_weights_ptr, ids_ptr, num_rows, x_stride,
    E: tl.constexpr, K: tl.constexpr, D: tl.constexpr, F: tl.constexpr,
    FORM: tl.constexpr, GROUP: tl.constexpr, HAS_ZERO: tl.constexpr, ON_INPUT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, WIDE_W: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``h[r, f] = silu(x[r // K] . w1[e, f]) * (x[r // K] . w1[e, F + f])``, one row and BLOCK_N columns a program."""
    SPAN: tl.constexpr = GROUP if GROUP < BLOCK_K else BLOCK_K
    SCALES: tl.constexpr = BLOCK_K // SPAN
    ROW_BYTES: tl.constexpr = (D + 31) // 32 * 16
    ROW_SCALES: tl.constexpr = 2 * ((D + 31) // 32) if FORM == 1 else (D + GROUP - 1) // GROUP
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    pid = tl.program_id(0)
    row = pid % num_rows
    expert = tl.load(ids_ptr + row)
    if (expert < 0) | (expert >= E):
        return
    offs_n = (pid // num_rows) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_b = tl.arange(0, BLOCK_K // 2)
    low_k = offs_b // 8 * 16 + offs_b % 8
    w_row = tl.minimum(offs_n, F - 1)
    if WIDE_W:
        w_row = w_row.to(tl.int64)
    x_ptrs = x_ptr + (row // K) * x_stride + low_k
    first = expert.to(tl.int64) * (2 * F)
    gate_ptrs = w_ptr + first * ROW_BYTES + w_row[:, None] * ROW_BYTES + offs_b[None, :]
    gate_scales = scale_ptr + first * ROW_SCALES + w_row * ROW_SCALES
    up_scales = gate_scales + F * ROW_SCALES
    gate_zeros = zero_ptr + first * ROW_SCALES + w_row * ROW_SCALES
    up_zeros = gate_zeros + F * ROW_SCALES
    gate = tl.zeros([BLOCK_N, SCALES], dtype=tl.float32)
    up = tl.zeros([BLOCK_N, SCALES], dtype=tl.float32)
    for k in tl.range(0, D, BLOCK_K, num_stages=STAGES):
        x_low = tl.load(x_ptrs + k, mask=low_k < D - k, other=0.0).to(tl.float32)
        x_high = tl.load(x_ptrs + k + 8, mask=low_k + 8 < D - k, other=0.0).to(tl.float32)
        EVEN: tl.constexpr = D % BLOCK_K == 0
        inside = None if EVEN else offs_b[None, :] < ROW_BYTES - k // 2
        gate_bytes = tl.load(gate_ptrs + k // 2, mask=inside)
        up_bytes = tl.load(gate_ptrs + F * ROW_BYTES + k // 2, mask=inside)
        scale, zero = load_scales(gate_scales, gate_zeros, k, D, SCALES, FORM, GROUP, HAS_ZERO, EVEN, False)
        gate += group_sums(gate_bytes, x_low, x_high, scale, zero, BLOCK_N, SCALES, SPAN, FORM)
        scale, zero = load_scales(up_scales, up_zeros, k, D, SCALES, FORM, GROUP, HAS_ZERO, EVEN, False)
        up += group_sums(up_bytes, x_low, x_high, scale, zero, BLOCK_N, SCALES, SPAN, FORM)
    g = tl.sum(gate, axis=1)
    u = tl.sum(up, axis=1)
    if FORM == 1:
        g = g * tl.load(global_ptr + expert * 2)
        u = u * tl.load(global_ptr + expert * 2 + 1)
    if ON_INPUT:
        weight = tl.load(topk_weights_ptr + row)
        g, u = g * weight, u * weight
    h = g / (1.0 + tl.exp(-g)) * u
    tl.store(h_ptr + row * F + offs_n, h.to(h_ptr.dtype.element_ty), mask=offs_n < F)


@triton.jit(do_not_specialize=["num_tokens"])
def down4_token_kernel(
    h_ptr, w_ptr, scale_ptr, zero_ptr, global_ptr, out_ptr, topk_weights_ptr, ids_ptr, num_tokens,
    E: tl.constexpr, K: tl.constexpr, D: tl.constexpr, F: tl.constexpr,
    FORM: tl.constexpr, GROUP: tl.constexpr, HAS_ZERO: tl.constexpr, ON_INPUT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, WIDE_W: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``out[t, d] = sum over k of topk_weights[t, k] * (h[t*K + k] . w2[e, d])``, BLOCK_N columns a program."""
    SPAN: tl.constexpr = GROUP if GROUP < BLOCK_K else BLOCK_K
    SCALES: tl.constexpr = BLOCK_K // SPAN
    ROW_BYTES: tl.constexpr = (F + 31) // 32 * 16
    ROW_SCALES: tl.constexpr = 2 * ((F + 31) // 32) if FORM == 1 else (F + GROUP - 1) // GROUP
    CHUNKS: tl.constexpr = (F + BLOCK_K - 1) // BLOCK_K
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    pid = tl.program_id(0)
    token = pid % num_tokens
    offs_n = (pid // num_tokens) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_b = tl.arange(0, BLOCK_K // 2)
    low_k = offs_b // 8 * 16 + offs_b % 8
    w_row = tl.minimum(offs_n, D - 1)
    if WIDE_W:
        w_row = w_row.to(tl.int64)
    acc = tl.zeros([BLOCK_N, SCALES], dtype=tl.float32)
    # One flat loop over experts and chunks, so that loads stay in flight from one expert to the next.
    for i in tl.range(0, K * CHUNKS, num_stages=STAGES):
        row = token * K + i // CHUNKS
        k = (i % CHUNKS) * BLOCK_K
        expert = tl.load(ids_ptr + row)
        known = (expert >= 0) & (expert < E)
        # A dropped expert is never read: its address is expert 0's, and its loads are masked off.
        expert = tl.where(known, expert, 0)
        weight = 1.0
        if not ON_INPUT:
            weight = tl.load(topk_weights_ptr + row)
        if FORM == 1:
            weight = weight * tl.load(global_ptr + expert)
        h_low = tl.load(h_ptr + row * F + k + low_k, mask=(low_k < F - k) & known, other=0.0).to(tl.float32)
        h_high = tl.load(h_ptr + row * F + k + low_k + 8, mask=(low_k + 8 < F - k) & known, other=0.0).to(tl.float32)
        first = expert.to(tl.int64) * D
        inside = (offs_b[None, :] < ROW_BYTES - k // 2) & known
        ptrs = w_ptr + first * ROW_BYTES + w_row[:, None] * ROW_BYTES + (k // 2 + offs_b)[None, :]
        w_bytes = tl.load(ptrs, mask=inside)
        at = first * ROW_SCALES + w_row * ROW_SCALES
        EVEN: tl.constexpr = F % BLOCK_K == 0
        scale, zero = load_scales(scale_ptr + at, zero_ptr + at, k, F, SCALES, FORM, GROUP, HAS_ZERO, EVEN, False)
        sums = group_sums(w_bytes, h_low, h_high, scale, zero, BLOCK_N, SCALES, SPAN, FORM)
        # A dropped expert's weight may hold anything.
        acc += sums * tl.where(known, weight, 0.0)
    out = tl.sum(acc, axis=1)
    tl.store(out_ptr + token * D + offs_n, out.to(out_ptr.dtype.element_ty), mask=offs_n < D)
