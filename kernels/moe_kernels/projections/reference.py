"""A linear layer in plain PyTorch: the specification that every other implementation is held to.

    out = round(A(x) . w^T + bias)

A is what the format does to activations: nothing, or quantisation. Values are dequantised, products and sums float32,
and ``round`` goes to the dtype of the result.

Shapes: T tokens, N outputs, K inputs.
"""

from __future__ import annotations

import torch

from moe_kernels.formats import FORMATS
from moe_kernels.projections.weights import LinearWeights
from moe_kernels.quant import ops as quant_ops
from moe_kernels.quant.reference import dequantize


def linear_reference(x_TK: torch.Tensor, weights: LinearWeights, bias_N: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``[T, N]`` in ``weights.dtype``; the dequantised matrix is held in float32 meanwhile."""
    out_TN = quantized(x_TK, weights) @ weights.dequantize().T
    if bias_N is not None:
        out_TN = out_TN + bias_N.to(torch.float32)
    return out_TN.to(weights.dtype)


def quantized(x_TK: torch.Tensor, weights: LinearWeights) -> torch.Tensor:
    """What the format leaves of activations, as float32."""
    form = FORMATS[weights.quant]
    if not form.activation:
        return x_TK.to(torch.float32)
    q, scale = quantize(x_TK, weights)
    return dequantize(q, scale, form.granularity)


def quantize(x_TK: torch.Tensor, weights: LinearWeights) -> tuple[torch.Tensor, torch.Tensor]:
    """``quantize_activation`` as the format asks for, every row in use; (q, scale)."""
    form = FORMATS[weights.quant]
    every_row = torch.zeros(x_TK.shape[0], 1, dtype=torch.int32, device=x_TK.device)
    return quant_ops.quantize(x_TK, form.granularity, form.activation, None, every_row, 1, False)
