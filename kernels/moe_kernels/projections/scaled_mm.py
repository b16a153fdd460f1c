"""torch's own fp8 product: weights with one scale, or one a row, and activations quantised before it.

Shapes: T tokens, N outputs, K inputs.
"""

from __future__ import annotations

import torch

from moe_kernels.projections.reference import quantize
from moe_kernels.projections.weights import LinearWeights


def linear_scaled_mm(x_TK: torch.Tensor, weights: LinearWeights, bias_N: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``[T, N]`` in ``weights.dtype``; sums are float32 in full (no fast accumulation)."""
    assert weights.scale is not None
    q_TK, x_scale = quantize(x_TK, weights)
    if weights.scale.numel() == 1 and x_scale.numel() == 1:
        scale_x, scale_w = x_scale.reshape(1, 1), weights.scale.reshape(1, 1)
    else:
        scale_x, scale_w = x_scale.reshape(-1, 1), weights.scale.reshape(1, -1)
    # A bias inside goes with half-precision results only.
    inside = bias_N if weights.dtype != torch.float32 else None
    out_TN: torch.Tensor = torch._scaled_mm(
        q_TK,
        weights.w.t(),
        scale_a=scale_x,
        scale_b=scale_w,
        bias=inside,
        out_dtype=weights.dtype,
        use_fast_accum=False,
    )
    return out_TN if bias_N is None or inside is not None else out_TN + bias_N
