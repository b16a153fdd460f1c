"""The sparse layer as one op that a compiler does not look into.

Shapes: S rows, D model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from weakref import WeakValueDictionary

import torch

from workbench.models.network.moe import MoE
from workbench.models.network.network import Network

_NUMBERS = count()
_LAYERS: WeakValueDictionary[int, MoE] = WeakValueDictionary()


@torch.library.custom_op("workbench::moe_apart", mutates_args=())
def moe_apart(x_SD: torch.Tensor, number: int) -> torch.Tensor:
    """Run the sparse layer of that number, as eager code does."""
    layer = _LAYERS[number]
    outer, layer.fused = layer.fused, False  # the sum with shared experts is made here
    try:
        out_SD: torch.Tensor = layer.run(x_SD)
    finally:
        layer.fused = outer
    return out_SD


@moe_apart.register_fake
def _(x_SD: torch.Tensor, number: int) -> torch.Tensor:
    return torch.empty_like(x_SD, memory_format=torch.contiguous_format)


@contextmanager
def kept_apart(network: Network, apart: bool) -> Iterator[None]:
    """Inside, and where `apart`, a compiler sees each sparse layer as one op; nothing stays changed afterwards."""
    moes = [layer.mlp for layer in network.layers if isinstance(layer.mlp, MoE)] if apart else []
    for moe in moes:
        if moe.number is None:
            moe.number = next(_NUMBERS)
            _LAYERS[moe.number] = moe
        moe.apart = moe_apart
    try:
        yield
    finally:
        for moe in moes:
            moe.apart = None
