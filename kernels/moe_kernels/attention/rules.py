"""What each built-in implementation of attention runs, by name and number alone: torch is not imported here."""

from __future__ import annotations

from enum import StrEnum

from moe_kernels.experts.rules import TRITON_INSTALLED, TRITON_INTERPRETED
from moe_kernels.names import Quant

MAX_HEAD_DIM = 640
MAX_V_HEAD_DIM = 512
_DTYPES = (Quant.FP32.value, Quant.BF16.value, Quant.FP16.value)


class AttentionKind(StrEnum):
    """The three operations."""

    DECODE = "decode"
    MLA_DECODE = "mla_decode"
    PREFILL = "prefill"


class AttentionImpl(StrEnum):
    """Built-in implementations; names given to ``register_attention_backend`` stand beside them."""

    REFERENCE = "reference"
    SDPA = "sdpa"
    TRITON = "triton"


def attention_preference(device_type: str) -> tuple[str, ...]:
    """Names in the order in which ``impl=None`` asks them; the first that runs is taken."""
    if device_type == "cuda":
        return ("triton", "sdpa", "reference")
    return ("sdpa", "reference")


def builtin_attention_reasons(
    impl: str,
    kind: str,
    device_type: str,
    *,
    dtype: str,
    head_dim: int,
    v_head_dim: int,
    graph: bool = False,
    capability: tuple[int, int] | None = None,
) -> list[str]:
    """Why the built-in implementation ``impl`` would not run, as sentences; an empty list means that it runs.

    Args:
        impl: ``"reference"``, ``"sdpa"`` or ``"triton"``.
        kind: ``"decode"``, ``"mla_decode"`` or ``"prefill"``.
        device_type: ``"cpu"``, ``"cuda"``, ...
        dtype: of queries, keys and values: ``"fp32"``, ``"bf16"`` or ``"fp16"``.
        head_dim, v_head_dim: D and Dv; for ``"mla_decode"`` the latent's size and its rank.
        graph: captured in a CUDA graph.
        capability: the device's compute capability, (9, 0) for Hopper; None leaves rules about it out.

    Raises:
        ValueError: ``impl`` or ``kind`` is none of those.
    """
    if impl not in ("reference", "sdpa", "triton"):
        raise ValueError(f"impl must be one of reference, sdpa, triton; got {impl!r}.")
    if kind not in ("decode", "mla_decode", "prefill"):
        raise ValueError(f"kind must be one of decode, mla_decode, prefill; got {kind!r}.")
    if dtype not in _DTYPES:
        return [f"{impl} attention computes in {', '.join(_DTYPES)}, not {dtype}."]
    if impl == "reference":
        return ["reference attention reads lengths on the host, which a CUDA graph cannot capture."] if graph else []
    if impl == "sdpa":
        if graph and kind == "prefill":
            return ["sdpa prefill reads lengths on the host, which a CUDA graph cannot capture; use triton."]
        return []
    return _triton(device_type, dtype, head_dim, v_head_dim, capability)


def _triton(
    device_type: str, dtype: str, head_dim: int, v_head_dim: int, capability: tuple[int, int] | None
) -> list[str]:
    if not TRITON_INSTALLED:
        return ["triton is not installed."]
    reasons = []
    for name, size, most in (("head_dim", head_dim, MAX_HEAD_DIM), ("v_head_dim", v_head_dim, MAX_V_HEAD_DIM)):
        if size > most:
            reasons.append(f"Triton attention takes {name} up to {most}, not {size}.")
    if TRITON_INTERPRETED:
        if dtype == Quant.BF16.value:
            reasons.append("Triton's interpreter multiplies bf16 matrices wrongly; use fp32 or fp16 with it.")
        return reasons
    if device_type != "cuda":
        return [f"Triton kernels run on cuda, not {device_type}."]
    if capability is not None and capability < (8, 0):
        major, minor = capability
        reasons.append(f"Triton attention needs compute capability 8.0; this device has {major}.{minor}.")
    return reasons
