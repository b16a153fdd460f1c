"""What each implementation of ``linear`` runs, by name and number alone: torch is not imported here."""

from __future__ import annotations

from enum import StrEnum

from moe_kernels.experts.rules import TRITON_INSTALLED, TRITON_INTERPRETED
from moe_kernels.formats import FORMATS
from moe_kernels.names import Quant

# From so many tokens on torch's fp8 product is at least as fast as the Triton kernels.
SCALED_MM_TOKENS = 64
SCALED_MM_FORMATS = (Quant.FP8_TENSOR, Quant.FP8_CHANNEL)
_QUANTS = tuple(member.value for member in Quant)
_DTYPES = (Quant.FP32.value, Quant.BF16.value, Quant.FP16.value)


class LinearImpl(StrEnum):
    """Implementations of ``linear``."""

    REFERENCE = "reference"
    TORCH = "torch"
    TRITON = "triton"


def linear_preference(device_type: str, quant: str, num_tokens: int) -> tuple[str, ...]:
    """Names in the order in which ``impl=None`` asks them; the first that runs is taken."""
    scheme = Quant(quant)
    if not FORMATS[scheme].quantized:
        return ("torch", "reference")
    if device_type != "cuda":
        return ("reference",)
    if scheme in SCALED_MM_FORMATS and num_tokens >= SCALED_MM_TOKENS:
        return ("torch", "triton", "reference")
    return ("triton", "reference")


def linear_reasons(
    impl: str,
    device_type: str,
    *,
    quant: str,
    dtype: str,
    outputs: int,
    inputs: int,
    capability: tuple[int, int] | None = None,
) -> list[str]:
    """Why ``linear(impl=impl)`` would not run, as sentences; an empty list means that it runs.

    Args:
        impl: ``"reference"``, ``"torch"`` or ``"triton"``.
        device_type: ``"cpu"``, ``"cuda"``, ...
        quant: format of the weights.
        dtype: of activations and result: ``"fp32"``, ``"bf16"`` or ``"fp16"``.
        outputs, inputs: N and K.
        capability: the device's compute capability, (9, 0) for Hopper; None leaves rules about it out.

    Raises:
        ValueError: ``impl`` is not one of the three.
    """
    if impl not in ("reference", "torch", "triton"):
        raise ValueError(f"impl must be one of reference, torch, triton; got {impl!r}.")
    if quant not in _QUANTS:
        return [f"{impl} computes in {', '.join(_QUANTS)}, not {quant}."]
    if dtype not in _DTYPES:
        return [f"{impl} computes in {', '.join(_DTYPES)}, not {dtype}."]
    scheme = Quant(quant)
    if impl == "reference":
        return []
    if impl == "torch":
        return _torch(device_type, scheme, dtype, outputs, inputs, capability)
    return _triton(device_type, scheme, dtype, capability)


def _torch(
    device_type: str, scheme: Quant, dtype: str, outputs: int, inputs: int, capability: tuple[int, int] | None
) -> list[str]:
    if not FORMATS[scheme].quantized:
        if dtype != scheme.value:
            return [f"torch multiplies {scheme.value} weights with {scheme.value} activations, not {dtype}."]
        return []
    if scheme not in SCALED_MM_FORMATS:
        return [f"torch multiplies plain weights, fp8_tensor and fp8_channel, not {scheme.value}."]
    if device_type != "cuda":
        return [f"torch's fp8 product is for cuda here, not {device_type}."]
    reasons = []
    for name, size in (("N", outputs), ("K", inputs)):
        if size % 16:
            reasons.append(f"torch's fp8 product needs multiples of 16; {name} is {size}.")
    if scheme is Quant.FP8_CHANNEL and dtype != Quant.BF16.value:
        reasons.append(f"torch's fp8 product with a scale a row gives bf16 only, not {dtype}.")
    if capability is not None and capability < (8, 9):
        major, minor = capability
        reasons.append(f"torch's fp8 product needs compute capability 8.9; this device has {major}.{minor}.")
    return reasons


def _triton(device_type: str, scheme: Quant, dtype: str, capability: tuple[int, int] | None) -> list[str]:
    if not TRITON_INSTALLED:
        return ["triton is not installed."]
    if TRITON_INTERPRETED:
        if dtype == Quant.BF16.value:
            return ["Triton's interpreter multiplies bf16 matrices wrongly; use fp32 or fp16 with it."]
        return []
    if device_type != "cuda":
        return [f"Triton kernels run on cuda, not {device_type}."]
    form = FORMATS[scheme]
    least = (8, 9) if form.activation == "fp8" or scheme is Quant.NVFP4 else (8, 0)
    if capability is not None and capability < least:
        have = f"{capability[0]}.{capability[1]}"
        return [f"{scheme.value} needs compute capability {least[0]}.{least[1]}; this device has {have}."]
    return []
