"""Grouped GEMM kernels on tensor cores for weights of eight bits or more: gate and up with the activation, and down.

Scales. X_SCALES: 0 none, 1 one for all rows, 2 one a row, 3 one a row and 128 columns. W_SCALES: 0 none, 1 one a
matrix, 2 one a row of weights, 3 one a block of 128x128. Scales that do not vary along the sum are applied after it;
block scales are applied to the product of every 128 columns, in float32.

OUT: 0 the result in the dtype of its tensor; 1 (up) e4m3 with a scale for every 128 columns; 2 float32 parts of the
sum, one a split; 3 float32 sums that splits add to atomically.

Shapes: T tokens, D model, F ffn, E experts, K experts per token, N = T*K routed rows; row r belongs to token r // K.
Offsets into one expert's weights are 32-bit unless WIDE_W, those into rows unless WIDE_ROWS; an expert's own offset is
always 64-bit.
"""

# Triton gives its decorator and its device functions no types.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

from moe_kernels.experts.triton_rows import find_block, product, quantize_groups, split_range


@triton.jit
def block_product(acc, a, w, x_scale, w_scale, SWAP: tl.constexpr, ONE: tl.constexpr):
    """``acc`` plus the product of 128 columns times its scales; ``w_scale`` is a scalar (ONE) or ``[BLOCK_N]``."""
    if SWAP:
        part = tl.dot(w, a.T)
        if ONE:
            return acc + part * (x_scale * w_scale)[None, :]
        else:
            return acc + part * x_scale[None, :] * w_scale[:, None]
    else:
        part = tl.dot(a, w.T)
        if ONE:
            return acc + part * (x_scale * w_scale)[:, None]
        else:
            return acc + part * x_scale[:, None] * w_scale[None, :]


@triton.jit
def end_scales(acc, x_scale_ptr, w_scale_ptr, rows, valid, w_row, X_SCALES: tl.constexpr, W_SCALES: tl.constexpr):
    """``acc`` in float32 times the scales that do not vary along the sum; ``w_scale_ptr`` is at the matrix's own."""
    acc = acc.to(tl.float32)
    if X_SCALES == 1:
        acc = acc * tl.load(x_scale_ptr)
    if X_SCALES == 2:
        acc = acc * tl.load(x_scale_ptr + rows, mask=valid, other=0.0)[:, None]
    if W_SCALES == 1:
        acc = acc * tl.load(w_scale_ptr)
    if W_SCALES == 2:
        acc = acc * tl.load(w_scale_ptr + w_row)[None, :]
    return acc


