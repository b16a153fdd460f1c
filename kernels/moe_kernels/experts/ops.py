"""torch.library schema, fake and dispatch of the Triton experts.

The op is opaque to the compiler: what it launches depends on the token count at run time, so that one compiled graph
serves every count, and no e4m3 or packed weight is looked into. It is for inference; no gradient is defined.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from moe_kernels.experts.config import default_config, target_of, unflatten_config
from moe_kernels.experts.layer import StoredLayer
from moe_kernels.experts.rule import few_rows, fit
from moe_kernels.experts.support import TRITON_INTERPRETED
from moe_kernels.experts.tiles import ExpertsConfig, Layout
from moe_kernels.experts.weights import ExpertWeights
from moe_kernels.tuning.names import Problem
from moe_kernels.types import DTYPE_NAME, Quant

_LIBRARY = torch.library.Library("moe_kernels", "FRAGMENT")
_LIBRARY.define(
    "fused_experts_triton(Tensor x, Tensor w1, Tensor w2, Tensor? w1_scale, Tensor? w2_scale, Tensor? w1_zero, "
    "Tensor? w2_zero, Tensor? w1_global, Tensor? w2_global, Tensor? x_scale, Tensor? h_scale, str quant, "
    "int intermediate_size, int group_size, Tensor topk_weights, Tensor topk_ids, bool weight_on_input, int split_k, "
    "bool atomic, int[] config) -> Tensor"
)


def choose_config(config: list[int], problem: Problem, device: torch.device, split_k: int) -> ExpertsConfig:
    """The configuration of a call: the one given, else the default for its size, with ``split_k`` unless that is 0.

    The token layout never splits: where the default is one, tiles on tensor cores stand in; a given one is refused.
    """
    chosen = unflatten_config(tuple(config)) if config else default_config(problem, target_of(device))[0]
    if split_k == 0:
        return chosen
    up, down = chosen.up, chosen.down
    if split_k > 1 and Layout.TOKEN in (up.layout, down.layout):
        if config:
            raise ValueError(f"split_k must be None or 1 where LAYOUT of config is token; got {split_k}.")
        tiles = ExpertsConfig(**dict(zip(("up", "down"), few_rows(problem), strict=True)), pdl=chosen.pdl)
        tiles = fit(tiles, problem, target_of(device).shared_bytes)
        up, down = tiles.up, tiles.down
    return replace(chosen, up=replace(up, split_k=split_k), down=replace(down, split_k=split_k))


def _launch(
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    w1_scale: torch.Tensor | None,
    w2_scale: torch.Tensor | None,
    w1_zero: torch.Tensor | None,
    w2_zero: torch.Tensor | None,
    w1_global: torch.Tensor | None,
    w2_global: torch.Tensor | None,
    x_scale: torch.Tensor | None,
    h_scale: torch.Tensor | None,
    quant: str,
    intermediate_size: int,
    group_size: int,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    weight_on_input: bool,
    split_k: int,
    atomic: bool,
    config: list[int],
) -> torch.Tensor:
    from moe_kernels.experts.triton import launch_experts

    layer = StoredLayer(
        w1, w2, w1_scale, w2_scale, w1_zero, w2_zero, w1_global, w2_global, x_scale, h_scale,
        Quant(quant), intermediate_size, group_size,
    )  # fmt: skip
    problem = Problem(
        x.shape[0],
        w1.shape[0],
        x.shape[1],
        intermediate_size,
        topk_ids.shape[1],
        quant,
        DTYPE_NAME[x.dtype],
        group_size,
    )
    chosen = choose_config(config, problem, x.device, split_k)
    options = {"weight_on_input": weight_on_input, "atomic": atomic}
    if x.is_cuda and x.device.index != torch.cuda.current_device():
        with torch.cuda.device(x.device):
            return launch_experts(x, layer, topk_weights, topk_ids, chosen, **options)
    return launch_experts(x, layer, topk_weights, topk_ids, chosen, **options)


def _fake(x: torch.Tensor, *_: object) -> torch.Tensor:
    return x.new_empty(x.shape)


_LIBRARY.impl("fused_experts_triton", _launch, "CUDA")
if TRITON_INTERPRETED:
    _LIBRARY.impl("fused_experts_triton", _launch, "CPU")
torch.library.register_fake("moe_kernels::fused_experts_triton", _fake, lib=_LIBRARY)


def fused_experts_triton(
    x: torch.Tensor,
    weights: ExpertWeights,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    weight_on_input: bool,
    split_k: int,
    atomic: bool,
    config: list[int],
) -> torch.Tensor:
    """Call the registered op.

    An empty ``config`` means the default for the token count met at run time, ``split_k`` 0 what that says.
    """
    result: torch.Tensor = torch.ops.moe_kernels.fused_experts_triton(
        x, weights.w1, weights.w2, weights.w1_scale, weights.w2_scale, weights.w1_zero, weights.w2_zero,
        weights.w1_global, weights.w2_global, weights.x_scale, weights.h_scale, weights.quant.value,
        weights.intermediate_size, weights.group_size, topk_weights, topk_ids, weight_on_input, split_k, atomic, config,
    )  # fmt: skip
    return result
