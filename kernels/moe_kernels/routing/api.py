"""Public choice of experts from router logits.

Shapes: T tokens, E experts, K experts per token, G groups of experts.
"""

from __future__ import annotations

import torch

from moe_kernels.experts.rules import TRITON_INSTALLED, TRITON_INTERPRETED
from moe_kernels.routing import ops
from moe_kernels.routing.reference import select_reference
from moe_kernels.types import Routing

IMPLS = ("reference", "triton")
# Beyond, the tile of one token does not fit the registers of its warps.
TRITON_MAX_EXPERTS = 4096
_SCORINGS = ("softmax", "sigmoid")
_GROUP_SCORES = ("top2_sum", "max")


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
    impl: str | None = None,
) -> Routing:
    """Choose the ``top_k`` best experts of each token and their weights.

    ``p = score(float32(logits)); c = p + correction_bias``; with groups only the experts of the ``topk_group`` best
    groups stay; ``ids = top_k largest of c; w = p[ids]``, then ``w /= sum(w)`` where ``renormalize``, then
    ``w *= routed_scaling_factor``. The bias steers the choice and never reaches the weights. Scores are computed in
    float32 whatever the dtype of the logits. Groups as in DeepSeek-V2 (``group_score="max"``, softmax) and V3
    (``"top2_sum"``, sigmoid, bias).

    Ids come in order of falling ``c``, the lowest first among equals, and so do groups. Without a bias the logits
    themselves are compared, which rank as ``p`` does and which rounding does not make equal: then the ids of every
    implementation are the same. With one, or by ``"top2_sum"``, implementations may differ where two ``c`` are as
    close as float32 rounds.

    A NaN ranks above every number, as in ``torch.topk``. Whatever the logits hold, the ids of a token are ``top_k``
    different ones in ``0 .. E-1``; a softmax over a NaN or plus infinity gives weights of NaN, a sigmoid gives NaN for
    the NaN alone (and for its whole token where ``renormalize``). Other tokens are not touched.

    Args:
        router_logits_TE: ``[T, E]``, any floating dtype and strides; T may be 0.
        top_k: 1 .. E, or as many experts as the chosen groups hold.
        scoring: ``"softmax"`` or ``"sigmoid"``.
        renormalize: make the weights of each token sum to 1 (before scaling). Scores that all underflow stay 0.
        correction_bias: ``[E]``, any floating dtype, on the same device; None for none.
        num_expert_group: number of groups of neighbouring experts; divides E. None or 1 for no groups.
        topk_group: groups that stay, 1 .. ``num_expert_group``; given exactly when ``num_expert_group`` is.
        group_score: what ranks a group: ``"top2_sum"``, the sum of its two best ``c``, or ``"max"``, its best.
        routed_scaling_factor: multiplies every weight once.
        impl: ``"reference"`` (plain PyTorch, any device), ``"triton"`` (CUDA, up to 4096 experts, one launch, no
            gradient), or None: triton on CUDA where it runs, else reference.

    Returns:
        ``Routing`` with float32 ``[T, K]`` weights and int32 ``[T, K]`` ids.

    Raises:
        ValueError: wrong shape, dtype or device, ``top_k`` out of range, groups that do not fit, unknown ``scoring``,
            ``group_score`` or ``impl``.
        NotImplementedError: ``impl`` does not run here; the sentence says why.
    """
    if scoring not in _SCORINGS:
        raise ValueError(f"scoring must be one of {', '.join(_SCORINGS)}; got {scoring!r}.")
    if router_logits_TE.dim() != 2 or not router_logits_TE.is_floating_point():
        raise ValueError(
            "router_logits_TE must be a floating-point tensor [T, E]; got "
            f"{router_logits_TE.dtype} {list(router_logits_TE.shape)}."
        )
    num_experts, device = router_logits_TE.shape[1], router_logits_TE.device
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k must be between 1 and the number of experts {num_experts}; got {top_k}.")
    if correction_bias is not None:
        if correction_bias.shape != (num_experts,):
            raise ValueError(f"correction_bias must be [{num_experts}]; got {list(correction_bias.shape)}.")
        if not correction_bias.is_floating_point():
            raise ValueError(f"correction_bias must be of a floating dtype; got {correction_bias.dtype}.")
        if correction_bias.device != device:
            raise ValueError(f"correction_bias must be on {device}, as the logits are; got {correction_bias.device}.")
    groups, kept = _groups(num_experts, top_k, num_expert_group, topk_group, group_score)
    select = select_reference if _resolve(impl, device.type, num_experts) == "reference" else ops.select_experts
    scaling = float(routed_scaling_factor)
    return Routing(
        *select(
            router_logits_TE, top_k, scoring, bool(renormalize), correction_bias, groups, kept, group_score, scaling
        )
    )


def gate_reasons(impl: str, device_type: str, num_experts: int) -> list[str]:
    """Why ``select_experts(impl=impl)`` would not run, as sentences; an empty list means that it runs.

    Raises:
        ValueError: ``impl`` is unknown.
    """
    if impl not in IMPLS:
        raise ValueError(f"impl must be one of {', '.join(IMPLS)}; got {impl!r}.")
    if impl == "reference":
        return []
    if not TRITON_INSTALLED:
        return ["triton is not installed."]
    reasons = []
    if device_type != "cuda" and not TRITON_INTERPRETED:
        reasons.append(f"Triton kernels run on cuda, not {device_type}.")
    if num_experts > TRITON_MAX_EXPERTS:
        reasons.append(f"The Triton gate takes up to {TRITON_MAX_EXPERTS} experts; this has {num_experts}.")
    return reasons


def _resolve(impl: str | None, device_type: str, num_experts: int) -> str:
    if impl is None:
        runs = device_type == "cuda" and not gate_reasons("triton", device_type, num_experts)
        return "triton" if runs else "reference"
    reasons = gate_reasons(impl, device_type, num_experts)
    if reasons:
        raise NotImplementedError(f"impl {impl!r} does not run: {' '.join(reasons)}")
    return impl


def _groups(
    num_experts: int, top_k: int, num_expert_group: int | None, topk_group: int | None, group_score: str
) -> tuple[int, int]:
    """Checked numbers of groups and of those that stay; (1, 1) for none."""
    if group_score not in _GROUP_SCORES:
        raise ValueError(f"group_score must be one of {', '.join(_GROUP_SCORES)}; got {group_score!r}.")
    if num_expert_group is None and topk_group is None:
        return 1, 1
    if num_expert_group is None or topk_group is None:
        raise ValueError("num_expert_group and topk_group must be given together.")
    if num_expert_group < 1 or num_experts % num_expert_group:
        raise ValueError(f"num_expert_group must divide the number of experts {num_experts}; got {num_expert_group}.")
    if not 1 <= topk_group <= num_expert_group:
        raise ValueError(f"topk_group must be between 1 and num_expert_group {num_expert_group}; got {topk_group}.")
    held = topk_group * (num_experts // num_expert_group)
    if top_k > held:
        raise ValueError(f"top_k must be at most the {held} experts of the chosen groups; got {top_k}.")
    # Where every group stays there is nothing to rank.
    return (num_expert_group, topk_group) if topk_group < num_expert_group else (1, 1)
