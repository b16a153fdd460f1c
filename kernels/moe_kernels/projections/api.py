"""Public ``linear``: checks and dispatch.

Shapes: T tokens, N outputs, K inputs.
"""

from __future__ import annotations

import torch

from moe_kernels.formats import FORMATS
from moe_kernels.projections import ops
from moe_kernels.projections.reference import linear_reference
from moe_kernels.projections.rules import LinearImpl, linear_preference, linear_reasons
from moe_kernels.projections.scaled_mm import linear_scaled_mm
from moe_kernels.projections.weights import LinearWeights
from moe_kernels.types import DTYPE_NAME


def linear(
    x_TK: torch.Tensor, weights: LinearWeights, *, bias: torch.Tensor | None = None, impl: str | None = None
) -> torch.Tensor:
    """Multiply by a matrix in any weight format: ``out[t] = w . x[t] + bias``.

    Formats with quantised activations round ``x_TK`` as ``quantize_activation`` does. Sums are float32, and the result
    is rounded once, bias included (``"torch"`` adds the bias as torch's product does). ``x_TK`` is never written to.
    The same arguments give the same bits in every call. For inference: no gradient.

    Args:
        x_TK: ``[T, K]`` in ``weights.dtype``; T may be 0; rows may have a stride.
        weights: the matrix ``[N, K]``, on the same device.
        bias: ``[N]`` in ``weights.dtype``, on the same device.
        impl: ``"reference"`` (the specification), ``"torch"`` (plain formats; fp8_tensor and fp8_channel where the GPU
            multiplies them), ``"triton"`` (all formats) or None for the best that runs these tensors
            (``resolve_linear_impl`` says which).

    Returns:
        ``[T, N]``, contiguous, in ``weights.dtype``.

    Raises:
        ValueError: tensors that do not fit together, or an unknown ``impl``.
        NotImplementedError: the named implementation does not run these tensors; the message says why.
    """
    _check(x_TK, weights, bias)
    chosen = _resolve(x_TK, weights, impl)
    if x_TK.shape[0] == 0:
        return x_TK.new_empty(0, weights.N)
    if chosen == LinearImpl.REFERENCE.value:
        return linear_reference(x_TK, weights, bias)
    if chosen == LinearImpl.TRITON.value:
        return ops.linear_triton(x_TK, weights, bias)
    if FORMATS[weights.quant].quantized:
        return linear_scaled_mm(x_TK, weights, bias)
    product: torch.Tensor = torch.nn.functional.linear(x_TK, weights.w, bias)
    return product


def resolve_linear_impl(x_TK: torch.Tensor, weights: LinearWeights, impl: str | None = None) -> str:
    """Return the name of the implementation that ``linear`` runs for these arguments; raises as that does."""
    _check(x_TK, weights, None)
    return _resolve(x_TK, weights, impl)


def _resolve(x_TK: torch.Tensor, weights: LinearWeights, impl: str | None) -> str:
    device = x_TK.device.type
    if impl is None:
        names = linear_preference(device, weights.quant.value, x_TK.shape[0])
    else:
        names = (impl.value if isinstance(impl, LinearImpl) else impl,)
    capability = _capability() if device == "cuda" else None
    refused = []
    for name in names:
        reasons = linear_reasons(
            name,
            device,
            quant=weights.quant.value,
            dtype=DTYPE_NAME[weights.dtype],
            outputs=weights.N,
            inputs=weights.K,
            capability=capability,
        )
        if not reasons:
            return name
        refused.append(f"impl {name!r} does not run here: {' '.join(reasons)}")
    raise NotImplementedError(" ".join(refused))


def _check(x_TK: torch.Tensor, weights: LinearWeights, bias: torch.Tensor | None) -> None:
    if x_TK.dim() != 2 or x_TK.shape[1] != weights.K:
        raise ValueError(f"x_TK must be [T, {weights.K}]; got {list(x_TK.shape)}.")
    if x_TK.dtype != weights.dtype:
        raise ValueError(f"x_TK must have the dtype of the weights, {weights.dtype}; got {x_TK.dtype}.")
    if x_TK.device != weights.w.device:
        raise ValueError(f"x_TK and weights must be on one device; got {x_TK.device} and {weights.w.device}.")
    if bias is None:
        return
    if bias.shape != (weights.N,) or bias.dtype != weights.dtype:
        raise ValueError(
            f"bias must be {weights.dtype} [{weights.N}], as the result is; got {bias.dtype} {list(bias.shape)}."
        )
    if bias.device != x_TK.device:
        raise ValueError(f"bias must be on the device of x_TK, {x_TK.device}; got {bias.device}.")


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _capability() -> tuple[int, int] | None:
    """Compute capability where CUDA has been started anyhow; asking must not start it."""
    return torch.cuda.get_device_capability() if torch.cuda.is_initialized() else None
