"""Choice of experts from router logits, in plain traceable PyTorch.

Shapes: T tokens, E experts, K experts per token, G groups of experts.
"""

from __future__ import annotations

import torch

from moe_kernels.types import Routing

_SCORINGS = ("softmax", "sigmoid")
_GROUP_SCORES = ("top2_sum", "max")
# Sigmoid scores may all underflow; a sum this small stands for none.
_SMALLEST_SUM = 1e-20


def select_experts(
    router_logits_TE: torch.Tensor,
    top_k: int,
    *,
    scoring: str = "softmax",
    renormalize: bool = False,
    correction_bias: torch.Tensor | None = None,
    num_expert_group: int | None = None,
    topk_group: int | None = None,
    group_score: str = "top2_sum",
    routed_scaling_factor: float = 1.0,
) -> Routing:
    """Choose the ``top_k`` best experts of each token and their weights.

    ``p = score(float32(logits)); c = p + correction_bias``; with groups only the experts of the ``topk_group`` best
    groups stay; ``ids = top_k largest of c; w = p[ids]``, then ``w /= sum(w)`` where ``renormalize``, then
    ``w *= routed_scaling_factor``. The bias steers the choice and never reaches the weights. Scores are computed in
    float32 whatever the dtype of the logits. Ids come in order of falling ``c``; between equal ones the choice is that
    of ``torch.topk``. Groups as in DeepSeek-V2 (``group_score="max"``, softmax) and V3 (``"top2_sum"``, sigmoid, bias).

    Args:
        router_logits_TE: ``[T, E]``, any floating dtype; T may be 0.
        top_k: 1 .. E, or as many experts as the chosen groups hold.
        scoring: ``"softmax"`` or ``"sigmoid"``.
        renormalize: make the weights of each token sum to 1 (before scaling).
        correction_bias: ``[E]``, any floating dtype, on the same device; None for none.
        num_expert_group: number of groups of neighbouring experts; divides E. None or 1 for no groups.
        topk_group: groups that stay, 1 .. ``num_expert_group``; given exactly when ``num_expert_group`` is.
        group_score: what ranks a group: ``"top2_sum"``, the sum of its two best ``c``, or ``"max"``, its best.
        routed_scaling_factor: multiplies every weight once.

    Returns:
        ``Routing`` with float32 ``[T, K]`` weights and int32 ``[T, K]`` ids.

    Raises:
        ValueError: wrong shape or dtype, ``top_k`` out of range, groups that do not fit, unknown ``scoring`` or
            ``group_score``.
    """
    if scoring not in _SCORINGS:
        raise ValueError(f"scoring must be one of {', '.join(_SCORINGS)}; got {scoring!r}.")
    if router_logits_TE.dim() != 2 or not router_logits_TE.is_floating_point():
        raise ValueError(
            "router_logits_TE must be a floating-point tensor [T, E]; got "
            f"{router_logits_TE.dtype} {list(router_logits_TE.shape)}."
        )
    num_experts = router_logits_TE.shape[1]
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k must be between 1 and the number of experts {num_experts}; got {top_k}.")
    if correction_bias is not None and correction_bias.shape != (num_experts,):
        raise ValueError(f"correction_bias must be [{num_experts}]; got {list(correction_bias.shape)}.")
    if scoring == "softmax":
        scores_TE = torch.softmax(router_logits_TE, dim=-1, dtype=torch.float32)
    else:
        scores_TE = torch.sigmoid(router_logits_TE.float())
    choice_TE = scores_TE if correction_bias is None else scores_TE + correction_bias.float()
    if num_expert_group is not None or topk_group is not None:
        choice_TE = _within_groups(choice_TE, top_k, num_expert_group, topk_group, group_score)
    ids_TK = torch.topk(choice_TE, top_k, dim=-1).indices
    weights_TK = scores_TE.gather(1, ids_TK)
    if renormalize:
        weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True).clamp_min(_SMALLEST_SUM)
    if routed_scaling_factor != 1.0:
        weights_TK = weights_TK * routed_scaling_factor
    return Routing(weights_TK, ids_TK.to(torch.int32))


def _within_groups(
    choice_TE: torch.Tensor, top_k: int, num_expert_group: int | None, topk_group: int | None, group_score: str
) -> torch.Tensor:
    """``choice_TE`` with minus infinity outside of each token's best groups."""
    tokens, num_experts = choice_TE.shape
    if group_score not in _GROUP_SCORES:
        raise ValueError(f"group_score must be one of {', '.join(_GROUP_SCORES)}; got {group_score!r}.")
    if num_expert_group is None or topk_group is None:
        raise ValueError("num_expert_group and topk_group must be given together.")
    if num_expert_group < 1 or num_experts % num_expert_group:
        raise ValueError(f"num_expert_group must divide the number of experts {num_experts}; got {num_expert_group}.")
    if not 1 <= topk_group <= num_expert_group:
        raise ValueError(f"topk_group must be between 1 and num_expert_group {num_expert_group}; got {topk_group}.")
    size = num_experts // num_expert_group
    if top_k > topk_group * size:
        raise ValueError(f"top_k must be at most the {topk_group * size} experts of the chosen groups; got {top_k}.")
    grouped_TGS = choice_TE.view(tokens, num_expert_group, size)
    best = 1 if group_score == "max" else min(2, size)
    group_TG = torch.topk(grouped_TGS, best, dim=-1).values.sum(dim=-1)
    kept_TG = torch.zeros_like(group_TG, dtype=torch.bool)
    kept_TG = kept_TG.scatter(1, torch.topk(group_TG, topk_group, dim=-1).indices, True)
    return grouped_TGS.masked_fill(~kept_TG[:, :, None], float("-inf")).view(tokens, num_experts)
