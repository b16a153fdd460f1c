"""Where a network's tensors come from, one at a time; the random ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import sqrt

import torch

from workbench.models.network.names import EMBED, expected_tensors, rank_tensors
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


class RandomTensors(TensorSource):
    """Seeded random tensors of a configuration's names, each made on the device when asked for.

    Matrices are normal with deviation `1 / sqrt(fan_in)` (attention's output a quarter of that), norms near 1: what
    goes through them keeps its size at any depth, and tokens stay unlike enough to choose all experts. Made in
    bfloat16, as checkpoints are stored, whatever they are run in: so every format quantises the same model. CUDA's
    numbers differ from the CPU's for the same seed.
    """

    sharded = True

    def __init__(
        self, config: NetworkConfig, device: torch.device, seed: int, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        self._shapes = rank_tensors(config)
        self._tied = config.tie_embeddings
        self._device = device
        self._seed = seed
        self._dtype = dtype

    def names(self) -> frozenset[str]:
        """See the base class."""
        return frozenset(self._shapes)

    def get(self, name: str) -> torch.Tensor:
        """See the base class; a rank's part, the same at every call."""
        shape = self._shapes[name]
        source = generator(self._seed, name, device=self._device)
        made = torch.randn(shape, generator=source, device=self._device, dtype=self._dtype)
        made.mul_(self._deviation(name, shape))
        return made.add_(1.0) if name.endswith("norm.weight") else made

    def _deviation(self, name: str, shape: tuple[int, ...]) -> float:
        if name.endswith("norm.weight"):
            return _NORM_DEVIATION
        if name.endswith("correction_bias"):
            return _CORRECTION_DEVIATION
        if name.endswith(".bias"):
            return _BIAS_DEVIATION
        if name == EMBED:
            # Tied, it makes the logits too, which deviate by sqrt(D) times as much as its numbers.
            return 1.0 / sqrt(sqrt(shape[1])) if self._tied else 1.0
        return (_ATTENTION_OUTPUT if name.endswith("o_proj.weight") else 1.0) / sqrt(shape[1])
