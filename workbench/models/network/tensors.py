"""Where a network's tensors come from, one at a time; the random ones.

Shapes: C experts of a stack, D model, F channels of an expert on one rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from math import sqrt

import torch

from workbench.models.network.memory import stacked_experts
from workbench.models.network.names import EMBED, expected_tensors, expert_names, rank_tensors
from workbench.models.network.shapes import NetworkConfig
from workbench.models.seeding import generator

__all__ = ["RandomTensors", "TensorSource", "expected_tensors"]

# Sigmoids of a random gate's logits deviate by 0.2; a bias of a tenth of that changes choices and leaves no expert out.
_CORRECTION_DEVIATION = 0.02
_BIAS_DEVIATION = 0.1
_NORM_DEVIATION = 0.1
# Attention averages: at full size, what all tokens have in common grows from layer to layer, until all of them choose
# the same experts.
_ATTENTION_OUTPUT = 0.25


class TensorSource(ABC):
    """Tensors of a checkpoint by their names on the Hugging Face hub.

    Attributes:
        quantized: whether the checkpoint stores quantised weights, which `get` gives dequantised.
        sharded: whether `get` gives one rank's parts; else the whole model's, which are cut by who builds from them.
    """

    quantized: bool = False
    sharded: bool = False

    @abstractmethod
    def names(self) -> frozenset[str]:
        """Every tensor that there is."""

    @abstractmethod
    def get(self, name: str) -> torch.Tensor:
        """One tensor on the source's device, in the floating dtype of the checkpoint or float32.

        Raises:
            KeyError: there is no such tensor.
        """

    def expert_stacks(self, layer: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]] | None:
        """The routed experts of a sparse layer in their order, several at once, where that is the faster way.

        Returns:
            Stacks `(w1 [C, 2F, D], w2 [C, D, F])` of what `get` gives, gate rows before up rows; None where `get` must
            be asked for each matrix.
        """
        return None


class RandomTensors(TensorSource):
    """Seeded random tensors of a configuration's names, made on the device when asked for.

    Matrices are normal with deviation `1 / sqrt(fan_in)` (attention's output a quarter of that), norms near 1: what
    goes through them keeps its size at any depth, and tokens stay unlike enough to choose all experts. Made in
    bfloat16, as checkpoints are stored, whatever they are run in: so every format quantises the same model. CUDA's
    numbers differ from the CPU's for the same seed.
    """

    sharded = True

    def __init__(
        self, config: NetworkConfig, device: torch.device, seed: int, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        self._config = config
        self._shapes = rank_tensors(config)
        self._experts = {
            name: (layer, expert, part)
            for layer in range(config.num_layers)
            if config.moe is not None and config.is_moe_layer(layer)
            for expert in range(config.moe.num_experts)
            for part, name in enumerate(expert_names(config, layer, expert))
        }
        self._device = device
        self._seed = seed
        self._dtype = dtype

    def names(self) -> frozenset[str]:
        """See the base class."""
        return frozenset(self._shapes)

    def get(self, name: str) -> torch.Tensor:
        """See the base class; a rank's part, the same at every call. An expert's matrix is cut from its whole stack."""
        shape = self._shapes[name]
        if name in self._experts:
            layer, expert, part = self._experts[name]
            size = stacked_experts(self._config)
            w1_C2FD, w2_CDF = self._stack(layer, expert // size * size)
            w1_2FD, w2_DF = w1_C2FD[expert % size], w2_CDF[expert % size]
            return (*w1_2FD.chunk(2), w2_DF)[part].clone()
        made = self._normal(shape, _deviation(name, shape, tied=self._config.tie_embeddings), name)
        return made.add_(1.0) if name.endswith("norm.weight") else made

    def expert_stacks(self, layer: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """See the base class; one stack is held at a time by who drops the last."""
        moe = self._config.moe
        assert moe is not None
        for first in range(0, moe.num_experts, stacked_experts(self._config)):
            yield self._stack(layer, first)

    def _stack(self, layer: int, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Experts from `first` on, as many as are made at once."""
        moe = self._config.moe
        assert moe is not None
        count = min(stacked_experts(self._config), moe.num_experts - first)
        gate, _, down = expert_names(self._config, layer, first)
        channels, hidden = self._shapes[gate]
        return (
            self._normal((count, 2 * channels, hidden), 1.0 / sqrt(hidden), gate),
            self._normal((count, hidden, channels), 1.0 / sqrt(channels), down),
        )

    def _normal(self, shape: tuple[int, ...], deviation: float, name: str) -> torch.Tensor:
        source = generator(self._seed, name, device=self._device)
        return torch.randn(shape, generator=source, device=self._device, dtype=self._dtype).mul_(deviation)


def _deviation(name: str, shape: tuple[int, ...], *, tied: bool) -> float:
    if name.endswith("norm.weight"):
        return _NORM_DEVIATION
    if name.endswith("correction_bias"):
        return _CORRECTION_DEVIATION
    if name.endswith(".bias"):
        return _BIAS_DEVIATION
    if name == EMBED:
        # Tied, it makes the logits too, which deviate by sqrt(D) times as much as its numbers.
        return 1.0 / sqrt(sqrt(shape[1])) if tied else 1.0
    return (_ATTENTION_OUTPUT if name.endswith("o_proj.weight") else 1.0) / sqrt(shape[1])
