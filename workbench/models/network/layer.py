"""One decoder layer: attention and an MLP or experts, each behind a norm and beside a residual.

Shapes: S rows, D model.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from workbench.models.network.attention import Attention
from workbench.models.network.batch import Batch, LayerCache
from workbench.models.network.mla import LatentAttention
from workbench.models.network.mlp import MLP
from workbench.models.network.moe import MoE
from workbench.models.network.norm import ResidualNorm
from workbench.models.network.rope import Rope, Turn


class Passed(NamedTuple):
    """A layer's output, of which the last sums are still to be made: in the norm that comes next.

    Attributes:
        x_SD: the residual after attention.
        delta_SD: what the MLP gave, or the routed experts; None where nothing is left to be added.
        also_SD: what shared experts gave beside them; None where there are none.
    """

    x_SD: torch.Tensor  # noqa: N815
    delta_SD: torch.Tensor | None  # noqa: N815
    also_SD: torch.Tensor | None  # noqa: N815

    @property
    def sum_SD(self) -> torch.Tensor:  # noqa: N802
        """The output itself, each sum rounded."""
        if self.delta_SD is None:
            return self.x_SD
        return self.x_SD + (self.delta_SD if self.also_SD is None else self.delta_SD + self.also_SD)

    def rows(self, rows_B: torch.Tensor) -> Passed:
        """Only these rows."""
        x_BD, delta_BD, also_BD = (None if part is None else part[rows_B] for part in self)
        assert x_BD is not None
        return Passed(x_BD, delta_BD, also_BD)


class DecoderLayer(nn.Module):
    """`x += attention(norm(x)); x += mlp(norm(x))`, the sums in the compute dtype.

    Attributes:
        attention_norm, attention, mlp_norm, mlp: its parts; `mlp` is an `MLP` or an `MoE`.
        rope: the network's, shared by all layers.
        index: of the layer.
        fused: whether each sum is made in the norm after it, and the last is left to the next layer.
        part: of the network, for profiles.
    """

    part = "layer"
    fused = False

    def __init__(
        self,
        attention_norm: ResidualNorm,
        attention: Attention | LatentAttention,
        mlp_norm: ResidualNorm,
        mlp: MLP | MoE,
        rope: Rope,
        index: int,
    ) -> None:
        super().__init__()
        self.attention_norm, self.attention = attention_norm, attention
        self.mlp_norm, self.mlp = mlp_norm, mlp
        self.rope = rope
        self.index = index

    def forward(
        self,
        x_SD: torch.Tensor,
        batch: Batch,
        cache: LayerCache,
        turn: Turn | None = None,
        delta_SD: torch.Tensor | None = None,
        also_SD: torch.Tensor | None = None,
    ) -> Any:
        """Return `[S, D]`, or where fused a `Passed`, whose sum is that; `x_SD` is not written to.

        Args:
            x_SD: in the compute dtype (float32 where the layer is upcast).
            batch: where the rows stand.
            cache: this layer's, in the dtype of `x_SD`.
            turn: what `rope` makes of the batch's positions, where it is known already.
            delta_SD, also_SD: where fused, what the layer before leaves to be added; None for nothing.
        """
        turn = self.rope(batch.positions_S) if turn is None else turn
        if self.fused:
            x_SD, normed_SD = self.attention_norm(x_SD, delta_SD, also_SD)
            mixed_SD = self.attention(normed_SD, batch, cache, turn)
            x_SD, normed_SD = self.mlp_norm(x_SD, mixed_SD)
            made = self.mlp(normed_SD)
            return Passed(x_SD, *made) if isinstance(made, tuple) else Passed(x_SD, made, None)
        x_SD = x_SD + self.attention(self.attention_norm(x_SD), batch, cache, turn)
        out_SD: torch.Tensor = x_SD + self.mlp(self.mlp_norm(x_SD))
        return out_SD

    def upcast(self) -> DecoderLayer:
        """The same layer in float32 by plain code, from the same weights, dequantised as they are used.

        Activations are not quantised. It needs an input and a cache in float32 (`LayerCache.upcast`), and of memory
        one matrix or one expert in float32 at a time.
        """
        return DecoderLayer(
            self.attention_norm.upcast(),
            self.attention.upcast(),
            self.mlp_norm.upcast(),
            self.mlp.upcast(),
            self.rope,
            self.index,
        )
