"""A routing made ready for the experts: local ids, shared experts as slots of their own.

Shapes: T tokens, K experts per token, G experts of all ranks together.
"""

from __future__ import annotations

import torch

from moe_kernels.routing import ops
from moe_kernels.types import Routing

_INT32_MAX = 2**31 - 1


def prepare_routing(
    routing: Routing, num_routed: int, num_shared: int = 0, expert_map: torch.Tensor | None = None
) -> Routing:
    """Translate ids to those of the experts held here, and give every shared expert a slot in every token.

    Example: 3 routed experts and 1 shared one, ids ``[[2, 7]]`` with weights ``[[0.75, 0.25]]``:
    ids ``[[2, -1, 3]]``, weights ``[[0.75, 0.25, 1.0]]``.

    Args:
        routing: ids of routed experts alone: global ids where there is an ``expert_map``, else local ones. Weights may
            be of any floating dtype; T may be 0.
        num_routed: routed experts held here, numbered ``0 .. num_routed-1``.
        num_shared: shared experts held here, numbered from ``num_routed``.
        expert_map: int32 ``[G]``, the local id of each global one; -1 for an expert held elsewhere.

    Returns:
        ``Routing`` of ``[T, K + num_shared]``, new tensors, weights float32. Ids that name no routed expert held here
        are -1, which adds nothing; weights of routed slots are as given, also there. Slot ``K + s`` is shared expert
        ``num_routed + s`` with weight exactly 1: it is neither renormalised nor scaled.

    Raises:
        ValueError: wrong dtype, shape or device, or a number that is out of range.
    """
    weights, ids = routing
    if ids.dim() != 2 or ids.dtype != torch.int32:
        raise ValueError(f"topk_ids must be int32 [T, K]; got {ids.dtype} {list(ids.shape)}.")
    if weights.shape != ids.shape or not weights.is_floating_point():
        raise ValueError(
            f"topk_weights must be a floating-point tensor {list(ids.shape)}; got {weights.dtype} "
            f"{list(weights.shape)}."
        )
    if weights.device != ids.device:
        raise ValueError(f"topk_weights must be on {ids.device}, as topk_ids are; got {weights.device}.")
    if num_routed < 0:
        raise ValueError(f"num_routed must be at least 0; got {num_routed}.")
    if not 0 <= num_shared <= _INT32_MAX - num_routed:
        raise ValueError(f"num_shared must be at least 0, and ids must fit in int32; got {num_shared}.")
    if expert_map is not None and (expert_map.dim() != 1 or expert_map.dtype != torch.int32):
        raise ValueError(f"expert_map must be int32 [G]; got {expert_map.dtype} {list(expert_map.shape)}.")
    if expert_map is not None and expert_map.device != ids.device:
        raise ValueError(f"expert_map must be on {ids.device}, as topk_ids are; got {expert_map.device}.")
    return Routing(*ops.prepare_routing(weights, ids, num_routed, num_shared, expert_map))
