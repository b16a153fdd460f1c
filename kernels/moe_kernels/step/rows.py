"""Public sum with the residual and its norm, and gated product; ``impl`` and ``pdl`` as in ``moe_kernels.step.api``.

Shapes: S rows, D columns, F channels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from moe_kernels.step import ops
from moe_kernels.step.checks import check_like, check_rows
from moe_kernels.step.reference import add_rms_norm_reference, rms_norm_reference, silu_mul_reference
from moe_kernels.step.rules import resolve_step_impl


class SumAndNorm(NamedTuple):
    """The residual after a sum, and what the next part reads.

    Attributes:
        sum_SD: ``[S, D]``; the argument itself where nothing was added.
        normed_SD: ``[S, D]``.
    """

    sum_SD: torch.Tensor  # noqa: N815
    normed_SD: torch.Tensor  # noqa: N815


def add_rms_norm(
    x_SD: torch.Tensor,
    delta_SD: torch.Tensor | None,
    weight_D: torch.Tensor,
    eps: float,
    *,
    also_SD: torch.Tensor | None = None,
    impl: str | None = None,
    pdl: bool = False,
) -> SumAndNorm:
    """Add to the residual and norm the sum.

    ``delta = round(delta + also)`` where there are both; ``sum = round(x + delta)``;
    ``normed = round(weight * (sum * rsqrt(mean(sum^2) + eps)))``. Sums are bit for bit those of plain code; the norm
    is within one rounding of it, as its mean is added up in another order.

    Args:
        x_SD: ``[S, D]``.
        delta_SD: ``[S, D]``, what is added; None for nothing.
        weight_D: ``[D]``.
        eps: added to the mean of squares.
        also_SD: ``[S, D]``, added to ``delta_SD`` first (what shared experts give beside routed ones).

    Returns:
        The sum and its norm.
    """
    check_rows("x_SD", x_SD)
    rows, width = x_SD.shape
    check_like("weight_D", weight_D, (width,), "x_SD", x_SD)
    if delta_SD is not None:
        check_like("delta_SD", delta_SD, (rows, width), "x_SD", x_SD)
    if also_SD is not None:
        if delta_SD is None:
            raise ValueError("also_SD must come with delta_SD, to which it is added.")
        check_like("also_SD", also_SD, (rows, width), "x_SD", x_SD)
    triton = resolve_step_impl(impl, x_SD.device.type) == "triton"
    if delta_SD is None:
        normed_SD = ops.rms_norm(x_SD, weight_D, eps, pdl) if triton else rms_norm_reference(x_SD, weight_D, eps)
        return SumAndNorm(x_SD, normed_SD)
    if triton:
        return SumAndNorm(*ops.add_rms_norm(x_SD, delta_SD, also_SD, weight_D, eps, pdl))
    return SumAndNorm(*add_rms_norm_reference(x_SD, delta_SD, also_SD, weight_D, eps))


def silu_mul(gate_up_SF2: torch.Tensor, *, impl: str | None = None, pdl: bool = False) -> torch.Tensor:
    """``round(round(silu(gate)) * up)``, as a gated MLP has it; the exponential may differ by a float32 rounding.

    Args:
        gate_up_SF2: ``[S, 2 F]``, gate channels first.

    Returns:
        ``[S, F]``, contiguous.
    """
    check_rows("gate_up_SF2", gate_up_SF2)
    if gate_up_SF2.shape[1] % 2:
        raise ValueError(f"gate_up_SF2 must be [S, 2 F]; got {list(gate_up_SF2.shape)}.")
    if resolve_step_impl(impl, gate_up_SF2.device.type) == "triton":
        return ops.silu_mul(gate_up_SF2, pdl)
    return silu_mul_reference(gate_up_SF2)
