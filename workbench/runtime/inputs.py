"""The buffers that every call of a layer reads: one address for eager, compiled and captured runs alike.

Shapes: T tokens, D model, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from moe_kernels import ExpertWeights, Routing, fused_experts

from workbench.modes import Reduction

LayerFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""`(x_TD, topk_weights_TK, topk_ids_TK) -> out_TD`."""


class Inputs:
    """Static buffers of one size.

    Attributes:
        x: `[T, D]` in the compute dtype.
        topk_weights: float32 `[T, K]`.
        topk_ids: int32 `[T, K]`.
    """

    def __init__(self, x_TD: torch.Tensor, routing: Routing) -> None:
        self.x = x_TD.clone()
        self.topk_weights = routing.topk_weights.clone()
        self.topk_ids = routing.topk_ids.clone()
        for tensor in (self.x, self.topk_weights, self.topk_ids):
            # Only the number of tokens may become symbolic: K and D belong to the model.
            torch._dynamo.mark_static(tensor, 1)

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.x.shape[0]

    def load(self, x_TD: torch.Tensor | None = None, routing: Routing | None = None) -> None:
        """Copy new values in."""
        if x_TD is not None:
            self.x.copy_(x_TD)
        if routing is not None:
            self.topk_weights.copy_(routing.topk_weights)
            self.topk_ids.copy_(routing.topk_ids)

    def untouched(self, x_TD: torch.Tensor, routing: Routing) -> bool:
        """Whether the buffers still hold exactly these values."""
        return (
            torch.equal(self.x.view(torch.uint8), x_TD.contiguous().view(torch.uint8))
            and torch.equal(self.topk_weights, routing.topk_weights)
            and torch.equal(self.topk_ids, routing.topk_ids)
        )

    def call(self, function: LayerFunction) -> torch.Tensor:
        """Run `function` on what the buffers hold."""
        return function(self.x, self.topk_weights, self.topk_ids)


def layer_function(
    weights: ExpertWeights, impl: str, *, split_k: int | None = None, reduction: Reduction = Reduction.DETERMINISTIC
) -> LayerFunction:
    """The layer over `weights`, to be called, compiled or captured.

    The weights are marked as they are for a serving engine: fixed in size (a symbolic token count must not make the
    model's own sizes symbolic) and fixed in address (inductor's graphs would copy them before every replay otherwise).

    Args:
        weights, impl: of `fused_experts`.
        split_k, reduction: passed on to `triton`; no other implementation has them.
    """
    for tensor in weights.tensors().values():
        torch._dynamo.mark_static(tensor)
        torch._dynamo.mark_static_address(tensor)
    if impl != "triton":

        def layer(x_TD: torch.Tensor, topk_weights_TK: torch.Tensor, topk_ids_TK: torch.Tensor) -> torch.Tensor:
            return fused_experts(x_TD, weights, Routing(topk_weights_TK, topk_ids_TK), impl=impl)

        return layer
    how = reduction.value

    def split(x_TD: torch.Tensor, topk_weights_TK: torch.Tensor, topk_ids_TK: torch.Tensor) -> torch.Tensor:
        routing = Routing(topk_weights_TK, topk_ids_TK)
        return fused_experts(x_TD, weights, routing, impl=impl, split_k=split_k, reduction=how)

    return split
