"""torch.library schema, fake and dispatch of the experts on FP4 units; opaque to the compiler as ``experts.ops`` is."""

from __future__ import annotations

import torch

from moe_kernels.experts.config import target_of, unflatten_config
from moe_kernels.experts.layer import StoredLayer
from moe_kernels.experts.rule_fp4 import fp4_config
from moe_kernels.experts.weights import ExpertWeights
from moe_kernels.tuning.names import Problem
from moe_kernels.types import DTYPE_NAME, Quant

_LIBRARY = torch.library.Library("moe_kernels", "FRAGMENT")
_LIBRARY.define(
    "fused_experts_fp4(Tensor x, Tensor w1, Tensor w2, Tensor w1_scale, Tensor w2_scale, Tensor? w1_global, "
    "Tensor? w2_global, str quant, int intermediate_size, Tensor topk_weights, Tensor topk_ids, bool weight_on_input, "
    "int[] config) -> Tensor"
)


def _launch(
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    w1_scale: torch.Tensor,
    w2_scale: torch.Tensor,
    w1_global: torch.Tensor | None,
    w2_global: torch.Tensor | None,
    quant: str,
    intermediate_size: int,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    weight_on_input: bool,
    config: list[int],
) -> torch.Tensor:
    from moe_kernels.experts.launch_fp4 import launch_experts_fp4

    layer = StoredLayer(
        w1, w2, w1_scale, w2_scale, None, None, w1_global, w2_global, None, None, Quant(quant), intermediate_size, 0
    )
    problem = Problem(
        x.shape[0], w1.shape[0], x.shape[1], intermediate_size, topk_ids.shape[1], quant, DTYPE_NAME[x.dtype], 0
    )
    chosen = unflatten_config(tuple(config)) if config else fp4_config(problem, target_of(x.device).shared_bytes)
    if x.device.index != torch.cuda.current_device():
        with torch.cuda.device(x.device):
            return launch_experts_fp4(x, layer, topk_weights, topk_ids, chosen, weight_on_input=weight_on_input)
    return launch_experts_fp4(x, layer, topk_weights, topk_ids, chosen, weight_on_input=weight_on_input)


def _fake(x: torch.Tensor, *_: object) -> torch.Tensor:
    return x.new_empty(x.shape)


_LIBRARY.impl("fused_experts_fp4", _launch, "CUDA")
torch.library.register_fake("moe_kernels::fused_experts_fp4", _fake, lib=_LIBRARY)


def fused_experts_fp4(
    x: torch.Tensor,
    weights: ExpertWeights,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    weight_on_input: bool,
    config: list[int],
) -> torch.Tensor:
    """Call the registered op; an empty ``config`` means the default for the token count met at run time."""
    result: torch.Tensor = torch.ops.moe_kernels.fused_experts_fp4(
        x, weights.w1, weights.w2, weights.w1_scale, weights.w2_scale, weights.w1_global, weights.w2_global,
        weights.quant.value, weights.intermediate_size, topk_weights, topk_ids, weight_on_input, config,
    )  # fmt: skip
    return result
