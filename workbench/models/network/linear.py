"""A linear layer of a network, in any weight format.

Shapes: S rows, N outputs, K inputs.
"""

from __future__ import annotations

import torch
from moe_kernels import LinearWeights, linear
from torch import nn


class Linear(nn.Module):
    """`out = x . w^T + bias`.

    Attributes:
        weights: the matrix `[N, K]`.
        bias: `[N]` in the compute dtype; None for none.
        exact: compute in float32 from the dequantised matrix, which is held for the length of a call.
        impl: of `moe_kernels.linear`; None for the best.
        part: of the network, for profiles.
    """

    def __init__(
        self, weights: LinearWeights, bias: torch.Tensor | None = None, *, part: str, exact: bool = False
    ) -> None:
        super().__init__()
        self.weights = weights
        self.bias = bias
        self.exact = exact
        self.impl: str | None = None
        self.part = part

    def forward(self, x_SK: torch.Tensor) -> torch.Tensor:
        """Return `[S, N]`."""
        if not self.exact:
            return linear(x_SK, self.weights, bias=self.bias, impl=self.impl)
        bias = None if self.bias is None else self.bias.to(torch.float32)
        return nn.functional.linear(x_SK, self.weights.dequantize(), bias)

    def upcast(self) -> Linear:
        """The same layer in float32; it holds the same weights."""
        return Linear(self.weights, self.bias, part=self.part, exact=True)

    def tensors(self) -> list[torch.Tensor]:
        """What it holds."""
        return [*self.weights.tensors().values(), *([] if self.bias is None else [self.bias])]
