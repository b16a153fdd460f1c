"""Quantisation of activations in plain PyTorch: the specification.

    a = max(largest finite |x|, 1e-30);  inverse = MAX / a;  scale = a / MAX;  q = round(clamp(x * inverse, -MAX, MAX))

in float32, divisions and all, rounding to nearest even; MAX is 448 for e4m3 and 127 for int8. A static scale has the
inverse ``1 / scale``.

Shapes: R rows, C columns.
"""

from __future__ import annotations

import torch

from moe_kernels.formats import BLOCK, FP8_MAX, INT8_MAX, SMALLEST_AMAX


def rows_in_use(topk_ids: torch.Tensor, num_experts: int, slots: bool) -> torch.Tensor:
    """Bool `[R]`: rows, of tokens or of slots, that any of the experts `0 .. num_experts-1` reads."""
    used = (topk_ids >= 0) & (topk_ids < num_experts)
    return used.reshape(-1) if slots else used.any(dim=1)


def quantize_reference(
    x_RC: torch.Tensor, granularity: str, kind: str, scale: torch.Tensor | None, used_R: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (q, scale) as ``quantize_activation`` describes them; ``used_R`` bool, None where all rows are."""
    x = x_RC.to(torch.float32)
    if granularity == "tensor":
        if scale is None:
            counted = x if used_R is None else torch.where(used_R[:, None], x, 0.0)
            inverse, scale = _scales(counted.reshape(1, -1), kind)
        else:
            inverse = torch.full_like(scale, 1.0) / scale
        return _store(x, inverse, kind), scale.reshape(1)
    if granularity == "token":
        inverse, scale = _scales(x, kind)
        return _store(x, inverse[:, None], kind), scale
    rows, columns = x.shape
    blocks = -(-columns // BLOCK)
    padded = torch.nn.functional.pad(x, (0, blocks * BLOCK - columns)).view(rows, blocks, BLOCK)
    inverse, scale = _scales(padded, kind)
    return _store(padded, inverse[:, :, None], kind).flatten(1)[:, :columns].contiguous(), scale


def _scales(x: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(inverse, scale) over the last dimension."""
    finite = torch.isfinite(x)
    if x.shape[-1] == 0 or x.numel() == 0:
        amax = x.new_full(x.shape[:-1], SMALLEST_AMAX)
    else:
        amax = torch.where(finite, x.abs(), 0.0).amax(dim=-1).clamp_min(SMALLEST_AMAX)
    # A tensor, not a number: torch divides a number by a tensor, and on a GPU by a number, through a rounded inverse.
    largest = torch.full_like(amax, FP8_MAX if kind == "fp8" else INT8_MAX)
    scale = amax / largest
    if kind == "int8":
        # int8 has no NaN: the row's scale says it.
        scale = torch.where(finite.all(dim=-1), scale, float("nan"))
    return largest / amax, scale


def _store(x: torch.Tensor, inverse: torch.Tensor, kind: str) -> torch.Tensor:
    finite = torch.isfinite(x)
    if kind == "fp8":
        scaled = (x * inverse).clamp(-FP8_MAX, FP8_MAX)
        return torch.where(finite, scaled, float("nan")).to(torch.float8_e4m3fn)
    return torch.where(finite, (x * inverse).clamp(-INT8_MAX, INT8_MAX), 0.0).round().to(torch.int8)


def dequantize(q_RC: torch.Tensor, scale: torch.Tensor, granularity: str) -> torch.Tensor:
    """The float32 values that (q, scale) stand for."""
    q = q_RC.to(torch.float32)
    if granularity == "tensor":
        return q * scale
    if granularity == "token":
        return q * scale[:, None]
    return q * scale.repeat_interleave(BLOCK, dim=1)[:, : q.shape[1]]
