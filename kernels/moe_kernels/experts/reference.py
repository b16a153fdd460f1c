"""Routed experts in plain PyTorch: the specification that every other implementation is held to.

    for each token t and slot k with 0 <= e = topk_ids[t, k] < E:
        gate, up = split(x[t] . w1[e])
        out[t] += topk_weights[t, k] * ((silu(gate) * up) . w2[e])

Products are rounded to the compute dtype, as a matrix product in that dtype is; activation, weighting and sum are
float32.

Shapes: T tokens, D model, F ffn, E experts, K experts per token, R rows of one expert.
"""

from __future__ import annotations

import torch

from moe_kernels.experts.weights import ExpertWeights
from moe_kernels.types import Routing


def fused_experts_reference(x_TD: torch.Tensor, weights: ExpertWeights, routing: Routing) -> torch.Tensor:
    """Return ``[T, D]`` in the dtype of ``x_TD``.

    Eager, it loops over the experts hit and gathers their rows, which synchronises with the host. Under
    ``torch.compile`` row counts that depend on data cannot be traced, so there every expert runs on every token and
    tokens that did not choose it are masked out.
    """
    if torch.compiler.is_compiling():
        return _every_row(x_TD, weights, routing)
    out_TD = torch.zeros(x_TD.shape, dtype=torch.float32, device=x_TD.device)
    ids_TK = routing.topk_ids
    for expert in torch.unique(ids_TK).tolist():
        if not 0 <= expert < weights.num_experts:
            continue
        token_R, slot_R = torch.where(ids_TK == expert)
        y_RD = _expert(x_TD[token_R], weights, expert)
        out_TD.index_add_(0, token_R, y_RD * routing.topk_weights[token_R, slot_R, None])
    return out_TD.to(x_TD.dtype)


def _expert(x_RD: torch.Tensor, weights: ExpertWeights, expert: int) -> torch.Tensor:
    gate_RF, up_RF = (x_RD @ weights.w1[expert].T).to(torch.float32).chunk(2, dim=-1)
    h_RF = (torch.nn.functional.silu(gate_RF) * up_RF).to(x_RD.dtype)
    return (h_RF @ weights.w2[expert].T).to(torch.float32)


def _every_row(x_TD: torch.Tensor, weights: ExpertWeights, routing: Routing) -> torch.Tensor:
    experts_E = torch.arange(weights.num_experts, device=x_TD.device)
    hit_TKE = routing.topk_ids[:, :, None] == experts_E
    weight_TE = torch.where(hit_TKE, routing.topk_weights[:, :, None], 0.0).sum(dim=1)
    gate_ETF, up_ETF = torch.matmul(x_TD, weights.w1.transpose(1, 2)).to(torch.float32).chunk(2, dim=-1)
    h_ETF = (torch.nn.functional.silu(gate_ETF) * up_ETF).to(x_TD.dtype)
    y_ETD = torch.matmul(h_ETF, weights.w2.transpose(1, 2)).to(torch.float32) * weight_TE.T[:, :, None]
    # where, not a product with 0: a row that did not choose an expert may overflow in it.
    return torch.where(hit_TKE.any(dim=1).T[:, :, None], y_ETD, 0.0).sum(dim=0).to(x_TD.dtype)
