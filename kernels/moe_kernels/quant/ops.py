"""torch.library schema, fake and dispatch of activation quantisation: compiled code calls what eager code calls."""

from __future__ import annotations

import torch

from moe_kernels.experts.rules import TRITON_INTERPRETED
from moe_kernels.formats import BLOCK
from moe_kernels.quant.reference import quantize_reference, rows_in_use

_LIBRARY = torch.library.Library("moe_kernels", "FRAGMENT")
_LIBRARY.define(
    "quantize_activation(Tensor x, str granularity, str kind, Tensor? scale, Tensor topk_ids, int num_experts, "
    "bool slots) -> (Tensor, Tensor)"
)


def _reference(
    x: torch.Tensor,
    granularity: str,
    kind: str,
    scale: torch.Tensor | None,
    topk_ids: torch.Tensor,
    num_experts: int,
    slots: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    q, made = quantize_reference(x, granularity, kind, scale, rows_in_use(topk_ids, num_experts, slots))
    # An op's result may not be its argument.
    return q, made if scale is None else made.clone()


def _triton(
    x: torch.Tensor,
    granularity: str,
    kind: str,
    scale: torch.Tensor | None,
    topk_ids: torch.Tensor,
    num_experts: int,
    slots: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    try:
        from moe_kernels.quant.triton import launch_quantize
    except ImportError:  # triton is optional; the specification runs on every device
        return _reference(x, granularity, kind, scale, topk_ids, num_experts, slots)
    q, made = launch_quantize(x, granularity, kind, topk_ids.contiguous(), num_experts, slots, scale)
    return q, made if scale is None else made.clone()


def _fake(
    x: torch.Tensor,
    granularity: str,
    kind: str,
    scale: torch.Tensor | None,
    topk_ids: torch.Tensor,
    num_experts: int,
    slots: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = x.shape
    shape = {"tensor": (1,), "token": (rows,), "block": (rows, -(-columns // BLOCK))}[granularity]
    q = torch.empty(rows, columns, dtype=torch.float8_e4m3fn if kind == "fp8" else torch.int8, device=x.device)
    return q, x.new_empty(shape, dtype=torch.float32)


_LIBRARY.impl("quantize_activation", _triton if TRITON_INTERPRETED else _reference, "CPU")
_LIBRARY.impl("quantize_activation", _triton, "CUDA")
torch.library.register_fake("moe_kernels::quantize_activation", _fake, lib=_LIBRARY)


def quantize(
    x: torch.Tensor,
    granularity: str,
    kind: str,
    scale: torch.Tensor | None,
    topk_ids: torch.Tensor,
    num_experts: int,
    slots: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call the registered op."""
    result: tuple[torch.Tensor, torch.Tensor] = torch.ops.moe_kernels.quantize_activation(
        x, granularity, kind, scale, topk_ids, num_experts, slots
    )
    return result
