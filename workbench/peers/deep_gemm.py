"""DeepGEMM's grouped fp8 products as a whole layer: `moe_backend="deep_gemm"`. Imported in the worker alone.

    rows sorted by expert, each expert padded to DeepGEMM's alignment
    x, quantised 1x128     -> grouped product with w1 -> bf16 [P, 2F]
    silu(gate) * up, again -> grouped product with w2 -> bf16 [P, D]
    weighted sum of each token's rows, float32

Sizes depend on shapes alone and nothing is read back by the host, so that the call can be captured in a CUDA graph.
Beside the built-in kernels, gate and up are rounded to bf16 before they meet: the products write bf16.

Source: https://github.com/deepseek-ai/DeepGEMM, in the build that SGLang publishes as `sgl-deep-gemm`.

Shapes: T tokens, K experts per token, P sorted and padded rows, D model, F ffn, E experts.
"""

from __future__ import annotations

from typing import Any

import torch
from moe_kernels import ExpertWeights, Routing
from moe_kernels.align.api import moe_align
from moe_kernels.formats import BLOCK, FP8_MAX, SMALLEST_AMAX

from workbench.peers.rules import peer_reasons

LIMITS = (SMALLEST_AMAX, FP8_MAX)


def deep_gemm_experts(x_TD: torch.Tensor, weights: ExpertWeights, routing: Routing) -> torch.Tensor:
    """The experts' weighted outputs, by DeepGEMM.

    Args:
        x_TD: bf16 `[T, D]`.
        weights: fp8_block; D and F multiples of 128.
        routing: `[T, K]`; an id that names no expert adds nothing.

    Returns:
        bf16 `[T, D]`.
    """
    if x_TD.shape[0] == 0:
        return x_TD.new_empty(x_TD.shape)
    import deep_gemm

    from workbench.peers.deep_gemm_kernels import launch_gather_quantize, launch_silu_quantize, launch_weighted_sum

    experts, hidden, ffn = weights.num_experts, weights.hidden_size, weights.intermediate_size
    top_k = routing.topk_ids.shape[1]
    alignment = int(deep_gemm.get_mk_alignment_for_contiguous_layout())
    rows_P, block_experts, num_padded = moe_align(routing.topk_ids, experts, alignment)
    x = x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()
    q_PD, x_scale, expert_P, place_N = launch_gather_quantize(
        x, rows_P, block_experts, num_padded, top_k, alignment, LIMITS
    )
    h_P2F = _product(deep_gemm, (q_PD, x_scale), weights.w1, weights.w1_scale, expert_P, 2 * ffn)
    inner = launch_silu_quantize(h_P2F, num_padded, LIMITS)
    y_PD = _product(deep_gemm, inner, weights.w2, weights.w2_scale, expert_P, hidden)
    return launch_weighted_sum(y_PD, place_N, routing.topk_weights.contiguous(), routing.topk_ids.contiguous(), experts)


def _product(
    library: Any,
    rows: tuple[torch.Tensor, torch.Tensor],
    w_ENK: torch.Tensor,
    scale: torch.Tensor | None,
    expert_P: torch.Tensor,
    width: int,
) -> torch.Tensor:
    """`rows[p] @ w[expert[p]].T`, bf16 `[P, N]`; places of expert -1 are left as they are."""
    assert scale is not None
    experts, _, columns = w_ENK.shape
    blocks = scale.reshape(experts, -1, columns // BLOCK)  # gate's and up's blocks of rows, one after the other
    out = torch.empty(expert_P.numel(), width, dtype=torch.bfloat16, device=w_ENK.device)
    library.m_grouped_fp8_gemm_nt_contiguous(rows, (w_ENK, blocks), out, expert_P)
    return out


def supports(
    *,
    device_type: str,
    dtype: torch.dtype | str,
    num_experts: int,
    hidden_size: int,
    intermediate_size: int,
    top_k: int,
    quant: str = "bf16",
    compile: bool = False,
    graph: bool = False,
) -> list[str]:
    """Why it would not run, as sentences; takes the keywords of `moe_kernels.supports_impl`."""
    started = device_type == "cuda" and torch.cuda.is_initialized()  # asking must not start it
    reasons = peer_reasons(
        "deep_gemm",
        device_type=device_type,
        capability=torch.cuda.get_device_capability() if started else None,
        quant=quant,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        compile=compile,
    )
    if dtype not in (torch.bfloat16, "bf16"):
        reasons.append(f"deep_gemm computes in bf16, not {dtype}.")
    return reasons


run = deep_gemm_experts
