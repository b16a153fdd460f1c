"""Activations in FP4, as the weights of nvfp4 and mxfp4 are stored: the specification in plain PyTorch.

In float32, over the finite values of a row, rounded to nearest even:

    mxfp4, of every 32 columns:  e = floor(log2(largest |x|)) - 2, within -127 .. 127;  q = e2m1(x * 2^-e)
    nvfp4, of a whole row:       whole = max(largest |x|, 1e-30) / (6 * 448)
           of every 16 columns:  scale = e4m3(clamp(largest |x| / 6 / whole, 2^-9, 448));  q = e2m1(x / (scale * whole))

The scale of zeros alone is 0, or 2^-127 in mxfp4. e2m1 ends at 6 and has no NaN: a value that is not finite counts for
no scale and makes what covers it NaN, the row's ``whole`` in nvfp4, its block's scale (255) in mxfp4.

Order of columns. A product of FP4 tensors takes the low nibble of byte b as column 2b and the high one as 2b + 1.
Packed as ``quant.pack`` has it, column p of such a product is column ``16 * (p // 16) + p % 16 // 2 + 8 * (p % 2)`` of
the matrix. That moves columns only within a run of 16, so blocks of 16 and of 32 columns hold the same columns before
and after, scales stay where they are, and the sum is the same as long as both operands are packed alike.

Shapes: R rows, C columns; rows are padded to whole units of 32 columns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from moe_kernels.experts.rules import TRITON_INTERPRETED
from moe_kernels.formats import FP4_MAX, FP8_MAX, PACK_RUN, SMALLEST_AMAX
from moe_kernels.quant.weights import Stored, dequantize_matrix, store_mxfp4, store_nvfp4
from moe_kernels.types import Quant

E8M0_NAN = 255


class Fp4Rows(NamedTuple):
    """Rows in FP4.

    Attributes:
        data: uint8 ``[R, 16*ceil(C/32)]``, packed as ``quant.pack`` says.
        scale: e4m3 ``[R, 2*ceil(C/32)]`` (nvfp4) or uint8 ``[R, ceil(C/32)]``, the exponent e8m0 (mxfp4).
        whole: nvfp4: float32 ``[R]``, a factor of the whole row; None for mxfp4.
    """

    data: torch.Tensor
    scale: torch.Tensor
    whole: torch.Tensor | None


_LIBRARY = torch.library.Library("moe_kernels", "FRAGMENT")
_LIBRARY.define("quantize_fp4(Tensor x, str quant) -> Tensor[]")


def quantize_fp4(x_RC: torch.Tensor, quant: Quant) -> Fp4Rows:
    """Store ``x_RC`` ``[R, C]`` of any floating dtype as ``quant``, nvfp4 or mxfp4; C at least 1.

    By the kernel on a GPU, by the specification elsewhere. Compiled code calls what eager code calls: fused, a scale
    would not be rounded to e4m3 before values are divided by it.
    """
    data, scale, *whole = torch.ops.moe_kernels.quantize_fp4(x_RC, quant.value)
    return Fp4Rows(data, scale, whole[0] if whole else None)


def _specification(x: torch.Tensor, quant: str) -> list[torch.Tensor]:
    return [tensor for tensor in quantize_fp4_reference(x, Quant(quant)) if tensor is not None]


def _triton(x: torch.Tensor, quant: str) -> list[torch.Tensor]:
    try:
        from moe_kernels.quant.triton_fp4 import launch_fp4
    except ImportError:  # triton is optional; the specification runs on every device
        return _specification(x, quant)
    return [tensor for tensor in launch_fp4(x, Quant(quant)) if tensor is not None]


_LIBRARY.impl("quantize_fp4", _triton if TRITON_INTERPRETED else _specification, "CPU")
_LIBRARY.impl("quantize_fp4", _triton, "CUDA")
torch.library.register_fake("moe_kernels::quantize_fp4", _specification, lib=_LIBRARY)


def quantize_fp4_reference(x_RC: torch.Tensor, quant: Quant) -> Fp4Rows:
    """The same by the specification, on every device."""
    x = x_RC.to(torch.float32)
    finite = torch.isfinite(x)
    x = torch.where(finite, x, 0.0)
    if quant is Quant.MXFP4:
        stored = store_mxfp4(x)
        lost = torch.nn.functional.pad(~finite, (0, -x.shape[1] % 32)).unflatten(1, (-1, 32)).any(dim=2)
        return Fp4Rows(stored.data, torch.where(lost, E8M0_NAN, stored.scale), None)
    amax = x.abs().amax(dim=1)
    # By a tensor: on a GPU torch divides by a number through its rounded inverse.
    whole = amax.clamp_min(SMALLEST_AMAX) / torch.full_like(amax, FP4_MAX * FP8_MAX)
    stored = store_nvfp4(x, whole[:, None])
    return Fp4Rows(stored.data, stored.scale, torch.where(finite.all(dim=1), whole, float("nan")))


def dequantize_fp4(rows: Fp4Rows, quant: Quant, columns: int) -> torch.Tensor:
    """The float32 values ``[R, columns]`` that ``rows`` stand for."""
    if rows.whole is not None:
        one = torch.ones((), device=rows.data.device)
        values = dequantize_matrix(Stored(rows.data, rows.scale, whole=one), quant, columns)
        return values * rows.whole[:, None]
    values = dequantize_matrix(Stored(rows.data, rows.scale), quant, columns)
    lost = rows.scale == E8M0_NAN
    return torch.where(lost[:, torch.arange(columns, device=lost.device) // 32], float("nan"), values)


def through_fp4(x_RC: torch.Tensor, quant: Quant) -> torch.Tensor:
    """What FP4 leaves of ``x_RC``, by the specification: float32 of the same shape."""
    return dequantize_fp4(quantize_fp4_reference(x_RC, quant), quant, x_RC.shape[1])


def product_columns(count: int) -> torch.Tensor:
    """int64 ``[count]``: the column of the matrix that is column p of a product of packed tensors.

    Example: 0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15, then 16, 24, 17, ...
    """
    p = torch.arange(count)
    run = 2 * PACK_RUN
    return p // run * run + p % run // 2 + PACK_RUN * (p % 2)
