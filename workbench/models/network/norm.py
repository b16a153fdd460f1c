"""Root-mean-square norm.

Shapes: S rows, D model (or a head).
"""

from __future__ import annotations

from typing import Any, Self

import torch
from moe_kernels.step.rows import add_rms_norm
from torch import nn


class RMSNorm(nn.Module):
    """`out = round(x / sqrt(mean(x^2) + eps) * weight)`, computed in float32.

    Attributes:
        weight: `[D]` in the compute dtype.
        eps: added to the mean of squares.
        part: of the network, for profiles.
    """

    part = "norm"

    def __init__(self, weight_D: torch.Tensor, eps: float) -> None:
        super().__init__()
        self.weight = weight_D
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the shape and dtype of `x`, `[..., D]`."""
        # torch's own, one kernel on a GPU, computes half precision in float32 and rounds once.
        return nn.functional.rms_norm(x, (x.shape[-1],), self.weight, self.eps)

    def upcast(self) -> Self:
        """The same norm in float32."""
        return type(self)(self.weight.to(torch.float32), self.eps)

    def tensors(self) -> list[torch.Tensor]:
        """What it holds."""
        return [self.weight]


class ResidualNorm(RMSNorm):
    """A norm in front of attention, an MLP or the output, which can take in what was added to the residual before it.

    Attributes:
        fused: whether the sum and the norm are one kernel.
    """

    fused = False

    def forward(self, x: torch.Tensor, *added: torch.Tensor | None) -> Any:
        """The norm of `x`; where fused, `(sum, norm)` of `x` and what is added, `[S, D]` each.

        Args:
            x: `[..., D]`; `[S, D]` where fused.
            added: what attention or an MLP gave, and what shared experts gave beside it; None or left out for nothing.
        """
        if not self.fused:
            return super().forward(x)
        delta, also = (*added, None, None)[:2]
        return add_rms_norm(x, delta, self.weight, self.eps, also_SD=also)
