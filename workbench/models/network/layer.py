"""One decoder layer: attention and an MLP or experts, each behind a norm and beside a residual.

Shapes: S rows, D model.
"""

from __future__ import annotations

import torch
from torch import nn

from workbench.models.network.attention import Attention
from workbench.models.network.batch import Batch, LayerCache
from workbench.models.network.mla import LatentAttention
from workbench.models.network.mlp import MLP
from workbench.models.network.moe import MoE
from workbench.models.network.norm import RMSNorm
from workbench.models.network.rope import Rope, Turn


class DecoderLayer(nn.Module):
    """`x += attention(norm(x)); x += mlp(norm(x))`, the sums in the compute dtype.

    Attributes:
        attention_norm, attention, mlp_norm, mlp: its parts; `mlp` is an `MLP` or an `MoE`.
        rope: the network's, shared by all layers.
        index: of the layer.
        part: of the network, for profiles.
    """

    part = "layer"

    def __init__(
        self,
        attention_norm: RMSNorm,
        attention: Attention | LatentAttention,
        mlp_norm: RMSNorm,
        mlp: MLP | MoE,
        rope: Rope,
        index: int,
    ) -> None:
        super().__init__()
        self.attention_norm, self.attention = attention_norm, attention
        self.mlp_norm, self.mlp = mlp_norm, mlp
        self.rope = rope
        self.index = index

    def forward(self, x_SD: torch.Tensor, batch: Batch, cache: LayerCache, turn: Turn | None = None) -> torch.Tensor:
        """Return `[S, D]`; `x_SD` is not written to.

        Args:
            x_SD: in the compute dtype (float32 where the layer is upcast).
            batch: where the rows stand.
            cache: this layer's, in the dtype of `x_SD`.
            turn: what `rope` makes of the batch's positions, where it is known already.
        """
        turn = self.rope(batch.positions_S) if turn is None else turn
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
