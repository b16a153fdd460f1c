"""torch.library schema, fake and dispatch of the Triton experts.

The op is opaque to the compiler: what it launches depends on the token count at run time, so that one compiled graph
serves every count. It is for inference; no gradient is defined.
"""

from __future__ import annotations

import torch

from moe_kernels.experts.config import default_config, target_of, unflatten_config
from moe_kernels.experts.support import TRITON_INTERPRETED

_LIBRARY = torch.library.Library("moe_kernels", "FRAGMENT")
_LIBRARY.define(
    "fused_experts_triton(Tensor x, Tensor w1, Tensor w2, Tensor topk_weights, Tensor topk_ids, int[] config) -> Tensor"
)


def _launch(
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    config: list[int],
) -> torch.Tensor:
    from moe_kernels.experts.triton import launch_experts

    if config:
        chosen = unflatten_config(tuple(config))
    else:
        shape = (x.shape[0], w1.shape[0], x.shape[1], w2.shape[2], topk_ids.shape[1])
        chosen, _ = default_config(*shape, x.dtype, target_of(x.device))
    if x.is_cuda and x.device.index != torch.cuda.current_device():
        with torch.cuda.device(x.device):
            return launch_experts(x, w1, w2, topk_weights, topk_ids, chosen)
    return launch_experts(x, w1, w2, topk_weights, topk_ids, chosen)


def _fake(
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    config: list[int],
) -> torch.Tensor:
    return x.new_empty(x.shape)


_LIBRARY.impl("fused_experts_triton", _launch, "CUDA")
if TRITON_INTERPRETED:
    _LIBRARY.impl("fused_experts_triton", _launch, "CPU")
torch.library.register_fake("moe_kernels::fused_experts_triton", _fake, lib=_LIBRARY)


def fused_experts_triton(
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    config: list[int],
) -> torch.Tensor:
    """Call the registered op; an empty ``config`` means the default for the token count met at run time."""
    result: torch.Tensor = torch.ops.moe_kernels.fused_experts_triton(x, w1, w2, topk_weights, topk_ids, config)
    return result
