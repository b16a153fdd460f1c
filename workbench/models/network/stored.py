"""What a checkpoint on disk says of its tensors before any is read."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

import torch

from workbench.errors import InvalidInput
from workbench.models.network.tensors import TensorSource


class StoredTensors(TensorSource):
    """A checkpoint on disk. It gives the whole model's tensors; who builds from them cuts a rank's parts.

    Attributes:
        label: where it is, for sentences.
        kinds: number formats that it holds, as a sentence says them: `BF16, F8_E4M3`.
    """

    label: str
    kinds: str

    @abstractmethod
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor, from the headers alone; keys are `names()`."""

    @abstractmethod
    def faults(self) -> Mapping[str, str]:
        """Why a tensor cannot be read, by its name: a number format that is not known, a scale that is missing."""

    def names(self) -> frozenset[str]:
        """See the base class."""
        return frozenset(self.shapes())

    def finite(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """`tensor`. Raises `InvalidInput` where it holds NaN or infinity, which no trained weight is."""
        if not bool(torch.isfinite(tensor).all()):
            raise InvalidInput(f"model: every value of {name} of {self.label} must be finite; it is damaged")
        return tensor
