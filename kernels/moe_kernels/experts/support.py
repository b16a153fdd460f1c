"""What each implementation of ``fused_experts`` runs, and the reason where it does not."""

from __future__ import annotations

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
    compile: bool = False,
    graph: bool = False,
) -> list[str]:
    """Say why ``fused_experts(impl=name)`` would not run; an empty list means that it runs.

    Needs no tensors and no triton.

    Args:
        name: a built-in or registered implementation.
        device_type: ``"cpu"``, ``"cuda"``, ...
        dtype: of the activations and weights: a torch dtype, or ``"fp32"``, ``"bf16"``, ``"fp16"``.
        num_experts, hidden_size, intermediate_size, top_k: E, D, F, K.
        compile: under ``torch.compile``.
        graph: captured in a CUDA graph.

    Raises:
        ValueError: ``name`` is neither built in nor registered.
    """
    resolved = TORCH_DTYPE[Quant(dtype)] if dtype in TORCH_DTYPE else dtype
    if not isinstance(resolved, torch.dtype):
        return [f"dtype must be one of {', '.join(DTYPE_NAME.values())}; got {dtype!r}."]
    reasons = impl_reasons(
        name, device_type, resolved, num_experts, hidden_size, intermediate_size, top_k, compile, graph
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
) -> list[str]:
    """Reasons for tensors that exist; plain enough to be traced by ``torch.compile``."""
    backend = find_backend(name)
    if backend is not None:
        return list(
            backend.supports(
                device_type=device_type,
                dtype=dtype,
                num_experts=num_experts,
                hidden_size=hidden_size,
                intermediate_size=intermediate_size,
                top_k=top_k,
                compile=compile,
                graph=graph,
            )
        )
    if name not in _BUILT_IN:
        raise ValueError(f"impl must be one of {', '.join(backends())}; got {name!r}.")
    known = DTYPE_NAME[dtype] if dtype in DTYPE_NAME else str(dtype)
    capability = _capability() if device_type == "cuda" else None
    return builtin_reasons(
        name, device_type, known, num_experts, hidden_size, intermediate_size, compile, graph, capability
    )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _capability() -> tuple[int, int] | None:
    """Compute capability where CUDA has been started anyhow; asking must not start it."""
    return torch.cuda.get_device_capability() if torch.cuda.is_initialized() else None
