"""Kernels for one or a few tokens, and the sum over a token's experts.

With one row per expert a tensor core has nothing to share, and what counts is how many bytes of weights are on their
way: these kernels multiply in float32 on plain lanes, one routed row a program, and the second one walks through all
experts of its token, so that no sum kernel follows.

Shapes: T tokens, D model, F ffn, E experts, K experts per token, N = T*K routed rows; row r belongs to token r // K.
"""

# Triton gives its decorator and its device functions no types.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows"])
def up_row_kernel(
    x_ptr, w1_ptr, h_ptr, ids_ptr, num_rows, x_stride,
    E: tl.constexpr, K: tl.constexpr, D: tl.constexpr, F: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, WIDE_W: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``h[r, f] = silu(x[r // K] . w1[e, f]) * (x[r // K] . w1[e, F + f])``, one row and BLOCK_N columns a program."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    pid = tl.program_id(0)
    row = pid % num_rows
    expert = tl.load(ids_ptr + row)
    if (expert < 0) | (expert >= E):
        return
    offs_n = (pid // num_rows) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    w_row = tl.minimum(offs_n, F - 1)
    if WIDE_W:
        w_row = w_row.to(tl.int64)
    x_ptrs = x_ptr + (row // K) * x_stride + offs_k
    gate_ptrs = w1_ptr + expert.to(tl.int64) * (2 * F * D) + w_row[:, None] * D + offs_k[None, :]
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
        x = x.to(tl.float32)[None, :]
        gate += w_gate.to(tl.float32) * x
        up += w_up.to(tl.float32) * x
    g = tl.sum(gate, axis=1)
    u = tl.sum(up, axis=1)
    h = g / (1.0 + tl.exp(-g)) * u
    tl.store(h_ptr + row * F + offs_n, h.to(h_ptr.dtype.element_ty), mask=offs_n < F)


@triton.jit(do_not_specialize=["num_tokens"])
def down_token_kernel(
    h_ptr, w2_ptr, out_ptr, topk_weights_ptr, ids_ptr, num_tokens,
    E: tl.constexpr, K: tl.constexpr, D: tl.constexpr, F: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, WIDE_W: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``out[t, d] = sum over k of topk_weights[t, k] * (h[t*K + k] . w2[e, d])``, BLOCK_N columns a program."""
    CHUNKS: tl.constexpr = (F + BLOCK_K - 1) // BLOCK_K
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    pid = tl.program_id(0)
    token = pid % num_tokens
    offs_n = (pid // num_tokens) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    w_row = tl.minimum(offs_n, D - 1)
    if WIDE_W:
        w_row = w_row.to(tl.int64)
    w_offsets = w_row[:, None] * F + offs_k[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    # One flat loop over experts and chunks, so that loads stay in flight from one expert to the next.
    for i in tl.range(0, K * CHUNKS, num_stages=STAGES):
        row = token * K + i // CHUNKS
        k = (i % CHUNKS) * BLOCK_K
        expert = tl.load(ids_ptr + row)
        inside = (offs_k < F - k) & (expert >= 0) & (expert < E)
        # A dropped expert is never read: its address is expert 0's, and its loads are masked off.
        w_base = w2_ptr + tl.where((expert >= 0) & (expert < E), expert, 0).to(tl.int64) * (D * F)
        weight = tl.load(topk_weights_ptr + row)
        h = tl.load(h_ptr + row * F + k + offs_k, mask=inside, other=0.0)
        w = tl.load(w_base + w_offsets + k, mask=inside[None, :], other=0.0)
        scaled = tl.where(inside, h.to(tl.float32) * weight, 0.0)
        acc += w.to(tl.float32) * scaled[None, :]
    out = tl.sum(acc, axis=1)
    tl.store(out_ptr + token * D + offs_n, out.to(out_ptr.dtype.element_ty), mask=offs_n < D)


@triton.jit
def sum_kernel(
    y_ptr, ids_ptr, out_ptr,
    E: tl.constexpr, K: tl.constexpr, D: tl.constexpr, K_P2: tl.constexpr, BLOCK_D: tl.constexpr,
    WIDE_ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``out[t, d] = sum over k of y[t*K + k, d]`` in float32; rows of dropped ids, never written, are not read."""
    NUM_TILES: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    pid = tl.program_id(0)
    token = pid // NUM_TILES
    offs_d = (pid % NUM_TILES) * BLOCK_D + tl.arange(0, BLOCK_D)
    offs_k = tl.arange(0, K_P2)
    if WIDE_ROWS:
        token = token.to(tl.int64)
    rows = token * K + offs_k
    ids = tl.load(ids_ptr + rows, mask=offs_k < K, other=-1)
    used = (ids >= 0) & (ids < E)
    mask = used[:, None] & (offs_d[None, :] < D)
    y = tl.load(y_ptr + rows[:, None] * D + offs_d[None, :], mask=mask, other=0.0)
    out = tl.sum(y.to(tl.float32), axis=0)
    tl.store(out_ptr + token * D + offs_d, out.to(out_ptr.dtype.element_ty), mask=offs_d < D)
