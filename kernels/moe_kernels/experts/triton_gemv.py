"""Kernels for one or a few tokens, weights of eight bits or more.

With one row per expert a tensor core has nothing to share, and what counts is how many bytes of weights are on their
way: these kernels multiply in float32 on plain lanes, one routed row a program, and the second one walks through all
experts of its token, so that no sum kernel follows. X_SCALES and W_SCALES are those of ``triton_gemm``; X_SCALES 4 is 3
worked out here, from rows that are not quantised yet.

Shapes: T tokens, D model, F ffn, E experts, K experts per token, N = T*K routed rows; row r belongs to token r // K.
"""

# Triton gives its decorator and its device functions no types.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

from moe_kernels.experts.triton_rows import quantize_groups


@triton.jit
def round_groups(x, BLOCK_K: tl.constexpr):
    """float32 ``[BLOCK_K]`` through e4m3 and back, as float32 ``[BLOCK_K // 128, 128]``: what block scaling leaves."""
    q, scale = quantize_groups(tl.reshape(x, [BLOCK_K // 128, 128]))
    return q.to(tl.float32) * scale[:, None]


@triton.jit(do_not_specialize=["num_rows"])
def up_row_kernel(
    x_ptr, x_scale_ptr, w1_ptr, w_scale_ptr, h_ptr, topk_weights_ptr, ids_ptr, num_rows, x_stride,
    E: tl.constexpr, K: tl.constexpr, D: tl.constexpr, F: tl.constexpr,
    X_SCALES: tl.constexpr, W_SCALES: tl.constexpr, ON_INPUT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, WIDE_W: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``h[r, f] = silu(x[r // K] . w1[e, f]) * (x[r // K] . w1[e, F + f])``, one row and BLOCK_N columns a program."""
    KB: tl.constexpr = (D + 127) // 128
    NB: tl.constexpr = (F + 127) // 128
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    pid = tl.program_id(0)
    row = pid % num_rows
    expert = tl.load(ids_ptr + row)
    if (expert < 0) | (expert >= E):
        return
    tile_n = pid // num_rows
    offs_n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    w_row = tl.minimum(offs_n, F - 1)
    if WIDE_W:
        w_row = w_row.to(tl.int64)
    x_ptrs = x_ptr + (row // K) * x_stride + offs_k
    gate_ptrs = w1_ptr + expert.to(tl.int64) * (2 * F * D) + w_row[:, None] * D + offs_k[None, :]
    gate_scales = w_scale_ptr + expert * (2 * NB * KB) + tl.minimum(tile_n * BLOCK_N // 128, NB - 1) * KB
    gate = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    for k in tl.range(0, D, BLOCK_K, num_stages=STAGES):
        if D % BLOCK_K == 0:
            x = tl.load(x_ptrs + k)
            w_gate = tl.load(gate_ptrs + k)
            w_up = tl.load(gate_ptrs + F * D + k)
        else:
            inside = offs_k < D - k
            x = tl.load(x_ptrs + k, mask=inside, other=0.0)
            w_gate = tl.load(gate_ptrs + k, mask=inside[None, :], other=0.0)
            w_up = tl.load(gate_ptrs + F * D + k, mask=inside[None, :], other=0.0)
        x = x.to(tl.float32)
        if X_SCALES >= 3:
            # The weights' scales join the activations: one product less for every weight.
            block = k // 128 + tl.arange(0, BLOCK_K // 128)
            g_scale = tl.load(gate_scales + block, mask=block < KB, other=0.0)
            u_scale = tl.load(gate_scales + NB * KB + block, mask=block < KB, other=0.0)
            if X_SCALES == 4:
                x = round_groups(x, BLOCK_K)
            else:
                x_scale = tl.load(x_scale_ptr + (row // K) * KB + block, mask=block < KB, other=0.0)
                x = tl.reshape(x, [BLOCK_K // 128, 128]) * x_scale[:, None]
            gate += w_gate.to(tl.float32) * tl.reshape(x * g_scale[:, None], [BLOCK_K])[None, :]
            up += w_up.to(tl.float32) * tl.reshape(x * u_scale[:, None], [BLOCK_K])[None, :]
        else:
            gate += w_gate.to(tl.float32) * x[None, :]
            up += w_up.to(tl.float32) * x[None, :]
    g = tl.sum(gate, axis=1)
    u = tl.sum(up, axis=1)
    if X_SCALES == 1:
        x_scale = tl.load(x_scale_ptr)
        g, u = g * x_scale, u * x_scale
    if X_SCALES == 2:
        x_scale = tl.load(x_scale_ptr + row // K)
        g, u = g * x_scale, u * x_scale
    if W_SCALES == 1:
        g = g * tl.load(w_scale_ptr + expert * 2)
        u = u * tl.load(w_scale_ptr + expert * 2 + 1)
    if W_SCALES == 2:
        own = w_scale_ptr + expert.to(tl.int64) * (2 * F) + w_row
        g = g * tl.load(own)
        u = u * tl.load(own + F)
    if ON_INPUT:
        weight = tl.load(topk_weights_ptr + row)
        g, u = g * weight, u * weight
    h = g / (1.0 + tl.exp(-g)) * u
    tl.store(h_ptr + row * F + offs_n, h.to(h_ptr.dtype.element_ty), mask=offs_n < F)


@triton.jit(do_not_specialize=["num_tokens"])
def down_token_kernel(
    h_ptr, h_scale_ptr, w2_ptr, w_scale_ptr, out_ptr, topk_weights_ptr, ids_ptr, num_tokens,
    E: tl.constexpr, K: tl.constexpr, D: tl.constexpr, F: tl.constexpr,
    X_SCALES: tl.constexpr, W_SCALES: tl.constexpr, ON_INPUT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, WIDE_W: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``out[t, d] = sum over k of topk_weights[t, k] * (h[t*K + k] . w2[e, d])``, BLOCK_N columns a program."""
    CHUNKS: tl.constexpr = (F + BLOCK_K - 1) // BLOCK_K
    KB: tl.constexpr = (F + 127) // 128
    NB: tl.constexpr = (D + 127) // 128
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    pid = tl.program_id(0)
    token = pid % num_tokens
    tile_n = pid // num_tokens
    offs_n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    w_row = tl.minimum(offs_n, D - 1)
    if WIDE_W:
        w_row = w_row.to(tl.int64)
    w_offsets = w_row[:, None] * F + offs_k[None, :]
    scale_row = tl.minimum(tile_n * BLOCK_N // 128, NB - 1) * KB
    acc = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    # One flat loop over experts and chunks, so that loads stay in flight from one expert to the next.
    for i in tl.range(0, K * CHUNKS, num_stages=STAGES):
        row = token * K + i // CHUNKS
        k = (i % CHUNKS) * BLOCK_K
        expert = tl.load(ids_ptr + row)
        known = (expert >= 0) & (expert < E)
        inside = (offs_k < F - k) & known
        # A dropped expert is never read: its address is expert 0's, and its loads are masked off.
        expert = tl.where(known, expert, 0)
        weight = 1.0
        if not ON_INPUT:
            weight = tl.load(topk_weights_ptr + row)
        if X_SCALES == 1:
            weight = weight * tl.load(h_scale_ptr)
        if X_SCALES == 2:
            weight = weight * tl.load(h_scale_ptr + row)
        if W_SCALES == 1:
            weight = weight * tl.load(w_scale_ptr + expert)
        h = tl.load(h_ptr + row * F + k + offs_k, mask=inside, other=0.0).to(tl.float32)
        w = tl.load(w2_ptr + expert.to(tl.int64) * (D * F) + w_offsets + k, mask=inside[None, :], other=0.0)
        if X_SCALES >= 3:
            block = k // 128 + tl.arange(0, BLOCK_K // 128)
            w_scale = tl.load(w_scale_ptr + expert * (NB * KB) + scale_row + block, mask=block < KB, other=0.0)
            if X_SCALES == 4:
                h = round_groups(h, BLOCK_K)
            else:
                h_scale = tl.load(h_scale_ptr + row * KB + block, mask=block < KB, other=0.0)
                h = tl.reshape(h, [BLOCK_K // 128, 128]) * h_scale[:, None]
            h = tl.reshape(h * w_scale[:, None], [BLOCK_K])
        scaled = tl.where(inside, h * weight, 0.0)
        if W_SCALES == 2:
            own = tl.load(w_scale_ptr + expert.to(tl.int64) * D + w_row)
            acc += w.to(tl.float32) * scaled[None, :] * own[:, None]
        else:
            acc += w.to(tl.float32) * scaled[None, :]
    out = tl.sum(acc, axis=1)
    tl.store(out_ptr + token * D + offs_n, out.to(out_ptr.dtype.element_ty), mask=offs_n < D)
