"""The weights of one linear layer.

Shapes: N outputs, K inputs; NB and KB scales along the rows and columns of the matrix.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from moe_kernels.formats import FORMATS, GROUP_SIZES, MXFP4_LIMIT
from moe_kernels.quant.weights import Stored, dequantize_matrix, quantize_matrix
from moe_kernels.types import DTYPE_NAME, TORCH_DTYPE, Quant, parse_choice


@dataclass(frozen=True, eq=False, kw_only=True)
class LinearWeights:
    """A matrix ``[N, K]`` in one of the weight formats; build with ``from_dense``.

    Scales are ``[NB, KB]``, as those of one matrix of ``ExpertWeights``, in float32 ``[1, 1]`` (fp8_tensor), ``[N, 1]``
    (fp8_channel, int8, int8_weight) or ``[ceil(N/128), ceil(K/128)]`` (fp8_block); in the dtype given to ``from_dense``
    ``[N, ceil(K/group_size)]`` (int4); in e4m3 ``[N, 2*ceil(K/32)]`` (nvfp4); in uint8, the exponent e8m0,
    ``[N, ceil(K/32)]`` (mxfp4).

    ``dataclasses.replace(weights, dtype=torch.float32)`` keeps what is stored and asks for activations and a result in
    float32: with ``impl="reference"`` the oracle of the same layer.

    Attributes:
        w: ``[N, K]``, contiguous; four-bit formats: uint8 ``[N, 16*ceil(K/32)]``, packed as ``quant.pack`` says.
        quant: the format it is stored in.
        dtype: of the activations and the result.
        N: outputs.
        K: inputs.
        scale: ``[NB, KB]``; None where the format has none, as for the other scales.
        zero: int4 with zero points: uint8, shaped as ``scale``.
        global_scale: nvfp4: float32, of no dimension.
        group_size: columns of one int4 scale; 0 for other formats.
    """

    w: torch.Tensor
    quant: Quant
    dtype: torch.dtype
    N: int
    K: int
    scale: torch.Tensor | None = None
    zero: torch.Tensor | None = None
    global_scale: torch.Tensor | None = None
    group_size: int = 0

    @classmethod
    def from_dense(
        cls,
        w_NK: torch.Tensor,
        quant: str = "bf16",
        *,
        dtype: torch.dtype | None = None,
        group_size: int = 128,
        zero_points: bool = False,
    ) -> LinearWeights:
        """Store a dense matrix as ``quant``.

        Args:
            w_NK: ``[N, K]`` with N, K >= 1, any floating dtype.
            quant: a format's name; `moe_kernels.formats` describes them. Plain ones round to nearest; a value past the
                range of float16 becomes infinite, as torch converts it.
            dtype: of activations and result beside a quantised format: bfloat16 (default), float16 or float32.
            group_size: columns of one int4 scale: 32, 64 or 128; other formats leave it unread.
            zero_points: int4 with a zero of its own for every scale; False for other formats.

        Raises:
            ValueError: a tensor of another shape or dtype, an unknown ``quant``, options that the format does not have,
                values to be quantised that are not finite, or for mxfp4 2^24 and more.
        """
        scheme = parse_choice(Quant, quant, "quant")
        if w_NK.dim() != 2 or not w_NK.is_floating_point() or min(w_NK.shape) < 1:
            raise ValueError(
                f"w_NK must be a floating-point tensor [N, K] with N, K >= 1; got {w_NK.dtype} {list(w_NK.shape)}."
            )
        if scheme is Quant.INT4 and group_size not in GROUP_SIZES:
            raise ValueError(f"group_size must be one of {', '.join(map(str, GROUP_SIZES))}; got {group_size!r}.")
        if zero_points and scheme is not Quant.INT4:
            raise ValueError(f"zero_points must be False for {scheme.value}; int4 alone has them.")
        rows, columns = w_NK.shape
        w_NK = w_NK.detach()
        if not FORMATS[scheme].quantized:
            own = TORCH_DTYPE[scheme]
            if dtype not in (None, own):
                raise ValueError(f"dtype must be None or {own} for {scheme.value}; got {dtype}.")
            return cls(w=w_NK.to(own).contiguous(), quant=scheme, dtype=own, N=rows, K=columns)
        if dtype is not None and dtype not in DTYPE_NAME:
            raise ValueError(f"dtype must be one of {', '.join(map(str, DTYPE_NAME))}; got {dtype}.")
        own = torch.bfloat16 if dtype is None else dtype
        w_NK = w_NK.to(torch.float32)
        if not bool(torch.isfinite(w_NK).all()):
            raise ValueError("w_NK must hold finite values to be quantised; it holds NaN or infinity.")
        if scheme is Quant.MXFP4 and float(w_NK.abs().amax()) >= MXFP4_LIMIT:
            raise ValueError("w_NK must stay below 2^24 in magnitude for mxfp4.")
        stored = quantize_matrix(w_NK, scheme, own, group_size, zero_points)
        return cls(
            w=stored.data,
            quant=scheme,
            dtype=own,
            N=rows,
            K=columns,
            scale=stored.scale,
            zero=stored.zero,
            global_scale=stored.whole,
            group_size=group_size if scheme is Quant.INT4 else 0,
        )

    def dequantize(self) -> torch.Tensor:
        """Return float32 ``[N, K]`` with the values that the stored format holds."""
        if self.scale is None:
            return self.w.to(torch.float32)
        stored = Stored(self.w, self.scale, self.zero, self.global_scale)
        return dequantize_matrix(stored, self.quant, self.K, self.group_size)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that there are, by attribute name."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in named.items() if isinstance(value, torch.Tensor)}

    @property
    def nbytes(self) -> int:
        """Bytes that the weights take, scales included."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def to(self, device: torch.device | str) -> LinearWeights:
        """Return the same weights on another device."""
        moved: dict[str, Any] = {name: tensor.to(device) for name, tensor in self.tensors().items()}
        return replace(self, **moved)
