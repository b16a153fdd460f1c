"""Which implementation of a step's kernels runs where, by name alone: torch is not imported here."""

from __future__ import annotations

from moe_kernels.experts.rules import TRITON_INSTALLED, TRITON_INTERPRETED

IMPLS = ("reference", "triton")


def step_reasons(impl: str, device_type: str) -> list[str]:
    """Why the functions of ``moe_kernels.step.api`` would not run, as sentences; an empty list means that they run.

    Raises:
        ValueError: ``impl`` is unknown.
    """
    if impl not in IMPLS:
        raise ValueError(f"impl must be one of {', '.join(IMPLS)}; got {impl!r}.")
    if impl == "reference":
        return []
    if not TRITON_INSTALLED:
        return ["triton is not installed."]
    if device_type != "cuda" and not TRITON_INTERPRETED:
        return [f"Triton kernels run on cuda, not {device_type}."]
    return []


def resolve_step_impl(impl: str | None, device_type: str) -> str:
    """The implementation that runs: ``None`` is triton on CUDA where it is installed, else reference.

    Raises:
        ValueError: ``impl`` is unknown.
        NotImplementedError: ``impl`` does not run there; the sentence says why.
    """
    if impl is None:
        return "triton" if device_type == "cuda" and TRITON_INSTALLED else "reference"
    reasons = step_reasons(impl, device_type)
    if reasons:
        raise NotImplementedError(f"impl {impl!r} does not run: {' '.join(reasons)}")
    return impl
