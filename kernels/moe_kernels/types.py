"""Shared vocabulary: the routing of a batch, weight formats and implementation names."""

from __future__ import annotations

from typing import NamedTuple

import torch

from moe_kernels.names import Impl as Impl
from moe_kernels.names import Quant as Quant
from moe_kernels.names import parse_choice as parse_choice


class Routing(NamedTuple):
    """Which experts each token goes to, and with what weight.

    Attributes:
        topk_weights: float32 ``[T, K]``.
        topk_ids: int32 ``[T, K]``; an id below 0, or not below the number of experts, marks a slot that adds nothing.
    """

    topk_weights: torch.Tensor
    topk_ids: torch.Tensor


TORCH_DTYPE = {Quant.FP32: torch.float32, Quant.BF16: torch.bfloat16, Quant.FP16: torch.float16}
DTYPE_NAME = {dtype: quant.value for quant, dtype in TORCH_DTYPE.items()}
