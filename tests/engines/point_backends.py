"""Backends for tests of single points, named `point_backends:NAME`."""

from __future__ import annotations

from typing import Any

import torch
from moe_kernels import fused_experts


def right(x: Any, weights: Any, routing: Any) -> Any:
    """The specification itself."""
    return fused_experts(x, weights, routing, impl="reference")


def zeros(x: Any, weights: Any, routing: Any) -> Any:
    """Nothing."""
    return torch.zeros_like(x)


def unscaled(x: Any, weights: Any, routing: Any) -> Any:
    """Router weights left out."""
    return right(x, weights, routing._replace(topk_weights=torch.ones_like(routing.topk_weights)))


def in_place(x: Any, weights: Any, routing: Any) -> Any:
    """Writes to its input."""
    return x.copy_(right(x, weights, routing))


def short(x: Any, weights: Any, routing: Any) -> Any:
    """A row too few."""
    return right(x, weights, routing)[1:]


def hungry(x: Any, weights: Any, routing: Any) -> Any:
    """Runs out of memory above 8 tokens, with a large block in its frame."""
    block = torch.zeros(2**25, dtype=torch.uint8)
    if x.shape[0] > 8:
        raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate 9 GiB beside {block.nbytes} bytes.")
    return right(x, weights, routing)


def raises(x: Any, weights: Any, routing: Any) -> Any:
    """An ordinary error."""
    raise ZeroDivisionError("by nought\nsecond line")


def breaks_graph(x: Any, weights: Any, routing: Any) -> Any:
    """Cannot be compiled whole."""
    torch._dynamo.graph_break()
    return x + 1


def picky(x: Any, weights: Any, routing: Any) -> Any:
    """Never runs: see `supports`."""
    raise AssertionError("not reached")


picky.supports = lambda **asked: [f"picky runs nowhere, so not with top_k {asked['top_k']}."]  # type: ignore[attr-defined]
number = 3
