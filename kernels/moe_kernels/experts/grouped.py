"""Routed experts through ``torch.nn.functional.grouped_mm``.

Shapes: T tokens, D model, F ffn, E experts, K experts per token, N = T*K routed rows, in order of expert where sorted.
"""

from __future__ import annotations

import torch

from moe_kernels.experts.weights import ExpertWeights
from moe_kernels.types import Routing


def fused_experts_grouped(
    x_TD: torch.Tensor, weights: ExpertWeights, routing: Routing, *, router_weight_on_input: bool = False
) -> torch.Tensor:
    """Return ``[T, D]`` in the dtype of ``x_TD``; no host synchronisation of its own, traceable."""
    num_tokens, top_k = routing.topk_ids.shape
    num_experts, ffn = weights.num_experts, weights.intermediate_size
    ids_N = routing.topk_ids.reshape(-1)
    dropped_N = (ids_N < 0) | (ids_N >= num_experts)
    # Dropped rows sort behind the last expert, past the last offset, where grouped_mm neither reads nor writes.
    sorted_ids_N, order_N = torch.sort(torch.where(dropped_N, num_experts, ids_N), stable=True)
    experts_E = torch.arange(num_experts, dtype=sorted_ids_N.dtype, device=ids_N.device)
    offsets_E = torch.searchsorted(sorted_ids_N, experts_E, right=True, out_int32=True)

    gate_up_N2F = torch.nn.functional.grouped_mm(x_TD[order_N // top_k], weights.w1.transpose(1, 2), offs=offsets_E)
    gate_NF, up_NF = gate_up_N2F[:, :ffn].to(torch.float32), gate_up_N2F[:, ffn:].to(torch.float32)
    if router_weight_on_input:
        weight_N1 = routing.topk_weights.reshape(-1)[order_N, None]
        gate_NF, up_NF = gate_NF * weight_N1, up_NF * weight_N1
    h_NF = (torch.nn.functional.silu(gate_NF) * up_NF).to(x_TD.dtype)
    y_ND = torch.nn.functional.grouped_mm(h_NF, weights.w2.transpose(1, 2), offs=offsets_E)

    rank_N = torch.empty_like(order_N).scatter_(0, order_N, torch.arange(order_N.numel(), device=order_N.device))
    y_ND = y_ND[rank_N].to(torch.float32)
    if not router_weight_on_input:
        y_ND = y_ND * routing.topk_weights.reshape(-1, 1)
    y_ND = torch.where(dropped_N[:, None], 0.0, y_ND)
    return y_ND.reshape(num_tokens, top_k, -1).sum(dim=1).to(x_TD.dtype)
