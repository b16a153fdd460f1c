"""How much error is allowed: what plain eager code of the same dtype makes, and some rounding on top."""

from __future__ import annotations

import torch

FACTOR = 2.0
_FLOAT32_ROUNDING = torch.finfo(torch.float32).eps / 2


def rounding_band(dtype: torch.dtype, terms: int) -> float:
    """What roundings alone may do to a right result, relative.

    One rounding of the output to nearest, up to half a unit of `dtype`, and a float32 sum of `terms` products in an
    order of its own: each of its roundings is as likely up as down, so they grow with the square root of their number.
    """
    return float(torch.finfo(dtype).eps / 2 + _FLOAT32_ROUNDING * terms**0.5)


def kernel_budget(eager_error: float | None, dtype: torch.dtype, terms: int) -> float:
    """The largest relative L2 error allowed on the dequantised weights, given that of plain eager code.

    `terms` is the longest sum of the layer, the larger of the model's and an expert's width.
    """
    return FACTOR * ((eager_error or 0.0) + rounding_band(dtype, terms))
