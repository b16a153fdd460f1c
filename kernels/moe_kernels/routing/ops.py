"""torch.library schemas, fakes and dispatch of the gate and of the preparation of a routing. No gradient is defined."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from moe_kernels.experts.rules import TRITON_INSTALLED, TRITON_INTERPRETED
from moe_kernels.routing.reference import prepare_reference, select_reference

_LIBRARY = torch.library.Library("moe_kernels", "FRAGMENT")
_LIBRARY.define(
    "select_experts(Tensor logits, int top_k, str scoring, bool renormalize, Tensor? bias, int num_groups, "
    "int topk_group, str group_score, float scaling) -> (Tensor, Tensor)"
)
_LIBRARY.define(
    "prepare_routing(Tensor topk_weights, Tensor topk_ids, int num_routed, int num_shared, Tensor? expert_map)"
    " -> (Tensor, Tensor)"
)
_Pair = tuple[torch.Tensor, torch.Tensor]


def _on_its_device(launch: Callable[..., _Pair], first: torch.Tensor, *rest: Any) -> _Pair:
    other = first.is_cuda and first.device.index != torch.cuda.current_device()
    with torch.cuda.device(first.device) if other else nullcontext():
        return launch(first, *rest)


def _select_triton(logits: torch.Tensor, *options: Any) -> _Pair:
    from moe_kernels.routing.triton import launch_select

    return _on_its_device(launch_select, logits, *options)


def _prepare_triton(topk_weights: torch.Tensor, *options: Any) -> _Pair:
    from moe_kernels.routing.triton import launch_prepare

    return _on_its_device(launch_prepare, topk_weights, *options)


def _select_fake(logits: torch.Tensor, top_k: int, *_options: Any) -> _Pair:
    size = (logits.shape[0], top_k)
    return logits.new_empty(size, dtype=torch.float32), logits.new_empty(size, dtype=torch.int32)


def _prepare_fake(
    topk_weights: torch.Tensor, topk_ids: torch.Tensor, num_routed: int, num_shared: int, *_options: Any
) -> _Pair:
    size = (topk_ids.shape[0], topk_ids.shape[1] + num_shared)
    return topk_ids.new_empty(size, dtype=torch.float32), topk_ids.new_empty(size)


# Triton is optional: the specification runs on every device.
_LIBRARY.impl("select_experts", _select_triton if TRITON_INTERPRETED else select_reference, "CPU")
_LIBRARY.impl("select_experts", _select_triton if TRITON_INSTALLED else select_reference, "CUDA")
_LIBRARY.impl("prepare_routing", _prepare_triton if TRITON_INTERPRETED else prepare_reference, "CPU")
_LIBRARY.impl("prepare_routing", _prepare_triton if TRITON_INSTALLED else prepare_reference, "CUDA")
torch.library.register_fake("moe_kernels::select_experts", _select_fake, lib=_LIBRARY)
torch.library.register_fake("moe_kernels::prepare_routing", _prepare_fake, lib=_LIBRARY)


def select_experts(
    logits: torch.Tensor,
    top_k: int,
    scoring: str,
    renormalize: bool,
    bias: torch.Tensor | None,
    num_groups: int,
    topk_group: int,
    group_score: str,
    scaling: float,
) -> _Pair:
    """Call the registered op."""
    result: _Pair = torch.ops.moe_kernels.select_experts(
        logits, top_k, scoring, renormalize, bias, num_groups, topk_group, group_score, scaling
    )
    return result


def prepare_routing(
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    num_routed: int,
    num_shared: int,
    expert_map: torch.Tensor | None,
) -> _Pair:
    """Call the registered op."""
    result: _Pair = torch.ops.moe_kernels.prepare_routing(topk_weights, topk_ids, num_routed, num_shared, expert_map)
    return result
