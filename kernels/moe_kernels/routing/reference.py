"""Choice of experts and preparation of a routing in plain PyTorch: the specification.

Shapes: T tokens, E experts, K experts per token, G groups of S experts, N shared experts.
"""

from __future__ import annotations

import torch

# The smallest normal float32: weights whose sum is below it, such as sigmoids that all underflow, are near 0 anyway.
SMALLEST_SUM = 2.0**-126


def select_reference(
    logits_TE: torch.Tensor,
    top_k: int,
    scoring: str,
    renormalize: bool,
    bias_E: torch.Tensor | None,
    num_groups: int,
    topk_group: int,
    group_score: str,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (weights, ids) as ``select_experts`` describes them; ``num_groups`` of 1 means none."""
    logits_TE = logits_TE.float()
    scores_TE = torch.softmax(logits_TE, dim=-1) if scoring == "softmax" else torch.sigmoid(logits_TE)
    # Scores rank as their logits do; logits are compared where they can be, since rounding makes scores equal.
    choice_TE = _comparable(logits_TE if bias_E is None else scores_TE + bias_E.float())
    ids_TE = _order(choice_TE)
    if num_groups > 1:
        size = logits_TE.shape[1] // num_groups
        if group_score == "max":
            group_TG = choice_TE.unflatten(1, (num_groups, size)).amax(dim=-1)
        else:
            summed_TE = choice_TE if bias_E is not None else _comparable(scores_TE)
            group_TG = summed_TE.unflatten(1, (num_groups, size)).topk(min(2, size), dim=-1).values.sum(dim=-1)
        kept_TG = torch.zeros_like(group_TG, dtype=torch.bool)
        kept_TG = kept_TG.scatter(1, _order(_comparable(group_TG))[:, :topk_group], True)
        # Experts of the kept groups come first, each part in the order it had.
        left_out_TE = ~kept_TG.gather(1, ids_TE // size)
        ids_TE = ids_TE.gather(1, left_out_TE.to(torch.int8).sort(dim=-1, stable=True).indices)
    ids_TK = ids_TE[:, :top_k]
    weights_TK = scores_TE.gather(1, ids_TK)
    if renormalize:
        weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True).clamp_min(SMALLEST_SUM)
    if scaling != 1.0:
        weights_TK = weights_TK * scaling
    return weights_TK, ids_TK.to(torch.int32).contiguous()


def _comparable(values: torch.Tensor) -> torch.Tensor:
    """``values`` with one zero and one NaN: sorts on some devices tell the signs of either apart."""
    return values.masked_fill(values == 0, 0.0).masked_fill(values.isnan(), float("nan"))


def _order(values: torch.Tensor) -> torch.Tensor:
    """Indices by falling value, NaN first, the lowest index first among equals (``torch.topk`` promises no order)."""
    return values.sort(dim=-1, descending=True, stable=True).indices


def prepare_reference(
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    num_routed: int,
    num_shared: int,
    expert_map: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (weights, ids) as ``prepare_routing`` describes them; no host synchronisation."""
    ids_TK = topk_ids
    if expert_map is not None:
        known_TK = (ids_TK >= 0) & (ids_TK < expert_map.shape[0])
        if expert_map.shape[0] == 0:
            ids_TK = torch.full_like(ids_TK, -1)
        else:
            ids_TK = torch.where(known_TK, expert_map[torch.where(known_TK, ids_TK, 0).long()], -1)
    ids_TK = torch.where((ids_TK >= 0) & (ids_TK < num_routed), ids_TK, -1)
    tokens, device = topk_ids.shape[0], topk_ids.device
    shared_TN = torch.arange(num_routed, num_routed + num_shared, dtype=torch.int32, device=device).expand(tokens, -1)
    ones_TN = torch.ones(tokens, num_shared, device=device)
    return torch.cat((topk_weights.float(), ones_TN), dim=1), torch.cat((ids_TK, shared_TN), dim=1)
