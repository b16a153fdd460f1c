"""torch.library schema, fake and dispatch of the Triton product.

The op is opaque to the compiler: what it launches depends on the token count at run time, so that one compiled graph
serves every count, and no e4m3 or packed weight is looked into. It is for inference; no gradient is defined.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from moe_kernels.experts.config import target_of
from moe_kernels.experts.rules import TRITON_INTERPRETED
from moe_kernels.projections.rule import fit, rule
from moe_kernels.projections.tiles import LinearConfig, LinearProblem, unflatten
from moe_kernels.projections.weights import LinearWeights
from moe_kernels.types import DTYPE_NAME

_LIBRARY = torch.library.Library("moe_kernels", "FRAGMENT")
_LIBRARY.define(
    "linear_triton(Tensor x, Tensor w, Tensor? scale, Tensor? zero, Tensor? whole, Tensor? bias, str quant, "
    "int outputs, int group_size, int[] config) -> Tensor"
)


@functools.lru_cache(maxsize=4096)
def default_config(problem: LinearProblem, device: torch.device) -> LinearConfig:
    """The tiles that a problem gets on a device; one that is no GPU (interpreted kernels) counts as an H200."""
    hopper = device.type != "cuda" or torch.cuda.get_device_capability(device) >= (9, 0)
    return fit(rule(problem, hopper=hopper), problem, target_of(device).shared_bytes)


def _launch(
    x: torch.Tensor,
    w: torch.Tensor,
    scale: torch.Tensor | None,
    zero: torch.Tensor | None,
    whole: torch.Tensor | None,
    bias: torch.Tensor | None,
    quant: str,
    outputs: int,
    group_size: int,
    config: list[int],
) -> torch.Tensor:
    if x.shape[0] == 0:
        return x.new_empty(0, outputs)
    from moe_kernels.projections.triton import Matrix, launch_linear

    problem = LinearProblem(x.shape[0], outputs, x.shape[1], quant, DTYPE_NAME[x.dtype], group_size)
    chosen = unflatten(config) if config else default_config(problem, x.device)
    if TRITON_INTERPRETED:
        # Instructions that the interpreter does not know; they change no value.
        chosen = replace(chosen, pdl=False, prefetch=0)
    matrix = Matrix(w, scale, zero, whole)
    if x.is_cuda and x.device.index != torch.cuda.current_device():
        with torch.cuda.device(x.device):
            return launch_linear(x, matrix, bias, problem, chosen)
    return launch_linear(x, matrix, bias, problem, chosen)


def _fake(
    x: torch.Tensor,
    w: torch.Tensor,
    scale: torch.Tensor | None,
    zero: torch.Tensor | None,
    whole: torch.Tensor | None,
    bias: torch.Tensor | None,
    quant: str,
    outputs: int,
    *_: object,
) -> torch.Tensor:
    return x.new_empty(x.shape[0], outputs)


_LIBRARY.impl("linear_triton", _launch, "CUDA")
if TRITON_INTERPRETED:
    _LIBRARY.impl("linear_triton", _launch, "CPU")
torch.library.register_fake("moe_kernels::linear_triton", _fake, lib=_LIBRARY)


def linear_triton(
    x_TK: torch.Tensor, weights: LinearWeights, bias_N: torch.Tensor | None = None, config: LinearConfig | None = None
) -> torch.Tensor:
    """Call the registered op; without a ``config`` it takes the default for the token count met at run time."""
    result: torch.Tensor = torch.ops.moe_kernels.linear_triton(
        x_TK, weights.w, weights.scale, weights.zero, weights.global_scale, bias_N, weights.quant.value, weights.N,
        weights.group_size, [] if config is None else config.flat(),
    )  # fmt: skip
    return result
