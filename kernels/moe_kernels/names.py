"""Names of weight formats and implementations. Torch is not needed to read them."""

from __future__ import annotations

from enum import Enum, StrEnum
from typing import TypeVar


class Quant(StrEnum):
    """Weight formats; `moe_kernels.formats` says what each stores and how activations are treated."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    FP8_TENSOR = "fp8_tensor"
    FP8_CHANNEL = "fp8_channel"
    FP8_BLOCK = "fp8_block"
    INT8 = "int8"
    INT8_WEIGHT = "int8_weight"
    INT4 = "int4"
    NVFP4 = "nvfp4"
    MXFP4 = "mxfp4"


class Impl(StrEnum):
    """Built-in implementations of ``fused_experts``; names given to ``register_backend`` stand beside them."""

    REFERENCE = "reference"
    TORCH_GROUPED_MM = "torch_grouped_mm"
    TRITON = "triton"
    TRITON_FP4 = "triton_fp4"


_Choice = TypeVar("_Choice", bound=Enum)


def parse_choice(kind: type[_Choice], value: str, field: str) -> _Choice:
    """Return the member of ``kind`` that ``value`` names; ValueError names the field and the allowed values."""
    for member in kind:
        if member.value == value:
            return member
    raise ValueError(f"{field} must be one of {', '.join(member.value for member in kind)}; got {value!r}.")
