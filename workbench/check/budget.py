"""How much error is allowed: what plain eager code of the same dtype makes, and some rounding on top."""

from __future__ import annotations

import torch

FACTOR = 2.0
# One rounding of the output to nearest is off by up to half a unit. float32 sums of thousands of products differ by
# a few units with their order alone, which bf16 and fp16 outputs hide.
BAND = {
    torch.float32: 8 * torch.finfo(torch.float32).eps,
    torch.bfloat16: torch.finfo(torch.bfloat16).eps / 2,
    torch.float16: torch.finfo(torch.float16).eps / 2,
}


def kernel_budget(eager_error: float | None, dtype: torch.dtype) -> float:
    """The largest relative L2 error allowed on the dequantised weights, given that of plain eager code."""
    return FACTOR * ((eager_error or 0.0) + BAND[dtype])
