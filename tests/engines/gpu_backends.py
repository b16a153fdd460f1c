"""Backends that go wrong on a GPU."""

from __future__ import annotations

from typing import Any

import torch
from moe_kernels import fused_experts


def reads_past_the_end(x: Any, weights: Any, routing: Any) -> Any:
    """An index outside its table: the device reports it, and from then on every call of the process fails."""
    return x[torch.full((x.shape[0],), 2**30, device=x.device)]


def hungry(x: Any, weights: Any, routing: Any) -> Any:
    """Wants more than there is above 8 tokens, with a large block in hand."""
    torch.empty(2**30, dtype=torch.uint8, device=x.device)
    if x.shape[0] > 8:
        torch.empty(2**40, dtype=torch.uint8, device=x.device)
    return fused_experts(x, weights, routing, impl="triton")


def reads_on_the_host(x: Any, weights: Any, routing: Any) -> Any:
    """Cannot be captured."""
    if int(routing.topk_ids.sum().item()) < 0:
        return x
    return fused_experts(x, weights, routing, impl="triton")
