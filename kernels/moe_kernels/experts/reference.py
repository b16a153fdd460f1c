"""Experts in plain PyTorch: the specification that every other implementation is held to.

    for each token t and slot k with 0 <= e = topk_ids[t, k] < E:
        gate, up = split(A(x[t]) . w1[e])
        out[t] += topk_weights[t, k] * (A(round(silu(gate) * up)) . w2[e])

A is what the format does to activations: nothing, or quantisation, after which products are float32 of the dequantised
values. Where activations stay as they are, dequantised weights are rounded to their dtype and products too, as a matrix
product in that dtype is. Activation, weighting and sum are float32; ``round`` goes to the dtype of x.

Shapes: T tokens, D model, F ffn, E experts, K experts per token, R rows of one expert.
"""

from __future__ import annotations

import torch

from moe_kernels.experts.weights import ExpertWeights
from moe_kernels.formats import FORMATS, format_for
from moe_kernels.quant import ops as quant_ops
from moe_kernels.quant.fp4 import dequantize_fp4, quantize_fp4
from moe_kernels.quant.reference import dequantize
from moe_kernels.types import Routing


def fused_experts_reference(
    x_TD: torch.Tensor,
    weights: ExpertWeights,
    routing: Routing,
    *,
    router_weight_on_input: bool = False,
    impl: str = "",
) -> torch.Tensor:
    """Return ``[T, D]`` in the dtype of ``x_TD``; with ``impl`` ``"triton_fp4"`` what that gives, activations in FP4.

    Eager, it loops over the experts hit and gathers their rows, which synchronises with the host. Under
    ``torch.compile`` row counts that depend on data cannot be traced, so there every expert runs on every token and
    tokens that did not choose it are masked out.
    """
    ids_TK = routing.topk_ids
    x_TD = quantized(x_TD, weights, ids_TK, weights.x_scale, slots=False, impl=impl)
    if torch.compiler.is_compiling():
        return _every_row(x_TD, weights, routing, router_weight_on_input, impl)
    hit, activated = [], []
    for expert in torch.unique(ids_TK).tolist():
        if not 0 <= expert < weights.num_experts:
            continue
        token_R, slot_R = torch.where(ids_TK == expert)
        weight_R1 = routing.topk_weights[token_R, slot_R, None]
        gate_RF, up_RF = (x_TD[token_R] @ _stored(weights, expert, x_TD.dtype)[0].T).to(torch.float32).chunk(2, dim=-1)
        if router_weight_on_input:
            gate_RF, up_RF, weight_R1 = gate_RF * weight_R1, up_RF * weight_R1, torch.ones_like(weight_R1)
        hit.append((expert, token_R, weight_R1))
        activated.append((torch.nn.functional.silu(gate_RF) * up_RF).to(weights.dtype))
    out_TD = torch.zeros(x_TD.shape, dtype=torch.float32, device=x_TD.device)
    if hit:
        # All rows at once: one scale may stand for every one of them.
        h_NF = torch.cat(activated)
        h_NF = quantized(h_NF, weights, _all_used(h_NF), weights.h_scale, slots=True, impl=impl)
        for (expert, token_R, weight_R1), h_RF in zip(hit, h_NF.split([len(h) for h in activated]), strict=True):
            y_RD = (h_RF @ _stored(weights, expert, x_TD.dtype)[1].T).to(torch.float32)
            out_TD.index_add_(0, token_R, y_RD * weight_R1)
    return out_TD.to(weights.dtype)


def quantized(
    rows: torch.Tensor,
    weights: ExpertWeights,
    ids_TK: torch.Tensor,
    scale: torch.Tensor | None,
    *,
    slots: bool,
    impl: str = "",
) -> torch.Tensor:
    """What the format leaves of activations: float32 where it quantises them, else the very rows."""
    form = format_for(weights.quant, impl)
    if not form.activation:
        return rows
    if form.activation == "fp4":
        return dequantize_fp4(quantize_fp4(rows, weights.quant), weights.quant, rows.shape[1])
    q, made = quant_ops.quantize(rows, form.granularity, form.activation, scale, ids_TK, weights.num_experts, slots)
    return dequantize(q, made, form.granularity)


def _stored(weights: ExpertWeights, expert: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    if not FORMATS[weights.quant].quantized:
        return weights.w1[expert], weights.w2[expert]
    w1_2FD, w2_DF = weights.dequantize_expert(expert)
    return w1_2FD.to(dtype), w2_DF.to(dtype)


def _all_used(rows: torch.Tensor) -> torch.Tensor:
    return torch.zeros(rows.shape[0], 1, dtype=torch.int32, device=rows.device)


def _every_row(
    x_TD: torch.Tensor, weights: ExpertWeights, routing: Routing, router_weight_on_input: bool, impl: str
) -> torch.Tensor:
    if FORMATS[weights.quant].quantized:
        w1_E2FD, w2_EDF = (w.to(x_TD.dtype) for w in weights.dequantize())
    else:
        w1_E2FD, w2_EDF = weights.w1, weights.w2
    hit_TKE = routing.topk_ids[:, :, None] == torch.arange(weights.num_experts, device=x_TD.device)
    hit_ET = hit_TKE.any(dim=1).T
    weight_ET1 = torch.where(hit_TKE, routing.topk_weights[:, :, None], 0.0).sum(dim=1).T[:, :, None]
    gate_ETF, up_ETF = torch.matmul(x_TD, w1_E2FD.transpose(1, 2)).to(torch.float32).chunk(2, dim=-1)
    if router_weight_on_input:
        gate_ETF, up_ETF = gate_ETF * weight_ET1, up_ETF * weight_ET1
    h_ETF = (torch.nn.functional.silu(gate_ETF) * up_ETF).to(weights.dtype)
    used = torch.where(hit_ET, 0, -1).to(torch.int32).reshape(-1, 1)
    h_ETF = quantized(h_ETF.flatten(0, 1), weights, used, weights.h_scale, slots=True, impl=impl)
    h_ETF = h_ETF.unflatten(0, hit_ET.shape)
    y_ETD = torch.matmul(h_ETF, w2_EDF.transpose(1, 2)).to(torch.float32)
    if not router_weight_on_input:
        y_ETD = y_ETD * weight_ET1
    # where, not a product with 0: a row that did not choose an expert may overflow in it.
    return torch.where(hit_ET[:, :, None], y_ETD, 0.0).sum(dim=0).to(weights.dtype)
