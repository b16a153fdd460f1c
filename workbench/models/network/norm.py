"""Root-mean-square norm.

Shapes: S rows, D model (or a head).
"""

from __future__ import annotations

import torch
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

    def upcast(self) -> RMSNorm:
        """The same norm in float32."""
        return RMSNorm(self.weight.to(torch.float32), self.eps)

    def tensors(self) -> list[torch.Tensor]:
        """What it holds."""
        return [self.weight]
