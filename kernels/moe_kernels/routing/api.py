"""Choice of experts from router logits, in plain traceable PyTorch.

Shapes: T tokens, E experts, K experts per token.
"""

from __future__ import annotations

import torch

from moe_kernels.types import Routing

_SCORINGS = ("softmax",)


def select_experts(
    router_logits_TE: torch.Tensor,
    top_k: int,
    *,
    scoring: str = "softmax",
    renormalize: bool = False,
    routed_scaling_factor: float = 1.0,
) -> Routing:
    """Choose the ``top_k`` best experts of each token and their weights.

    ``p = softmax(float32(logits)); ids = top_k largest of p; w = p[ids]``, then ``w /= sum(w)`` where ``renormalize``,
    then ``w *= routed_scaling_factor``. Scores are computed in float32 whatever the dtype of the logits. Ids come in
    order of falling weight; between equal scores the choice is that of ``torch.topk``.

    Args:
        router_logits_TE: ``[T, E]``, any floating dtype; T may be 0.
        top_k: 1 .. E.
        scoring: ``"softmax"``.
        renormalize: make the weights of each token sum to 1 (before scaling).
        routed_scaling_factor: multiplies every weight once.

    Returns:
        ``Routing`` with float32 ``[T, K]`` weights and int32 ``[T, K]`` ids.

    Raises:
        ValueError: wrong shape or dtype, ``top_k`` outside 1 .. E, unknown ``scoring``.
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
    scores_TE = torch.softmax(router_logits_TE, dim=-1, dtype=torch.float32)
    weights_TK, ids_TK = torch.topk(scores_TE, top_k, dim=-1)
    if renormalize:
        weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
    if routed_scaling_factor != 1.0:
        weights_TK = weights_TK * routed_scaling_factor
    return Routing(weights_TK, ids_TK.to(torch.int32))