@triton.jit(do_not_specialize=["num_rows"])
def up_kernel(
    x_ptr, x_scale_ptr, w_ptr, w_desc, w_scale_ptr, out_ptr, out_scale_ptr, topk_weights_ptr,
    ids_ptr, sorted_rows_ptr, block_experts_ptr, num_padded_ptr, num_rows, x_stride,
    E: tl.constexpr, K: tl.constexpr, D: tl.constexpr, F: tl.constexpr,
    X_SCALES: tl.constexpr, W_SCALES: tl.constexpr, OUT: tl.constexpr, ROUND: tl.constexpr, ON_INPUT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    SPLIT_K: tl.constexpr, SWAP: tl.constexpr, INLINE: tl.constexpr, ROWS_P2: tl.constexpr, USE_TMA: tl.constexpr,
    WIDE_W: tl.constexpr, WIDE_ROWS: tl.constexpr, PRECISION: tl.constexpr, IMPRECISE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``h[r, f] = silu(x[r // K] . w1[e, f]) * (x[r // K] . w1[e, F + f])``, or the parts of both sums."""
    NUM_TILES_N: tl.constexpr = (F + BLOCK_N - 1) // BLOCK_N
    BLOCKED: tl.constexpr = X_SCALES == 3
    KB: tl.constexpr = (D + 127) // 128
    NB: tl.constexpr = (F + 127) // 128
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
    offs_k = tl.arange(0, BLOCK_K)
    token = rows // K
    if WIDE_ROWS:
        token = token.to(tl.int64)
        rows = rows.to(tl.int64)
    a_ptrs = x_ptr + token[:, None] * x_stride + (begin + offs_k)[None, :]
    # Columns past F read the last one; they are not stored.
    w_row = tl.minimum(offs_n, F - 1)
    if WIDE_W:
        w_row = w_row.to(tl.int64)
    gate_ptrs = w_ptr + expert.to(tl.int64) * (2 * F * D) + w_row[:, None] * D + (begin + offs_k)[None, :]
    up_ptrs = gate_ptrs + F * D
    desc_row = expert * (2 * F) + tile_n * BLOCK_N
    if BLOCKED:
        if BLOCK_N <= 128:
            scale_row = tl.minimum(tile_n * BLOCK_N // 128, NB - 1)
        else:
            scale_row = w_row // 128
        gate_scale_ptr = w_scale_ptr + expert * (2 * NB * KB) + scale_row * KB
        up_scale_ptr = gate_scale_ptr + NB * KB
        x_scale_ptrs = x_scale_ptr + token * KB

    ACC: tl.constexpr = tl.int32 if x_ptr.dtype.element_ty == tl.int8 else tl.float32
    gate = tl.zeros([BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N], dtype=ACC)
    up = tl.zeros([BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N], dtype=ACC)
    for k in range(begin, end, BLOCK_K):
        if D % BLOCK_K == 0:
            a = tl.load(a_ptrs, mask=valid[:, None], other=0.0)
        else:
            a = tl.load(a_ptrs, mask=valid[:, None] & (offs_k[None, :] < D - k), other=0.0)
        if USE_TMA:
            w_gate = w_desc.load([desc_row, k])
            w_up = w_desc.load([desc_row + F, k])
        elif D % BLOCK_K == 0:
            w_gate = tl.load(gate_ptrs)
            w_up = tl.load(up_ptrs)
        else:
            w_gate = tl.load(gate_ptrs, mask=offs_k[None, :] < D - k, other=0.0)
            w_up = tl.load(up_ptrs, mask=offs_k[None, :] < D - k, other=0.0)
        if BLOCKED:
            gate_scale = tl.load(gate_scale_ptr + k // 128)
            up_scale = tl.load(up_scale_ptr + k // 128)
            x_scale = tl.load(x_scale_ptrs + k // 128, mask=valid, other=0.0)
            gate = block_product(gate, a, w_gate, x_scale, gate_scale, SWAP, BLOCK_N <= 128)
            up = block_product(up, a, w_up, x_scale, up_scale, SWAP, BLOCK_N <= 128)
        else:
            gate = product(a, w_gate.to(a.dtype), gate, SWAP, PRECISION, IMPRECISE)
            up = product(a, w_up.to(a.dtype), up, SWAP, PRECISION, IMPRECISE)
        a_ptrs += BLOCK_K
        gate_ptrs += BLOCK_K
        up_ptrs += BLOCK_K

    if SWAP:
        gate = gate.T
        up = up.T
    if not BLOCKED:
        # Scales of gate, then of up: one each, or F each.
        EACH: tl.constexpr = F if W_SCALES == 2 else 1
        own = w_scale_ptr + expert.to(tl.int64) * (2 * EACH)
        gate = end_scales(gate, x_scale_ptr, own, token, valid, w_row, X_SCALES, W_SCALES)
        up = end_scales(up, x_scale_ptr, own + EACH, token, valid, w_row, X_SCALES, W_SCALES)
    if ON_INPUT:
        weight = tl.load(topk_weights_ptr + rows, mask=valid, other=0.0)
        gate = gate * weight[:, None]
        up = up * weight[:, None]
    store_up(gate, up, out_ptr, out_scale_ptr, rows, valid, offs_n, num_rows, tile_n, F, BLOCK_M, BLOCK_N, OUT, ROUND)


@triton.jit
def store_up(
    gate, up, out_ptr, out_scale_ptr, rows, valid, offs_n, num_rows, tile_n,
    F: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, OUT: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """Store what OUT says of the two sums ``[BLOCK_M, BLOCK_N]``; ROUND is the dtype that h has before e4m3."""
    mask = valid[:, None] & (offs_n[None, :] < F)
    if OUT >= 2:
        wide = rows.to(tl.int64)
        if OUT == 2:
            wide += tl.program_id(1).to(tl.int64) * num_rows
        ptrs = out_ptr + wide[:, None] * (2 * F) + offs_n[None, :]
        if OUT == 2:
            tl.store(ptrs, gate, mask=mask)
            tl.store(ptrs + F, up, mask=mask)
        else:
            tl.atomic_add(ptrs, gate, mask=mask, sem="relaxed")
            tl.atomic_add(ptrs + F, up, mask=mask, sem="relaxed")
    else:
        h = gate / (1.0 + tl.exp(-gate)) * up
        ptrs = out_ptr + rows[:, None] * F + offs_n[None, :]
        if OUT == 0:
            tl.store(ptrs, h.to(out_ptr.dtype.element_ty), mask=mask)
        else:
            GROUPS: tl.constexpr = BLOCK_N // 128
            FB: tl.constexpr = (F + 127) // 128
            # Columns past F repeat the last one and must not count for the scale of its group.
            h = tl.where(offs_n[None, :] < F, h.to(ROUND).to(tl.float32), 0.0)
            q, scale = quantize_groups(tl.reshape(h, [BLOCK_M * GROUPS, 128]))
            tl.store(ptrs, tl.reshape(q, [BLOCK_M, BLOCK_N]), mask=mask)
            group = tile_n * GROUPS + tl.arange(0, GROUPS)
            ptrs = out_scale_ptr + rows[:, None] * FB + group[None, :]
            tl.store(ptrs, tl.reshape(scale, [BLOCK_M, GROUPS]), mask=valid[:, None] & (group[None, :] < FB))


@triton.jit(do_not_specialize=["num_rows"])
def down_kernel(
    h_ptr, h_scale_ptr, w_ptr, w_desc, w_scale_ptr, out_ptr, topk_weights_ptr,
    ids_ptr, sorted_rows_ptr, block_experts_ptr, num_padded_ptr, num_rows,
    E: tl.constexpr, K: tl.constexpr, D: tl.constexpr, F: tl.constexpr,
    X_SCALES: tl.constexpr, W_SCALES: tl.constexpr, OUT: tl.constexpr, ON_INPUT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    SPLIT_K: tl.constexpr, SWAP: tl.constexpr, INLINE: tl.constexpr, ROWS_P2: tl.constexpr, USE_TMA: tl.constexpr,
    WIDE_W: tl.constexpr, WIDE_ROWS: tl.constexpr, PRECISION: tl.constexpr, IMPRECISE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``y[r, d] = topk_weights[r] * (h[r] . w2[e, d])``; rows of dropped ids stay unwritten.

    With OUT 3 the rows of a token are added up in ``out[r // K, d]``, which starts at zero.
    """
    NUM_TILES_N: tl.constexpr = (D + BLOCK_N - 1) // BLOCK_N
    BLOCKED: tl.constexpr = X_SCALES == 3
    KB: tl.constexpr = (F + 127) // 128
    NB: tl.constexpr = (D + 127) // 128
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
    offs_k = tl.arange(0, BLOCK_K)
    if not ON_INPUT:
        weight = tl.load(topk_weights_ptr + rows, mask=valid, other=0.0)
    if WIDE_ROWS:
        rows = rows.to(tl.int64)
    a_ptrs = h_ptr + rows[:, None] * F + (begin + offs_k)[None, :]
    w_row = tl.minimum(offs_n, D - 1)
    if WIDE_W:
        w_row = w_row.to(tl.int64)
    w_ptrs = w_ptr + expert.to(tl.int64) * (D * F) + w_row[:, None] * F + (begin + offs_k)[None, :]
    desc_row = expert * D + tile_n * BLOCK_N
    if BLOCKED:
        if BLOCK_N <= 128:
            scale_row = tl.minimum(tile_n * BLOCK_N // 128, NB - 1)
        else:
            scale_row = w_row // 128
        w_scale_ptrs = w_scale_ptr + expert * (NB * KB) + scale_row * KB
        h_scale_ptrs = h_scale_ptr + rows * KB

    ACC: tl.constexpr = tl.int32 if h_ptr.dtype.element_ty == tl.int8 else tl.float32
    acc = tl.zeros([BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N], dtype=ACC)
    for k in range(begin, end, BLOCK_K):
        if F % BLOCK_K == 0:
            a = tl.load(a_ptrs, mask=valid[:, None], other=0.0)
        else:
            a = tl.load(a_ptrs, mask=valid[:, None] & (offs_k[None, :] < F - k), other=0.0)
        if USE_TMA:
            w = w_desc.load([desc_row, k])
        elif F % BLOCK_K == 0:
            w = tl.load(w_ptrs)
        else:
            w = tl.load(w_ptrs, mask=offs_k[None, :] < F - k, other=0.0)
        if BLOCKED:
            w_scale = tl.load(w_scale_ptrs + k // 128)
            h_scale = tl.load(h_scale_ptrs + k // 128, mask=valid, other=0.0)
            acc = block_product(acc, a, w, h_scale, w_scale, SWAP, BLOCK_N <= 128)
        else:
            acc = product(a, w.to(a.dtype), acc, SWAP, PRECISION, IMPRECISE)
        a_ptrs += BLOCK_K
        w_ptrs += BLOCK_K

    if SWAP:
        acc = acc.T
    if not BLOCKED:
        EACH: tl.constexpr = D if W_SCALES == 2 else 1
        own = w_scale_ptr + expert.to(tl.int64) * EACH
        acc = end_scales(acc, h_scale_ptr, own, rows, valid, w_row, X_SCALES, W_SCALES)
    if not ON_INPUT:
        acc = acc * weight[:, None]
    store_down(acc, out_ptr, rows, valid, offs_n, num_rows, K, D, OUT)


@triton.jit
def store_down(
    y, out_ptr, rows, valid, offs_n, num_rows, K: tl.constexpr, D: tl.constexpr, OUT: tl.constexpr
):  # fmt: skip
    """Store what OUT says of the weighted sums ``[BLOCK_M, BLOCK_N]``."""
    mask = valid[:, None] & (offs_n[None, :] < D)
    if OUT == 0:
        tl.store(out_ptr + rows[:, None] * D + offs_n[None, :], y.to(out_ptr.dtype.element_ty), mask=mask)
    elif OUT == 2:
        wide = rows.to(tl.int64) + tl.program_id(1).to(tl.int64) * num_rows
        tl.store(out_ptr + wide[:, None] * D + offs_n[None, :], y, mask=mask)
    else:
        token = (rows // K).to(tl.int64)
        tl.atomic_add(out_ptr + token[:, None] * D + offs_n[None, :], y, mask=mask, sem="relaxed")
