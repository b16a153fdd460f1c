"""Public ``fused_experts``: checks and dispatch.

Shapes: T tokens, D model, F ffn, E experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from moe_kernels.experts import ops
from moe_kernels.experts.config import flatten_config
from moe_kernels.experts.grouped import fused_experts_grouped
from moe_kernels.experts.reference import fused_experts_reference
from moe_kernels.experts.support import impl_reasons
from moe_kernels.experts.weights import ExpertWeights
from moe_kernels.registry import find_backend
from moe_kernels.types import Impl, Routing

_PREFERENCE = {
    "cuda": (Impl.TRITON.value, Impl.TORCH_GROUPED_MM.value, Impl.REFERENCE.value),
    "cpu": (Impl.REFERENCE.value, Impl.TORCH_GROUPED_MM.value),
}


def fused_experts(
    x_TD: torch.Tensor,
    weights: ExpertWeights,
    routing: Routing,
    *,
    impl: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> torch.Tensor:
    """Send each token through its experts and add up their weighted outputs.

    ``out[t] = sum over k of topk_weights[t, k] * w2[e] . (silu(w1_gate[e] . x[t]) * (w1_up[e] . x[t]))`` with
    ``e = topk_ids[t, k]``. Products accumulate in float32, the intermediate is rounded to the compute dtype, weighting
    and sum are float32 (the Triton kernels round each weighted row once before the sum, except in the token layout).
    An id below 0 or not below E adds nothing and is never used as an index. An expert that a token names twice counts
    twice. ``x_TD`` is never written to. For inference: no gradient.

    Args:
        x_TD: ``[T, D]`` in the dtype of the weights: float32, bfloat16 or float16; T may be 0.
        weights: the experts, on the same device.
        routing: float32 weights and int32 ids ``[T, K]``, on the same device.
        impl: ``"reference"``, ``"torch_grouped_mm"``, ``"triton"`` or a registered name; None takes the first built-in
            one that runs these tensors (``resolve_impl`` says which).
        config: tile configuration of ``"triton"``: SGLang's keys for both GEMMs, or ``{"up": ..., "down": ...}``; None
            takes the default (``resolve_config`` says which).

    Returns:
        ``[T, D]``, contiguous, in the dtype of ``x_TD``.

    Raises:
        ValueError: tensors that do not fit together, an unknown ``impl``, a wrong ``config``.
        NotImplementedError: the named implementation does not run these tensors; the message says why.
    """
    _check(x_TD, weights, routing)
    chosen = _resolve(x_TD, weights, routing, impl)
    if config is not None and chosen != Impl.TRITON.value:
        raise ValueError(f"config is for impl 'triton'; this call runs {chosen!r}.")
    if chosen == Impl.TRITON.value:
        flat = [] if config is None else flatten_config(config)
        return ops.fused_experts_triton(x_TD, weights.w1, weights.w2, routing.topk_weights, routing.topk_ids, flat)
    if x_TD.shape[0] == 0:
        return x_TD.new_empty(x_TD.shape)
    if chosen == Impl.TORCH_GROUPED_MM.value:
        return fused_experts_grouped(x_TD, weights, routing)
    if chosen == Impl.REFERENCE.value:
        return fused_experts_reference(x_TD, weights, routing)
    backend = find_backend(chosen)
    assert backend is not None
    return backend.function(x_TD, weights, routing)


def resolve_impl(x_TD: torch.Tensor, weights: ExpertWeights, routing: Routing, impl: str | None = None) -> str:
    """Return the name of the implementation that ``fused_experts`` runs for these arguments; raises as that does."""
    _check(x_TD, weights, routing)
    return _resolve(x_TD, weights, routing, impl)


def _resolve(x_TD: torch.Tensor, weights: ExpertWeights, routing: Routing, impl: str | None) -> str:
    device = x_TD.device.type
    if impl is None:
        names = _PREFERENCE.get(device, (Impl.REFERENCE.value,))
    else:
        names = (impl.value if isinstance(impl, Impl) else impl,)
    compiling = torch.compiler.is_compiling()
    capturing = device == "cuda" and not compiling and torch.cuda.is_current_stream_capturing()
    refused = []
    for name in names:
        reasons = impl_reasons(
            name,
            device,
            x_TD.dtype,
            weights.num_experts,
            weights.hidden_size,
            weights.intermediate_size,
            routing.topk_ids.shape[1],
            compiling,
            capturing,
        )
        if not reasons:
            return name
        refused.append(f"impl {name!r} does not run here: {' '.join(reasons)}")
    raise NotImplementedError(" ".join(refused))


def _check(x_TD: torch.Tensor, weights: ExpertWeights, routing: Routing) -> None:
    if x_TD.dim() != 2 or x_TD.shape[1] != weights.hidden_size:
        raise ValueError(f"x_TD must be [T, {weights.hidden_size}]; got {list(x_TD.shape)}.")
    if x_TD.dtype != weights.w1.dtype:
        raise ValueError(f"x_TD must have the dtype of the weights, {weights.w1.dtype}; got {x_TD.dtype}.")
    topk_weights, topk_ids = routing.topk_weights, routing.topk_ids
    if topk_ids.dtype != torch.int32 or topk_weights.dtype != torch.float32:
        raise ValueError(
            f"routing must hold float32 topk_weights and int32 topk_ids; got {topk_weights.dtype} and {topk_ids.dtype}."
        )
    if topk_ids.dim() != 2 or topk_ids.shape != topk_weights.shape or topk_ids.shape[0] != x_TD.shape[0]:
        raise ValueError(
            f"routing must hold two tensors [T, K] with T = {x_TD.shape[0]}; got topk_weights "
            f"{list(topk_weights.shape)} and topk_ids {list(topk_ids.shape)}."
        )
    if topk_ids.shape[1] < 1:
        raise ValueError("routing must hold at least one expert per token; got K = 0.")
    if not x_TD.device == weights.w1.device == topk_ids.device == topk_weights.device:
        raise ValueError(
            f"x_TD, weights and routing must be on one device; got {x_TD.device}, {weights.w1.device}, "
            f"{topk_weights.device} and {topk_ids.device}."
        )
