"""The experts' weights.

Shapes: E experts, D model, F ffn.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_kernels.types import TORCH_DTYPE, Quant, parse_choice


@dataclass(frozen=True, eq=False)
class ExpertWeights:
    """Weights of all routed experts of a layer; build with ``from_dense``.

    Attributes:
        w1: ``[E, 2F, D]``, contiguous; gate rows first, then up rows.
        w2: ``[E, D, F]``, contiguous.
        quant: the format they are stored in.
    """

    w1: torch.Tensor
    w2: torch.Tensor
    quant: Quant

    @classmethod
    def from_dense(cls, w1_E2FD: torch.Tensor, w2_EDF: torch.Tensor, quant: str = "bf16") -> ExpertWeights:
        """Store dense weights as ``quant``.

        Args:
            w1_E2FD: ``[E, 2F, D]``, any floating dtype; gate rows first, then up rows; any F >= 1.
            w2_EDF: ``[E, D, F]``, any floating dtype, on the same device.
            quant: ``"bf16"``, ``"fp16"`` or ``"fp32"``. Values round to nearest; a value past the range of float16
                becomes infinite, as torch converts it.

        Raises:
            ValueError: shapes that do not fit together, tensors on different devices, an unknown ``quant``.
        """
        scheme = parse_choice(Quant, quant, "quant")
        if w1_E2FD.dim() != 3 or w2_EDF.dim() != 3 or not (w1_E2FD.is_floating_point() and w2_EDF.is_floating_point()):
            raise ValueError(
                "w1_E2FD and w2_EDF must be floating-point tensors of three dimensions; got "
                f"{w1_E2FD.dtype} {list(w1_E2FD.shape)} and {w2_EDF.dtype} {list(w2_EDF.shape)}."
            )
        num_experts, rows, hidden = w1_E2FD.shape
        if rows % 2 or min(num_experts, rows, hidden) < 1 or w2_EDF.shape != (num_experts, hidden, rows // 2):
            raise ValueError(
                "w1_E2FD must be [E, 2F, D] and w2_EDF [E, D, F] with E, D, F >= 1; got "
                f"{list(w1_E2FD.shape)} and {list(w2_EDF.shape)}."
            )
        if w1_E2FD.device != w2_EDF.device:
            raise ValueError(f"w1_E2FD and w2_EDF must be on one device; got {w1_E2FD.device} and {w2_EDF.device}.")
        dtype = TORCH_DTYPE[scheme]
        return cls(w1_E2FD.detach().to(dtype).contiguous(), w2_EDF.detach().to(dtype).contiguous(), scheme)

    def dequantize(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return float32 ``(w1 [E, 2F, D], w2 [E, D, F])`` with the values that the stored format holds."""
        return self.w1.to(torch.float32), self.w2.to(torch.float32)

    @property
    def num_experts(self) -> int:
        """E."""
        return self.w1.shape[0]

    @property
    def hidden_size(self) -> int:
        """D."""
        return self.w1.shape[2]

    @property
    def intermediate_size(self) -> int:
        """F."""
        return self.w2.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes that the weights take."""
        return self.w1.nbytes + self.w2.nbytes

    def to(self, device: torch.device | str) -> ExpertWeights:
        """Return the same weights on another device."""
        return ExpertWeights(self.w1.to(device), self.w2.to(device), self.quant)
