"""What each implementation of ``fused_experts`` runs, and the reason where it does not."""

from __future__ import annotations

from typing import Any

import torch

from moe_kernels.experts.rules import REFERENCE_COMPILE_MAX_EXPERTS as REFERENCE_COMPILE_MAX_EXPERTS
from moe_kernels.experts.rules import TRITON_INSTALLED as TRITON_INSTALLED
from moe_kernels.experts.rules import TRITON_INTERPRETED as TRITON_INTERPRETED
from moe_kernels.experts.rules import builtin_reasons
from moe_kernels.registry import backends, find_backend
from moe_kernels.types import DTYPE_NAME, TORCH_DTYPE, Impl, Quant

_BUILT_IN = tuple(impl.value for impl in Impl)


def supports_impl(
    name: str,
    *,
    device_type: str,
    dtype: torch.dtype | str,
    num_experts: int,
    hidden_size: int,
    intermediate_size: int,
    top_k: int,
    quant: str | None = None,
    compile: bool = False,
    graph: bool = False,
) -> list[str]:
    """Say why ``fused_experts(impl=name)`` would not run; an empty list means that it runs.

    Needs no tensors and no triton.

    Args:
        name: a built-in or registered implementation.
        device_type: ``"cpu"``, ``"cuda"``, ...
        dtype: of the activations: a torch dtype, or ``"fp32"``, ``"bf16"``, ``"fp16"``.
        num_experts, hidden_size, intermediate_size, top_k: E, D, F, K.
        quant: format of the weights; None for that of ``dtype``.
        compile: under ``torch.compile``.
        graph: captured in a CUDA graph.

    Raises:
        ValueError: ``name`` is neither built in nor registered.
    """
    resolved = TORCH_DTYPE[Quant(dtype)] if dtype in TORCH_DTYPE else dtype
    if not isinstance(resolved, torch.dtype):
        return [f"dtype must be one of {', '.join(DTYPE_NAME.values())}; got {dtype!r}."]
    reasons = impl_reasons(
        name, device_type, resolved, num_experts, hidden_size, intermediate_size, top_k, compile, graph, quant
    )
    if device_type == "cuda" and not torch.cuda.is_available():
        reasons.insert(0, "torch sees no CUDA device.")
    if graph and device_type != "cuda":
        reasons.append(f"CUDA graphs need a CUDA device; this is {device_type}.")
    return reasons


def impl_reasons(
    name: str,
    device_type: str,
    dtype: torch.dtype,
    num_experts: int,
    hidden_size: int,
    intermediate_size: int,
    top_k: int,
    compile: bool,
    graph: bool,
    quant: str | None = None,
) -> list[str]:
    """Reasons for tensors that exist; plain enough to be traced by ``torch.compile``."""
    backend = find_backend(name)
    known = DTYPE_NAME[dtype] if dtype in DTYPE_NAME else str(dtype)
    scheme = known if quant is None else quant
    if backend is not None:
        asked: dict[str, Any] = {
            "device_type": device_type,
            "dtype": dtype,
            "num_experts": num_experts,
            "hidden_size": hidden_size,
            "intermediate_size": intermediate_size,
            "top_k": top_k,
            "compile": compile,
            "graph": graph,
        }
        if scheme != known:
            # A backend that was written for plain weights need not know the word.
            if not backend.takes_quant:
                return [f"{name} takes unquantised weights only, not {scheme}."]
            asked["quant"] = scheme
        return list(backend.supports(**asked))
    if name not in _BUILT_IN:
        raise ValueError(f"impl must be one of {', '.join(backends())}; got {name!r}.")
    capability = _capability() if device_type == "cuda" else None
    return builtin_reasons(
        name,
        device_type,
        scheme,
        num_experts,
        hidden_size,
        intermediate_size,
        compile,
        graph,
        capability,
        dtype=known,
        device_name=_device_name() if device_type == "cuda" else "",
    )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _capability() -> tuple[int, int] | None:
    """Compute capability where CUDA has been started anyhow; asking must not start it."""
    return torch.cuda.get_device_capability() if torch.cuda.is_initialized() else None


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _device_name() -> str:
    """Name of the GPU where CUDA has been started anyhow."""
    return torch.cuda.get_device_name() if torch.cuda.is_initialized() else ""
