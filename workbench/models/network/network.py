"""A whole decoder.

Shapes: S rows, B sequences, D model, V tokens of one rank's vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from workbench.models.network.batch import DECODE, Batch, Cache
from workbench.models.network.layer import DecoderLayer, Passed
from workbench.models.network.norm import ResidualNorm
from workbench.models.network.rope import Rope
from workbench.models.network.shapes import NetworkConfig


class Embedding(nn.Module):
    """Rows of a table.

    Attributes:
        weight: `[V, D]` in the compute dtype.
        wrap: whether tokens past the table begin again at its start: one rank of several has a share of the
            vocabulary only, and its rows stand for the others'.
        part: of the network, for profiles.
    """

    part = "embed"

    def __init__(self, weight_VD: torch.Tensor, *, wrap: bool) -> None:
        super().__init__()
        self.weight = weight_VD
        self.wrap = wrap

    def forward(self, token_ids_S: torch.Tensor) -> torch.Tensor:
        """Return `[S, D]`."""
        ids_S = token_ids_S % self.weight.shape[0] if self.wrap else token_ids_S
        return nn.functional.embedding(ids_S, self.weight)

    def tensors(self) -> list[torch.Tensor]:
        """What it holds."""
        return [self.weight]


class Head(nn.Module):
    """The output's matrix.

    Attributes:
        weight: `[V, D]` in the compute dtype; the embedding's where they are tied.
        part: of the network, for profiles.
    """

    part = "lm_head"

    def __init__(self, weight_VD: torch.Tensor) -> None:
        super().__init__()
        self.weight = weight_VD

    def forward(self, x_SD: torch.Tensor) -> torch.Tensor:
        """Float32 `[S, V]` of a product in the dtype of `x_SD`."""
        return nn.functional.linear(x_SD, self.weight.to(x_SD.dtype)).to(torch.float32)

    def tensors(self) -> list[torch.Tensor]:
        """What it holds."""
        return [self.weight]


class Network(nn.Module):
    """A decoder of one rank, for inference; build with `build_network`.

    Attributes:
        config: its numbers.
        embed, layers, norm, lm_head: its parts.
        mla_prefill, mla_decode: form of latent attention; `mla_decode` says what the cache keeps.
        quant: format of projections and experts.
        fused: whether small kernels between the products are fused, as `set_fused` says.
        dtype: of activations, embedding, norms and output.
        device: where it runs.
    """

    def __init__(
        self,
        config: NetworkConfig,
        embed: Embedding,
        layers: Sequence[DecoderLayer],
        norm: ResidualNorm,
        lm_head: Head,
        rope: Rope,
        *,
        quant: str,
        mla_prefill: str,
        mla_decode: str,
    ) -> None:
        super().__init__()
        self.config = config
        self.embed, self.norm, self.lm_head, self.rope = embed, norm, lm_head, rope
        self.layers = nn.ModuleList(layers)
        self.quant = quant
        self.fused = False
        self.mla_prefill, self.mla_decode = mla_prefill, mla_decode

    @property
    def dtype(self) -> torch.dtype:
        """Of the activations."""
        return self.embed.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self.embed.weight.device

    def forward(self, batch: Batch, cache: Cache) -> torch.Tensor:
        """Logits after the last row of each sequence: float32 `[B, V]`. Keys and values are kept in `cache`."""
        state = self._states(batch, cache)
        if batch.kind != DECODE:  # every row of a decode step is a last one
            state = state.rows(batch.last_S)
        if not self.fused:
            return self.logits(state.x_SD)
        logits_BV: torch.Tensor = self.lm_head(self.norm(*state).normed_SD)
        return logits_BV

    def hidden_states(self, batch: Batch, cache: Cache) -> torch.Tensor:
        """What the last layer gives for every row, before the final norm: `[S, D]`."""
        state = self._states(batch, cache)
        return state.sum_SD

    def _states(self, batch: Batch, cache: Cache) -> Passed:
        """The last layer's output; nothing is left to be added where layers are not fused."""
        x_SD: torch.Tensor = self.embed(batch.token_ids_S)
        turn = self.rope(batch.positions_S)
        state = Passed(x_SD, None, None)
        for layer, own in zip(self.layers, cache.layers, strict=True):
            if self.fused:
                state = layer(state.x_SD, batch, own, turn, state.delta_SD, state.also_SD)
            else:
                state = Passed(layer(state.x_SD, batch, own, turn), None, None)
        return state

    def logits(self, x_SD: torch.Tensor) -> torch.Tensor:
        """Final norm and output of any rows of `hidden_states`: float32 `[S, V]`."""
        normed = self.norm(x_SD)
        logits_SV: torch.Tensor = self.lm_head(normed.normed_SD if self.fused else normed)
        return logits_SV

    def exact_logits(self, x_SD: torch.Tensor) -> torch.Tensor:
        """The same in float32 from float32 rows, the output's matrix upcast for the length of the call."""
        return nn.functional.linear(self.norm.upcast()(x_SD), self.lm_head.weight.to(torch.float32))

    def set_fused(self, fused: bool) -> None:
        """Fuse what stands between the matrix products, or do not.

        That is norms with the sums before them, heads' norms, turns and writes to the cache, the gate's logits, gated
        products, and products with matrices of every head.
        """
        for module in self.modules():
            if hasattr(module, "fused"):
                setattr(module, "fused", fused)  # noqa: B010 - modules of several kinds have it

    @property
    def weight_bytes(self) -> int:
        """Bytes that all weights take, scales included, what is shared counted once."""
        held: dict[int, int] = {}
        for module in self.modules():
            for tensor in getattr(module, "tensors", list)():
                storage = tensor.untyped_storage()
                held[storage.data_ptr()] = storage.nbytes()
        return sum(held.values())
