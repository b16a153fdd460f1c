"""One layer's stored weights as the launchers take them: tensors and numbers, as an op schema can hold them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from moe_kernels.formats import FORMATS, Format
from moe_kernels.types import Quant


class StoredLayer(NamedTuple):
    """The tensors of ``ExpertWeights`` and what says how to read them.

    Attributes:
        w1, w2: stored weights; ``ExpertWeights`` says in which shape, as for the other tensors.
        quant: the format.
        intermediate_size: F, which packed weights do not tell.
        group_size: columns of one int4 scale; 0 for other formats.
    """

    w1: torch.Tensor
    w2: torch.Tensor
    w1_scale: torch.Tensor | None
    w2_scale: torch.Tensor | None
    w1_zero: torch.Tensor | None
    w2_zero: torch.Tensor | None
    w1_global: torch.Tensor | None
    w2_global: torch.Tensor | None
    x_scale: torch.Tensor | None
    h_scale: torch.Tensor | None
    quant: Quant
    intermediate_size: int
    group_size: int

    @property
    def form(self) -> Format:
        """Facts about the format."""
        return FORMATS[self.quant]

    @property
    def num_experts(self) -> int:
        """E."""
        return self.w1.shape[0]

    @property
    def columns_a_scale(self) -> int:
        """Columns that one weight scale covers; 0 for all."""
        return self.group_size or self.form.scale_columns
