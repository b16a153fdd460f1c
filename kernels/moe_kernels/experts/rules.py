"""What each built-in implementation of ``fused_experts`` runs, by name and number alone: torch is not imported here."""

from __future__ import annotations

import importlib.util
import os

from moe_kernels.formats import FORMATS, NATIVE_FP4
from moe_kernels.names import Impl, Quant

REFERENCE_COMPILE_MAX_EXPERTS = 64
# Major compute capabilities whose tensor cores multiply FP4 with its scales.
FP4_UNITS = (10, 12)
TRITON_INSTALLED = importlib.util.find_spec("triton") is not None
# Triton reads the variable when it is first imported; so does this module.
TRITON_INTERPRETED = TRITON_INSTALLED and os.environ.get("TRITON_INTERPRET", "0") == "1"
_DTYPES = (Quant.FP32.value, Quant.BF16.value, Quant.FP16.value)
_BYTES = {Quant.FP32.value: 4, Quant.BF16.value: 2, Quant.FP16.value: 2}


def builtin_reasons(
    name: str,
    device_type: str,
    quant: str,
    num_experts: int,
    hidden_size: int,
    intermediate_size: int,
    compile: bool,
    graph: bool,
    capability: tuple[int, int] | None = None,
    *,
    dtype: str = "bf16",
    device_name: str = "",
) -> list[str]:
    """Why the built-in implementation ``name`` would not run, as sentences; plain enough to be traced.

    ``quant`` is the format of the weights, ``dtype`` that of the activations beside a quantised one. ``capability`` is
    the device's compute capability, (9, 0) for Hopper; None leaves rules about it out. ``device_name``
    is what a sentence calls the device.
    """
    if quant not in [member.value for member in Quant]:
        return [f"{name} computes in {', '.join(member.value for member in Quant)}, not {quant}."]
    scheme = Quant(quant)
    if not FORMATS[scheme].quantized:
        dtype = quant
    if dtype not in _DTYPES:
        return [f"{name} computes in {', '.join(_DTYPES)}, not {dtype}."]
    if name == Impl.REFERENCE.value:
        return _reference(num_experts, compile, graph)
    if name == Impl.TORCH_GROUPED_MM.value:
        if FORMATS[scheme].quantized:
            return [f"torch's grouped_mm is wired for unquantised weights only, not {quant}."]
        return _grouped(device_type, dtype, hidden_size, intermediate_size, compile, capability)
    if name == Impl.TRITON_FP4.value:
        return _fp4(device_type, scheme, capability, device_name)
    return _triton(device_type, dtype, scheme, capability)


def _reference(num_experts: int, compile: bool, graph: bool) -> list[str]:
    reasons = []
    if compile and num_experts > REFERENCE_COMPILE_MAX_EXPERTS:
        reasons.append(
            "Compiled, reference runs every expert on every token, which is limited to "
            f"{REFERENCE_COMPILE_MAX_EXPERTS} experts; this has {num_experts}."
        )
    if graph and not compile:
        reasons.append("reference reads expert ids on the host, which a CUDA graph cannot capture.")
    return reasons


def _grouped(
    device_type: str, dtype: str, hidden: int, ffn: int, compile: bool, capability: tuple[int, int] | None
) -> list[str]:
    reasons = []
    size_of = _BYTES.get(dtype, 8)
    for field, size in (("hidden_size", hidden), ("intermediate_size", ffn)):
        if size * size_of % 16:
            reasons.append(
                f"torch's grouped_mm needs rows that are multiples of 16 bytes; {field} {size} gives "
                f"{size * size_of} bytes."
            )
    if device_type == "cuda" and dtype != Quant.BF16.value:
        reasons.append(f"On CUDA torch's grouped_mm takes bf16 only, not {dtype}.")
    elif compile and dtype != Quant.BF16.value:
        reasons.append(f"torch.compile traces grouped_mm in bf16 only, not {dtype}.")
    if device_type not in ("cpu", "cuda"):
        reasons.append(f"torch_grouped_mm runs on cpu and cuda, not {device_type}.")
    if device_type == "cuda" and capability is not None and capability[0] < 9:
        major, minor = capability
        reasons.append(f"torch's grouped_mm kernels need compute capability 9.0; this device has {major}.{minor}.")
    return reasons


def _triton(device_type: str, dtype: str, scheme: Quant, capability: tuple[int, int] | None) -> list[str]:
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
    if capability is not None and form.quantized and capability < least:
        have = f"{capability[0]}.{capability[1]}"
        return [f"{scheme.value} needs compute capability {least[0]}.{least[1]}; this device has {have}."]
    return []


def _fp4(device_type: str, scheme: Quant, capability: tuple[int, int] | None, device_name: str) -> list[str]:
    reasons = []
    if scheme not in NATIVE_FP4:
        formats = " and ".join(quant.value for quant in NATIVE_FP4)
        reasons.append(f"triton_fp4 multiplies {formats}, not {scheme.value}.")
    this = f"this device, {device_name}," if device_name else "this device"
    units = " and ".join(f"{major}.x" for major in FP4_UNITS)
    needs = f"triton_fp4 needs FP4 units, which GPUs of compute capability {units} (Blackwell) have"
    if not TRITON_INSTALLED:
        reasons.append("triton is not installed.")
    elif device_type != "cuda":
        reasons.append(f"{needs}; {this} is of type {device_type}.")
    elif capability is not None and capability[0] not in FP4_UNITS:
        reasons.append(f"{needs}; {this} has {capability[0]}.{capability[1]}.")
    elif TRITON_INTERPRETED:
        reasons.append("Triton's interpreter does not know products of FP4 with scales.")
    return reasons
