"""Triton kernels around DeepGEMM's grouped products: gather and quantise, silu and quantise, weighted sum.

Activations become e4m3 with one float32 scale a row and 128 columns. Scales stand by columns (``[C/128, P]``), as the
products read them through TMA.

Shapes: T tokens, K experts per token, N = T*K routed rows, P rows sorted by expert and padded, D model, F ffn.
"""

# Triton gives its decorator and its device functions no types.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl

GROUP = tl.constexpr(128)
ROWS = 16


@triton.jit
def _quantize(x_RC, smallest: tl.constexpr, most: tl.constexpr):
    """(e4m3 ``[R, 128]``, float32 scale ``[R]``): one scale a row. What is not finite becomes NaN."""
    finite = tl.abs(x_RC) < float("inf")
    largest = tl.maximum(tl.max(tl.where(finite, tl.abs(x_RC), 0.0), axis=1), smallest)
    inverse = tl.div_rn(most, largest)
    scaled = tl.minimum(tl.maximum(x_RC * inverse[:, None], -most), most)
    q_RC = tl.where(finite, scaled, float("nan")).to(tl.float8e4nv)
    return q_RC, tl.div_rn(largest, most)


@triton.jit
def gather_quantize_kernel(
    x,
    sorted_rows,
    block_experts,
    num_padded,
    q_out,
    scale_out,
    expert_out,
    place_out,
    x_stride,
    columns,
    padded,
    num_rows,
    TOP_K: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    SMALLEST: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Copy each token's row to the places of its experts, quantised; say whose places are and where each row went."""
    row_R = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    group = tl.program_id(1)
    if group == 0:
        expert_R = tl.load(block_experts + row_R // ALIGNMENT)
        tl.store(expert_out + row_R, expert_R)
    if tl.program_id(0) * BLOCK_R >= tl.load(num_padded):
        return
    source_R = tl.load(sorted_rows + row_R)
    mask_R = source_R < num_rows
    if group == 0:
        tl.store(place_out + source_R, row_R, mask=mask_R)
    column_C = group * GROUP + tl.arange(0, GROUP)
    token_R = (source_R // TOP_K).to(tl.int64)
    at = x + token_R[:, None] * x_stride + column_C[None, :]
    x_RC = tl.load(at, mask=mask_R[:, None], other=0.0).to(tl.float32)
    q_RC, scale_R = _quantize(x_RC, SMALLEST, MOST)
    # Padding is written too: whatever an empty place held must not be read as a number.
    tl.store(q_out + row_R.to(tl.int64)[:, None] * columns + column_C[None, :], q_RC)
    tl.store(scale_out + group.to(tl.int64) * padded + row_R, scale_R)


@triton.jit
def silu_quantize_kernel(
    h,
    num_padded,
    q_out,
    scale_out,
    columns,
    padded,
    SMALLEST: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """``silu(gate) * up`` in float32, rounded to bf16, quantised; ``h`` is ``[P, 2F]``, gate first."""
    row_R = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    group = tl.program_id(1)
    if tl.program_id(0) * BLOCK_R >= tl.load(num_padded):
        return
    column_C = group * GROUP + tl.arange(0, GROUP)
    at = h + row_R.to(tl.int64)[:, None] * (2 * columns) + column_C[None, :]
    gate_RC = tl.load(at).to(tl.float32)
    up_RC = tl.load(at + columns).to(tl.float32)
    inner_RC = (gate_RC / (1.0 + tl.exp(-gate_RC)) * up_RC).to(tl.bfloat16).to(tl.float32)
    q_RC, scale_R = _quantize(inner_RC, SMALLEST, MOST)
    tl.store(q_out + row_R.to(tl.int64)[:, None] * columns + column_C[None, :], q_RC)
    tl.store(scale_out + group.to(tl.int64) * padded + row_R, scale_R)


@triton.jit
def weighted_sum_kernel(
    y, place, topk_weights, topk_ids, out, columns, num_experts, TOP_K: tl.constexpr, BLOCK_C: tl.constexpr
):
    """Add up each token's rows in the order of its slots, in float32; an id that names no expert adds nothing."""
    token = tl.program_id(0).to(tl.int64)
    column_C = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_C = column_C < columns
    sum_C = tl.zeros((BLOCK_C,), dtype=tl.float32)
    for slot in tl.static_range(TOP_K):
        expert = tl.load(topk_ids + token * TOP_K + slot)
        if (expert >= 0) & (expert < num_experts):
            row = tl.load(place + token * TOP_K + slot).to(tl.int64)
            weight = tl.load(topk_weights + token * TOP_K + slot)
            y_C = tl.load(y + row * columns + column_C, mask=mask_C, other=0.0)
            sum_C += y_C.to(tl.float32) * weight
    tl.store(out + token * columns + column_C, sum_C.to(out.dtype.element_ty), mask=mask_C)


def launch_gather_quantize(
    x_TD: torch.Tensor,
    sorted_rows_P: torch.Tensor,
    block_experts: torch.Tensor,
    num_padded: torch.Tensor,
    top_k: int,
    alignment: int,
    limits: tuple[float, float],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of tokens, sorted and quantised.

    Args:
        x_TD: ``[T, D]``, rows contiguous, D a multiple of 128.
        sorted_rows_P, block_experts, num_padded: of ``moe_align`` in blocks of ``alignment`` rows, a multiple of 16.
        top_k: K.
        alignment: rows of one block.
        limits: smallest magnitude that a scale stands for, and the format's largest value.

    Returns:
        e4m3 ``[P, D]``; scales, float32 ``[P, D/128]``, by columns; int32 ``[P]``, the expert of each place (-1 past
        the last); int32 ``[N]``, the place of each routed row.
    """
    padded, hidden, num_rows = sorted_rows_P.numel(), x_TD.shape[1], x_TD.shape[0] * top_k
    q_PD = torch.empty(padded, hidden, dtype=torch.float8_e4m3fn, device=x_TD.device)
    scale = torch.empty(hidden // 128, padded, dtype=torch.float32, device=x_TD.device)
    expert_P, place_N = (torch.empty(n, dtype=torch.int32, device=x_TD.device) for n in (padded, num_rows))
    gather_quantize_kernel[(padded // ROWS, hidden // 128)](
        x_TD,
        sorted_rows_P,
        block_experts,
        num_padded,
        q_PD,
        scale,
        expert_P,
        place_N,
        x_TD.stride(0),
        hidden,
        padded,
        num_rows,
        TOP_K=top_k,
        ALIGNMENT=alignment,
        SMALLEST=limits[0],
        MOST=limits[1],
        BLOCK_R=ROWS,
        num_warps=4,
    )
    return q_PD, scale.t(), expert_P, place_N


def launch_silu_quantize(
    h_P2F: torch.Tensor, num_padded: torch.Tensor, limits: tuple[float, float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """``silu(gate) * up`` of bf16 ``[P, 2F]``, quantised: e4m3 ``[P, F]`` and scales ``[P, F/128]`` by columns."""
    padded, ffn = h_P2F.shape[0], h_P2F.shape[1] // 2
    q_PF = torch.empty(padded, ffn, dtype=torch.float8_e4m3fn, device=h_P2F.device)
    scale = torch.empty(ffn // 128, padded, dtype=torch.float32, device=h_P2F.device)
    silu_quantize_kernel[(padded // ROWS, ffn // 128)](
        h_P2F,
        num_padded,
        q_PF,
        scale,
        ffn,
        padded,
        SMALLEST=limits[0],
        MOST=limits[1],
        BLOCK_R=ROWS,
        num_warps=4,
    )
    return q_PF, scale.t()


def launch_weighted_sum(
    y_PD: torch.Tensor, place_N: torch.Tensor, topk_weights_TK: torch.Tensor, topk_ids_TK: torch.Tensor, experts: int
) -> torch.Tensor:
    """``out[t] = sum over k of topk_weights[t, k] * y[place[t*K + k]]``: ``[T, D]`` in the dtype of ``y``."""
    (tokens, top_k), hidden = topk_ids_TK.shape, y_PD.shape[1]
    out_TD = torch.empty(tokens, hidden, dtype=y_PD.dtype, device=y_PD.device)
    block = min(1024, triton.next_power_of_2(hidden))
    weighted_sum_kernel[(tokens, triton.cdiv(hidden, block))](
        y_PD, place_N, topk_weights_TK, topk_ids_TK, out_TD, hidden, experts, TOP_K=top_k, BLOCK_C=block, num_warps=4
    )
    return out_TD
