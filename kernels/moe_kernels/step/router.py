"""Public gate of rows: logits and choice in two launches; ``impl`` and ``pdl`` as in ``moe_kernels.step.api``.

Shapes: S rows, D model, E experts, K experts a row.
"""

from __future__ import annotations

import torch

from moe_kernels.routing.api import select_experts
from moe_kernels.step import ops
from moe_kernels.step.checks import check_rows
from moe_kernels.step.reference import router_logits_reference
from moe_kernels.step.rules import resolve_step_impl
from moe_kernels.types import Routing


def router_logits(
    x_SD: torch.Tensor, weight_ED: torch.Tensor, *, impl: str | None = None, pdl: bool = False
) -> torch.Tensor:
    """``logits[s, e] = weight[e] . x[s]`` of operands upcast to float32, with nothing rounded to a smaller dtype.

    Implementations differ by the order of float32 sums, and ``"triton"`` beyond 8 rows by some 2^-22 of a product more
    (it multiplies on tensor cores, each operand taken apart into two tf32). The same call gives the same bits always.

    Args:
        x_SD: ``[S, D]``.
        weight_ED: ``[E, D]``, any floating dtype up to float32; rows may have a stride.

    Returns:
        float32 ``[S, E]``, contiguous.
    """
    check_rows("x_SD", x_SD)
    check_rows("weight_ED", weight_ED, x_SD.shape[1])
    if weight_ED.shape[0] == 0:
        raise ValueError("weight_ED must have at least 1 expert; got 0.")
    if weight_ED.device != x_SD.device:
        raise ValueError(f"weight_ED must be on {x_SD.device}, as x_SD is; got {weight_ED.device}.")
    if resolve_step_impl(impl, x_SD.device.type) == "triton":
        return ops.router_logits(x_SD, weight_ED, pdl)
    return router_logits_reference(x_SD, weight_ED)


def route(
    x_SD: torch.Tensor,
    weight_ED: torch.Tensor,
    top_k: int,
    *,
    scoring: str = "softmax",
    renormalize: bool = False,
    correction_bias: torch.Tensor | None = None,
    num_expert_group: int | None = None,
    topk_group: int | None = None,
    group_score: str = "top2_sum",
    routed_scaling_factor: float = 1.0,
    impl: str | None = None,
    pdl: bool = False,
) -> Routing:
    """``select_experts`` of ``router_logits``; see there for the arguments and what is raised.

    Returns:
        ``Routing`` with float32 ``[S, K]`` weights and int32 ``[S, K]`` ids.
    """
    return select_experts(
        router_logits(x_SD, weight_ED, impl=impl, pdl=pdl),
        top_k,
        scoring=scoring,
        renormalize=renormalize,
        correction_bias=correction_bias,
        num_expert_group=num_expert_group,
        topk_group=topk_group,
        group_score=group_score,
        routed_scaling_factor=routed_scaling_factor,
        impl=impl,
    )
