"""The gated MLP.

Shapes: S rows, D model, F channels of one rank.
"""

from __future__ import annotations

import torch
from moe_kernels.step.rows import silu_mul
from torch import nn

from workbench.models.network.linear import Linear


class MLP(nn.Module):
    """`down . (silu(gate . x) * (up . x))`, the product rounded to the compute dtype.

    Attributes:
        gate_up: gate rows first, then up rows: `[2 F, D]`.
        down: `[D, F]`.
        fused: whether the gated product is one kernel.
        part: of the network, for profiles.
    """

    part = "mlp"
    fused = False

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        super().__init__()
        self.gate_up, self.down = gate_up, down

    def forward(self, x_SD: torch.Tensor) -> torch.Tensor:
        """Return `[S, D]`: a rank's share of the sum."""
        if self.fused:
            fused_SD: torch.Tensor = self.down(silu_mul(self.gate_up(x_SD)))
            return fused_SD
        gate_SF, up_SF = self.gate_up(x_SD).chunk(2, dim=-1)
        out_SD: torch.Tensor = self.down(nn.functional.silu(gate_SF) * up_SF)
        return out_SD

    def upcast(self) -> MLP:
        """The same in float32; it holds the same weights."""
        return MLP(self.gate_up.upcast(), self.down.upcast())
