"""What a scheme does to activations, as values: quantised and back, in float64.

Shapes: T tokens, R rows, C columns, D model, F ffn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from moe_kernels import ExpertWeights, Routing
from moe_kernels.formats import BLOCK, FORMATS, FP8_MAX, SMALLEST_AMAX, format_for
from moe_kernels.quant.api import quantize_activation
from moe_kernels.quant.fp4 import through_fp4

Rounding = Callable[[torch.Tensor], torch.Tensor]
"""`rounding(values [R, C]) -> float64 [R, C]`: what is left of values when a product reads them."""


def roundings(weights: ExpertWeights, backend: str = "") -> tuple[Rounding, Rounding]:
    """What the scheme of `weights` does to the inputs, and to the intermediate between the two products.

    Formats that quantise no activations leave both as they are: their rounding to the compute dtype is an error of
    whoever makes it. Where activations are quantised, that rounding is part of the scheme: quantising turns a small
    difference into a large one, and both sides must quantise the same number. `backend` is what runs the layer:
    triton_fp4 has activations in FP4 beside FP4 weights.
    """
    form = format_for(weights.quant, backend)
    if not form.activation:
        return torch.Tensor.double, torch.Tensor.double
    if form.activation == "fp4":

        def fp4(values: torch.Tensor) -> torch.Tensor:
            return through_fp4(values.to(weights.dtype), weights.quant).double()

        return fp4, fp4

    def through(scale: torch.Tensor | None) -> Rounding:
        return lambda values: quantized(values.to(weights.dtype), form.activation, form.granularity, scale)

    return through(weights.x_scale), through(weights.h_scale)


def quantized(x_RC: torch.Tensor, kind: str, granularity: str, scale: torch.Tensor | None = None) -> torch.Tensor:
    """Quantise and dequantise: float64 `[R, C]`.

    Args:
        x_RC: rows in the compute dtype.
        kind: `fp8` (e4m3) or `int8`.
        granularity: what shares a scale: `token` a row, `block` 128 columns of a row, `tensor` all.
        scale: float32 `[1]`, of `tensor` alone; None works it out from these rows.
    """
    q_RC, step = quantize_activation(x_RC, granularity, kind, scale=scale, impl="reference")
    wide = step.double()
    if granularity == "block":
        wide = wide.repeat_interleave(BLOCK, dim=1)[:, : x_RC.shape[1]]
    elif granularity == "token":
        wide = wide[:, None]
    return q_RC.double() * wide


def with_fixed_scales(weights: ExpertWeights, x_TD: torch.Tensor, routing: Routing) -> ExpertWeights:
    """The same weights with the activation scales that a whole call gives, where one scale covers all rows of it.

    A part of the rows can then be worked out as the whole call does. Other schemes, and fixed scales, are left alone.
    """
    form = FORMATS[weights.quant]
    if form.granularity != "tensor" or weights.x_scale is not None:
        return weights
    ids_TK = routing.topk_ids
    chosen_TK = (ids_TK >= 0) & (ids_TK < weights.num_experts)
    x_scale = _scale(x_TD[chosen_TK.any(dim=1)])
    x = quantized(x_TD, form.activation, form.granularity, x_scale).to(torch.float32)
    largest = torch.zeros((), device=x.device)
    for index in ids_TK[chosen_TK].unique().tolist():
        w1_2FD, _ = weights.dequantize_expert(index)
        gate_RF, up_RF = (x[(ids_TK == index).any(dim=1)] @ w1_2FD.T).chunk(2, dim=-1)
        h_RF = (torch.nn.functional.silu(gate_RF) * up_RF).to(weights.dtype).to(torch.float32)
        largest = torch.maximum(largest, h_RF.abs().amax())
    return replace(weights, x_scale=x_scale, h_scale=_scale(largest.reshape(1, 1)))


def _scale(x_RC: torch.Tensor) -> torch.Tensor:
    largest = x_RC.to(torch.float32).abs().amax() if x_RC.numel() else torch.zeros((), device=x_RC.device)
    return (largest.clamp_min(SMALLEST_AMAX) / FP8_MAX).reshape(1)
