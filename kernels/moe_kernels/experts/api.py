"""Public ``fused_experts``: checks and dispatch.

Shapes: T tokens, D model, F ffn, E experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from moe_kernels.experts import ops, ops_fp4
from moe_kernels.experts.config import MAX_SPLIT_K, flatten_config
from moe_kernels.experts.grouped import fused_experts_grouped
from moe_kernels.experts.reference import fused_experts_reference
from moe_kernels.experts.support import impl_reasons
from moe_kernels.experts.weights import ExpertWeights
from moe_kernels.registry import find_backend
from moe_kernels.routing.prepare import prepare_routing
from moe_kernels.types import Impl, Routing

_PREFERENCE = {
    "cuda": (Impl.TRITON.value, Impl.TORCH_GROUPED_MM.value, Impl.REFERENCE.value),
    "cpu": (Impl.REFERENCE.value, Impl.TORCH_GROUPED_MM.value),
}
REDUCTIONS = ("deterministic", "atomic")


def fused_experts(
    x_TD: torch.Tensor,
    weights: ExpertWeights,
    routing: Routing,
    *,
    shared: ExpertWeights | None = None,
    expert_map: torch.Tensor | None = None,
    router_weight_on_input: bool = False,
    split_k: int | None = None,
    reduction: str = "deterministic",
    impl: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> torch.Tensor:
    """Send each token through its experts and add up their weighted outputs.

    ``out[t] = sum over k of topk_weights[t, k] * w2[e] . (silu(w1_gate[e] . x[t]) * (w1_up[e] . x[t]))`` with
    ``e = topk_ids[t, k]``. Products accumulate in float32, the intermediate is rounded to the dtype of ``x_TD``,
    weighting and sum are float32 (the Triton kernels round each weighted row once before the sum, except in the token
    layout and where sums are split). Formats with quantised activations round ``x_TD`` and the intermediate as
    ``quantize_activation`` does. An id below 0 or not below E adds nothing and is never used as an index. An expert
    that a token names twice counts twice. ``x_TD`` is never written to. For inference: no gradient.

    Args:
        x_TD: ``[T, D]`` in ``weights.dtype``: float32, bfloat16 or float16; T may be 0.
        weights: the experts, on the same device. Where ``weights.num_shared`` is above 0, its last experts are shared:
            every token passes them with weight 1 in the same kernels, and ``routing`` names the others only.
        routing: float32 weights and int32 ids ``[T, K]``, on the same device.
        shared: experts that every token passes with weight 1, of any F and format with the same dtype: run apart.
        expert_map: int32 ``[G]``, local expert of each of G global ids, -1 for experts held elsewhere, which add
            nothing (partial sums of all ranks add up); ``routing`` then holds global ids. None where ids are local.
        router_weight_on_input: multiply gate and up, not the output, by the router's weight; K must be 1.
        split_k: parts that the sum over D, and over F, is split into, for ``"triton"``; None takes what the
            configuration says. More than there are tiles is allowed: the rest adds nothing.
        reduction: ``"deterministic"`` adds parts in fixed order, ``"atomic"`` as they come (results may differ in the
            last bits from call to call). Both add in float32.
        impl: ``"reference"``, ``"torch_grouped_mm"``, ``"triton"``, ``"triton_fp4"`` or a registered name; None takes
            the first of the first three that runs these tensors (``resolve_impl`` says which). ``"triton_fp4"``
            multiplies nvfp4 and mxfp4 on FP4 units, which only some GPUs have, and rounds ``x_TD`` and the intermediate
            to the weights' format, as `moe_kernels.formats` says; it runs only where it is asked for.
        config: tile configuration of ``"triton"`` or ``"triton_fp4"``: SGLang's keys for both GEMMs, or
            ``{"up": ..., "down": ...}``; None takes the default (``resolve_config`` says which).

    Returns:
        ``[T, D]``, contiguous, in the dtype of ``x_TD``.

    Raises:
        ValueError: tensors that do not fit together, an unknown ``impl`` or ``reduction``, a wrong ``config``, or one
            for an implementation without tiles; ``split_k`` for another than ``"triton"``.
        NotImplementedError: the named implementation does not run these tensors; the message says why.
    """
    _check(x_TD, weights, routing)
    _check_options(weights, routing, shared, router_weight_on_input, split_k, reduction)
    if expert_map is not None or weights.num_shared:
        routing = prepare_routing(routing, weights.num_routed, weights.num_shared, expert_map)
    chosen = _resolve(x_TD, weights, routing, impl)
    triton, fp4 = chosen == Impl.TRITON.value, chosen == Impl.TRITON_FP4.value
    if config is not None and not (triton or fp4):
        raise ValueError(f"config is for impl 'triton' and 'triton_fp4'; this call runs {chosen!r}.")
    if split_k not in (None, 1) and not triton:
        raise ValueError(f"split_k is for impl 'triton'; this call runs {chosen!r}.")
    if triton:
        out_TD = ops.fused_experts_triton(
            x_TD,
            weights,
            routing.topk_weights,
            routing.topk_ids,
            weight_on_input=router_weight_on_input,
            split_k=split_k or 0,
            atomic=reduction == "atomic",
            config=[] if config is None else flatten_config(config),
        )
    elif fp4:
        out_TD = ops_fp4.fused_experts_fp4(
            x_TD,
            weights,
            routing.topk_weights,
            routing.topk_ids,
            weight_on_input=router_weight_on_input,
            config=[] if config is None else flatten_config(config),
        )
    else:
        out_TD = _plain(chosen, x_TD, weights, routing, router_weight_on_input)
    if shared is None:
        return out_TD
    tokens, count = x_TD.shape[0], shared.num_experts
    every = Routing(
        torch.ones(tokens, count, dtype=torch.float32, device=x_TD.device),
        torch.arange(count, dtype=torch.int32, device=x_TD.device).expand(tokens, count),
    )
    added = fused_experts(x_TD, shared, every, impl=impl, split_k=split_k, reduction=reduction)
    return (out_TD.to(torch.float32) + added.to(torch.float32)).to(x_TD.dtype)


def _plain(
    chosen: str, x_TD: torch.Tensor, weights: ExpertWeights, routing: Routing, weight_on_input: bool
) -> torch.Tensor:
    if x_TD.shape[0] == 0:
        return x_TD.new_empty(x_TD.shape)
    if chosen == Impl.TORCH_GROUPED_MM.value:
        return fused_experts_grouped(x_TD, weights, routing, router_weight_on_input=weight_on_input)
    if chosen == Impl.REFERENCE.value:
        return fused_experts_reference(x_TD, weights, routing, router_weight_on_input=weight_on_input)
    if weight_on_input:
        raise NotImplementedError(f"router_weight_on_input is for the built-in implementations, not for {chosen!r}.")
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
            weights.quant.value,
        )
        if not reasons:
            return name
        refused.append(f"impl {name!r} does not run here: {' '.join(reasons)}")
    raise NotImplementedError(" ".join(refused))


def _check(x_TD: torch.Tensor, weights: ExpertWeights, routing: Routing) -> None:
    if x_TD.dim() != 2 or x_TD.shape[1] != weights.hidden_size:
        raise ValueError(f"x_TD must be [T, {weights.hidden_size}]; got {list(x_TD.shape)}.")
    if x_TD.dtype != weights.dtype:
        raise ValueError(f"x_TD must have the dtype of the weights, {weights.dtype}; got {x_TD.dtype}.")
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


def _check_options(
    weights: ExpertWeights,
    routing: Routing,
    shared: ExpertWeights | None,
    weight_on_input: bool,
    split_k: int | None,
    reduction: str,
) -> None:
    if weight_on_input and routing.topk_ids.shape[1] != 1:
        raise ValueError(f"router_weight_on_input must be False where K is not 1; got K = {routing.topk_ids.shape[1]}.")
    whole = isinstance(split_k, int) and not isinstance(split_k, bool)
    if split_k is not None and not (whole and 1 <= split_k <= MAX_SPLIT_K):
        raise ValueError(f"split_k must be None or from 1 to {MAX_SPLIT_K}; got {split_k!r}.")
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(REDUCTIONS)}; got {reduction!r}.")
    if shared is None:
        return
    if (shared.hidden_size, shared.dtype, shared.w1.device) != (weights.hidden_size, weights.dtype, weights.w1.device):
        raise ValueError(
            f"shared must have the hidden size, dtype and device of the routed experts, {weights.hidden_size}, "
            f"{weights.dtype} and {weights.w1.device}; got {shared.hidden_size}, {shared.dtype} and {shared.w1.device}."
        )
