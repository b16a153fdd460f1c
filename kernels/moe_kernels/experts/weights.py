"""The experts' weights.

Shapes: E experts, D model, F ffn; NB and KB scales along the rows and columns of a matrix.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from moe_kernels.formats import FORMATS, GROUP_SIZES, MXFP4_LIMIT
from moe_kernels.quant.weights import Stored, dequantize_matrix, quantize_matrix
from moe_kernels.types import DTYPE_NAME, TORCH_DTYPE, Quant, parse_choice


@dataclass(frozen=True, eq=False, kw_only=True)
class ExpertWeights:
    """Weights of all experts of a layer; build with ``from_dense`` or ``from_experts``.

    Gate and up are two matrices ``[F, D]`` with scales of their own, down is one ``[D, F]``. Scales of a matrix
    ``[N, K]`` are ``[NB, KB]``: ``[1, 1]`` (fp8_tensor), ``[N, 1]`` (fp8_channel, int8, int8_weight) or
    ``[ceil(N/128), ceil(K/128)]`` (fp8_block) in float32; ``[N, ceil(K/group_size)]`` in ``dtype`` (int4);
    ``[N, 2*ceil(K/32)]`` e4m3 (nvfp4); ``[N, ceil(K/32)]`` uint8, the exponent e8m0 (mxfp4).

    Attributes:
        w1: ``[E, 2F, D]``, contiguous; gate rows first, then up rows. Four-bit formats: uint8
            ``[E, 2F, 16*ceil(D/32)]``, packed as ``quant.pack`` says.
        w2: ``[E, D, F]``, contiguous; four-bit formats: uint8 ``[E, D, 16*ceil(F/32)]``.
        quant: the format they are stored in.
        dtype: of the activations and the result.
        hidden_size: D.
        intermediate_size: F.
        w1_scale: ``[E, 2, NB, KB]``; None where the format has none, as for the other scales.
        w2_scale: ``[E, NB, KB]``.
        w1_zero, w2_zero: int4 with zero points: uint8, shaped as the scales.
        w1_global: nvfp4: float32 ``[E, 2]``, of gate and of up.
        w2_global: nvfp4: float32 ``[E]``.
        x_scale, h_scale: fp8_tensor with static activation scales: float32 ``[1]``; None where they are dynamic.
        group_size: columns of one int4 scale; 0 for other formats.
        num_shared: how many of the E experts, the last ones, are shared: every token passes them with weight 1.
    """

    w1: torch.Tensor
    w2: torch.Tensor
    quant: Quant
    dtype: torch.dtype
    hidden_size: int
    intermediate_size: int
    w1_scale: torch.Tensor | None = None
    w2_scale: torch.Tensor | None = None
    w1_zero: torch.Tensor | None = None
    w2_zero: torch.Tensor | None = None
    w1_global: torch.Tensor | None = None
    w2_global: torch.Tensor | None = None
    x_scale: torch.Tensor | None = None
    h_scale: torch.Tensor | None = None
    group_size: int = 0
    num_shared: int = 0

    @classmethod
    def from_dense(
        cls,
        w1_E2FD: torch.Tensor,
        w2_EDF: torch.Tensor,
        quant: str = "bf16",
        *,
        dtype: torch.dtype | None = None,
        group_size: int = 128,
        zero_points: bool = False,
        x_scale: float | torch.Tensor | None = None,
        h_scale: float | torch.Tensor | None = None,
    ) -> ExpertWeights:
        """Store dense weights as ``quant``.

        Args:
            w1_E2FD: ``[E, 2F, D]``, any floating dtype; gate rows first, then up rows; any F >= 1.
            w2_EDF: ``[E, D, F]``, any floating dtype, on the same device.
            quant: a format's name; `moe_kernels.formats` describes them. Plain ones round to nearest; a value past the
                range of float16 becomes infinite, as torch converts it.
            dtype: of activations and result beside a quantised format: bfloat16 (default), float16 or float32.
            group_size: columns of one int4 scale: 32, 64 or 128; other formats leave it unread.
            zero_points: int4 with a zero of its own for every scale; False for other formats.
            x_scale: fp8_tensor: static scale of the activations before gate and up; None for a dynamic one.
            h_scale: the same before down; given exactly when ``x_scale`` is.

        Raises:
            ValueError: shapes that do not fit together, tensors on different devices, an unknown ``quant``, options
                that the format does not have, values to be quantised that are not finite, or for mxfp4 2^24 and more.
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
        _int4_options(scheme, group_size, zero_points)
        if not FORMATS[scheme].quantized:
            own = _dtype_of(scheme, dtype)
            _no_scales(scheme, x_scale, h_scale)
            return cls(
                w1=w1_E2FD.detach().to(own).contiguous(),
                w2=w2_EDF.detach().to(own).contiguous(),
                quant=scheme,
                dtype=own,
                hidden_size=hidden,
                intermediate_size=rows // 2,
            )
        return cls.from_experts(
            zip(w1_E2FD.detach(), w2_EDF.detach(), strict=True),
            num_experts,
            quant,
            dtype=dtype,
            group_size=group_size,
            zero_points=zero_points,
            x_scale=x_scale,
            h_scale=h_scale,
        )

    @classmethod
    def from_experts(
        cls,
        experts: Iterable[tuple[torch.Tensor, torch.Tensor]],
        num_experts: int,
        quant: str = "bf16",
        *,
        dtype: torch.dtype | None = None,
        group_size: int = 128,
        zero_points: bool = False,
        x_scale: float | torch.Tensor | None = None,
        h_scale: float | torch.Tensor | None = None,
    ) -> ExpertWeights:
        """Store experts that come one by one, so that the peak is the result and one of them.

        Args:
            experts: ``num_experts`` pairs ``(w1 [2F, D], w2 [D, F])``, all of one shape and device.
            num_experts: E.

        The other arguments and errors are those of ``from_dense``.
        """
        scheme = parse_choice(Quant, quant, "quant")
        own = _dtype_of(scheme, dtype)
        options = _int4_options(scheme, group_size, zero_points)
        _no_scales(scheme, x_scale, h_scale)
        tensors: dict[str, Any] = {}
        count = hidden = ffn = 0
        for index, (w1_2FD, w2_DF) in enumerate(experts):
            if index >= num_experts:
                raise ValueError(f"experts must be {num_experts}, as num_experts says; got more.")
            if index == 0:
                (ffn, hidden), device = (w1_2FD.shape[0] // 2, w1_2FD.shape[1]), w1_2FD.device
            if w1_2FD.shape != (2 * ffn, hidden) or w2_DF.shape != (hidden, ffn) or min(hidden, ffn) < 1:
                raise ValueError(
                    f"expert {index} must have w1 [{2 * ffn}, {hidden}] and w2 [{hidden}, {ffn}]; got "
                    f"{list(w1_2FD.shape)} and {list(w2_DF.shape)}."
                )
            for name, part in _store_expert(w1_2FD.detach(), w2_DF.detach(), scheme, own, index, **options).items():
                if index == 0:
                    tensors[name] = torch.empty(num_experts, *part.shape, dtype=part.dtype, device=device)
                _bytes(tensors[name][index]).copy_(_bytes(part))
            count = index + 1
        if count != num_experts or count == 0:
            raise ValueError(f"experts must be {num_experts}, as num_experts says, and at least 1; got {count}.")
        given = {"x_scale": x_scale, "h_scale": h_scale}
        static: dict[str, Any] = {
            name: torch.as_tensor(value, dtype=torch.float32, device=device).reshape(1).clone()
            for name, value in given.items()
            if value is not None
        }
        for name, value in static.items():
            if not bool(torch.isfinite(value).all() & (value > 0).all()):
                raise ValueError(f"{name} must be a finite number above 0; got {value.item()}.")
        return cls(
            quant=scheme,
            dtype=own,
            hidden_size=hidden,
            intermediate_size=ffn,
            group_size=group_size if scheme is Quant.INT4 else 0,
            **tensors,
            **static,
        )

    def dequantize(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return float32 ``(w1 [E, 2F, D], w2 [E, D, F])`` with the values that the stored format holds."""
        return self._dequantize(slice(None))

    def dequantize_expert(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return float32 ``(w1 [2F, D], w2 [D, F])`` of one expert."""
        return self._dequantize(index)

    def _dequantize(self, at: int | slice) -> tuple[torch.Tensor, torch.Tensor]:
        if not FORMATS[self.quant].quantized:
            return self.w1[at].to(torch.float32), self.w2[at].to(torch.float32)

        def part(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor[at]

        ffn = self.intermediate_size
        assert self.w1_scale is not None
        assert self.w2_scale is not None
        gate_up = Stored(
            self.w1[at].unflatten(-2, (2, ffn)), self.w1_scale[at], part(self.w1_zero), part(self.w1_global)
        )
        down = Stored(self.w2[at], self.w2_scale[at], part(self.w2_zero), part(self.w2_global))
        return (
            dequantize_matrix(gate_up, self.quant, self.hidden_size, self.group_size).flatten(-3, -2),
            dequantize_matrix(down, self.quant, ffn, self.group_size),
        )

    @property
    def num_experts(self) -> int:
        """E, shared experts included."""
        return self.w1.shape[0]

    @property
    def num_routed(self) -> int:
        """Experts that a routing names."""
        return self.num_experts - self.num_shared

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that there are, by attribute name."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in named.items() if isinstance(value, torch.Tensor)}

    @property
    def nbytes(self) -> int:
        """Bytes that the weights take, scales included."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def to(self, device: torch.device | str) -> ExpertWeights:
        """Return the same weights on another device."""
        moved: dict[str, Any] = {name: tensor.to(device) for name, tensor in self.tensors().items()}
        return replace(self, **moved)

    def with_shared(self, shared: ExpertWeights) -> ExpertWeights:
        """Return these experts with ``shared`` behind them, which every token then passes with weight 1.

        Raises:
            ValueError: ``shared`` has another format, dtype or size; give it apart, as ``fused_experts(shared=...)``.
        """
        for name in ("quant", "dtype", "hidden_size", "intermediate_size", "group_size"):
            if getattr(shared, name) != getattr(self, name):
                raise ValueError(
                    f"{name} of shared must be that of the routed experts, {getattr(self, name)}, not "
                    f"{getattr(shared, name)}; give other shared experts apart, as fused_experts(shared=...)."
                )
        mine, theirs = self.tensors(), shared.tensors()
        whole = ("x_scale", "h_scale")
        if mine.keys() != theirs.keys() or any(n in mine and not torch.equal(mine[n], theirs[n]) for n in whole):
            raise ValueError("shared must have zero points and static scales where the routed experts have them.")
        joined: dict[str, Any] = {n: t if n in whole else _join(t, theirs[n]) for n, t in mine.items()}
        return replace(self, **joined, num_shared=self.num_shared + shared.num_experts)


def _store_expert(
    w1_2FD: torch.Tensor,
    w2_DF: torch.Tensor,
    scheme: Quant,
    dtype: torch.dtype,
    index: int,
    group_size: int,
    zero_points: bool,
) -> dict[str, torch.Tensor]:
    """One expert's tensors by the attribute that they are a row of."""
    if not FORMATS[scheme].quantized:
        return {"w1": w1_2FD.to(dtype), "w2": w2_DF.to(dtype)}
    w1_2FD, w2_DF = w1_2FD.to(torch.float32), w2_DF.to(torch.float32)
    for name, tensor in (("w1", w1_2FD), ("w2", w2_DF)):
        if not bool(torch.isfinite(tensor).all()):
            raise ValueError(
                f"{name} of expert {index} must hold finite values to be quantised; it holds NaN or infinity."
            )
        if scheme is Quant.MXFP4 and float(tensor.abs().amax()) >= MXFP4_LIMIT:
            raise ValueError(f"{name} of expert {index} must stay below 2^24 in magnitude for mxfp4.")
    gate, up, down = (
        quantize_matrix(part, scheme, dtype, group_size, zero_points) for part in (*w1_2FD.chunk(2), w2_DF)
    )
    stored = {
        "w1": torch.cat([_bytes(gate.data), _bytes(up.data)]).view(gate.data.dtype),
        "w2": down.data,
        "w1_scale": torch.stack([_bytes(gate.scale), _bytes(up.scale)]).view(gate.scale.dtype),
        "w2_scale": down.scale,
    }
    if gate.zero is not None and up.zero is not None and down.zero is not None:
        stored |= {"w1_zero": torch.stack([gate.zero, up.zero]), "w2_zero": down.zero}
    if gate.whole is not None and up.whole is not None and down.whole is not None:
        stored |= {"w1_global": torch.stack([gate.whole, up.whole]), "w2_global": down.whole}
    return stored


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A view that every operation knows: eight-bit floats have few of them."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def _join(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return torch.cat([_bytes(first), _bytes(second)]).view(first.dtype)


def _dtype_of(scheme: Quant, dtype: torch.dtype | None) -> torch.dtype:
    if not FORMATS[scheme].quantized:
        own = TORCH_DTYPE[scheme]
        if dtype not in (None, own):
            raise ValueError(f"dtype must be None or {own} for {scheme.value}; got {dtype}.")
        return own
    if dtype is not None and dtype not in DTYPE_NAME:
        raise ValueError(f"dtype must be one of {', '.join(map(str, DTYPE_NAME))}; got {dtype}.")
    return torch.bfloat16 if dtype is None else dtype


def _int4_options(scheme: Quant, group_size: int, zero_points: bool) -> dict[str, Any]:
    if scheme is Quant.INT4 and group_size not in GROUP_SIZES:
        raise ValueError(f"group_size must be one of {', '.join(map(str, GROUP_SIZES))}; got {group_size!r}.")
    if zero_points and scheme is not Quant.INT4:
        raise ValueError(f"zero_points must be False for {scheme.value}; int4 alone has them.")
    return {"group_size": group_size, "zero_points": zero_points}


def _no_scales(scheme: Quant, x_scale: object, h_scale: object) -> None:
    if (x_scale is None) != (h_scale is None):
        raise ValueError("x_scale and h_scale must be given together.")
    if x_scale is not None and scheme is not Quant.FP8_TENSOR:
        raise ValueError(f"x_scale and h_scale must be None for {scheme.value}; fp8_tensor alone has static scales.")
