"""Public quantisation of activations.

Shapes: R rows, C columns, T tokens, K experts per token.
"""

from __future__ import annotations

import torch

from moe_kernels.quant import ops
from moe_kernels.quant.reference import quantize_reference, rows_in_use

GRANULARITIES = ("tensor", "token", "block")
KINDS = ("fp8", "int8")


def quantize_activation(
    x_RC: torch.Tensor,
    granularity: str,
    kind: str = "fp8",
    *,
    scale: torch.Tensor | None = None,
    routing_ids: torch.Tensor | None = None,
    num_experts: int | None = None,
    rows: str = "tokens",
    impl: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round activations to eight bits: ``a = max(largest finite |x|, 1e-30)``, ``q = round(clamp(x * (MAX / a)))``.

    In float32, to nearest even; MAX is 448 (e4m3) or 127 (int8), the scale ``a / MAX``. Zeros stay exact zeros. A value
    that is not finite counts for no scale; it becomes NaN in e4m3, and makes its row's scale NaN in int8.

    Args:
        x_RC: ``[R, C]``, any floating dtype; rows may have a stride.
        granularity: what one scale covers: ``"tensor"``, ``"token"`` (a row) or ``"block"`` (128 columns of a row).
        kind: ``"fp8"`` or ``"int8"``, which is for tokens only.
        scale: float32 ``[1]``, a static scale for ``"tensor"``: ``q = round(clamp(x * (1 / scale)))``.
        routing_ids: int32 ``[T, K]``; rows whose ids all lie outside ``0 .. num_experts-1`` count for no scale of a
            whole tensor (they only pad the batch), and what is made of them is not defined.
        num_experts: E; given with ``routing_ids``.
        rows: what a row of x is: one of the ``"tokens"`` of ``routing_ids``, or one of its ``"slots"`` ``t * K + k``.
        impl: ``"reference"``, ``"triton"`` or None for the op that serves the device.

    Returns:
        q ``[R, C]`` in e4m3 or int8, and the float32 scale: ``[1]``, ``[R]`` or ``[R, ceil(C / 128)]``.

    Raises:
        ValueError: an unknown word, or tensors that do not fit together.
    """
    if granularity not in GRANULARITIES:
        raise ValueError(f"granularity must be one of {', '.join(GRANULARITIES)}; got {granularity!r}.")
    if kind not in KINDS or (kind == "int8" and granularity != "token"):
        raise ValueError(f"kind must be fp8, or int8 where granularity is token; got {kind!r} for {granularity}.")
    if impl not in (None, "reference", "triton"):
        raise ValueError(f"impl must be None, reference or triton; got {impl!r}.")
    if rows not in ("tokens", "slots"):
        raise ValueError(f"rows must be tokens or slots; got {rows!r}.")
    if x_RC.dim() != 2 or not x_RC.is_floating_point() or x_RC.shape[1] < 1:
        raise ValueError(
            f"x_RC must be a floating-point tensor [R, C] with C >= 1; got {x_RC.dtype} {list(x_RC.shape)}."
        )
    if scale is not None and (granularity != "tensor" or scale.dtype != torch.float32 or scale.shape != (1,)):
        raise ValueError("scale must be float32 [1], and is for granularity tensor only.")
    if (routing_ids is None) != (num_experts is None):
        raise ValueError("routing_ids and num_experts must be given together.")
    if routing_ids is None:
        routing_ids, count = torch.zeros(x_RC.shape[0], 1, dtype=torch.int32, device=x_RC.device), 1
    else:
        assert num_experts is not None
        count = num_experts
        expected = routing_ids.numel() if rows == "slots" else routing_ids.shape[0]
        if routing_ids.dtype != torch.int32 or routing_ids.dim() != 2 or expected != x_RC.shape[0]:
            raise ValueError(
                f"routing_ids must be int32 [T, K] with {x_RC.shape[0]} {rows}; got {routing_ids.dtype} "
                f"{list(routing_ids.shape)}."
            )
    slots = rows == "slots"
    if impl == "reference":
        return quantize_reference(x_RC, granularity, kind, scale, rows_in_use(routing_ids, count, slots))
    if impl == "triton":
        from moe_kernels.quant.triton import launch_quantize

        return launch_quantize(x_RC, granularity, kind, routing_ids.contiguous(), count, slots, scale)
    return ops.quantize(x_RC, granularity, kind, scale, routing_ids, count, slots)
