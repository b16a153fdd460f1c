"""What each backend of others runs here, by name and number alone: torch is not imported, nor the backend itself."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

from moe_kernels.names import Quant

BLOCK = 128
HOPPER = (9, 0)


@cache
def installed(package: str) -> bool:
    """Whether a package can be imported; it is not."""
    return find_spec(package) is not None


def peer_reasons(
    name: str,
    *,
    device_type: str,
    capability: tuple[int, int] | None,
    quant: str,
    hidden_size: int,
    intermediate_size: int,
    compile: bool,
) -> list[str]:
    """Why the backend `name` would not run, as sentences; empty where it does.

    Args:
        name: `deep_gemm`.
        device_type, capability: where; (9, 0) is Hopper, None leaves rules about it out.
        quant: the weight format.
        hidden_size, intermediate_size: D and F of one rank.
        compile: whether `torch.compile` is in it.
    """
    if name != "deep_gemm":
        raise ValueError(f"name must be deep_gemm; got {name!r}.")
    reasons = []
    if not installed("deep_gemm"):
        reasons.append("deep_gemm is not installed; pip install 'moe-workbench[deep-gemm]'.")
    if device_type != "cuda":
        reasons.append(f"deep_gemm runs on cuda, not {device_type}.")
    elif capability is not None and capability != HOPPER:
        major, minor = capability
        reasons.append(f"deep_gemm is brought in for compute capability 9.0; this device has {major}.{minor}.")
    if quant != Quant.FP8_BLOCK.value:
        reasons.append(f"deep_gemm is brought in for quant fp8_block, not {quant}.")
    for field, size in (("hidden_size", hidden_size), ("intermediate_size", intermediate_size)):
        if size % BLOCK:
            reasons.append(f"{field} must be a multiple of {BLOCK} for deep_gemm's blocks, not {size}.")
    if compile:
        reasons.append("deep_gemm compiles its kernels when it is called, which torch.compile cannot trace.")
    return reasons
