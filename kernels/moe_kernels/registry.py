"""Backends of others: the one seam through which foreign implementations of ``fused_experts`` come in."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from moe_kernels.names import Impl

if TYPE_CHECKING:
    import torch

    from moe_kernels.experts.weights import ExpertWeights
    from moe_kernels.types import Routing

BackendFunction = Callable[["torch.Tensor", "ExpertWeights", "Routing"], "torch.Tensor"]
BackendSupports = Callable[..., list[str]]


class Backend(NamedTuple):
    """A registered implementation and its own account of what it runs."""

    function: BackendFunction
    supports: BackendSupports
    takes_quant: bool


_BACKENDS: dict[str, Backend] = {}


def register_backend(name: str, function: BackendFunction, supports: BackendSupports) -> None:
    """Make ``function`` available as ``fused_experts(..., impl=name)``.

    Args:
        name: a new name; the built-in names and names in use are refused.
        function: ``function(x_TD, weights, routing) -> [T, D]`` in the dtype of ``x_TD``. It must not write to its
            arguments, and must add nothing for ids outside ``0 .. E-1``.
        supports: called with the keywords of ``supports_impl`` (``device_type``, ``dtype``, ``num_experts``,
            ``hidden_size``, ``intermediate_size``, ``top_k``, ``compile``, ``graph``); returns reasons as sentences, an
            empty list where the backend runs. One that takes a keyword ``quant`` (or any keyword) is asked about
            quantised formats with it; without, they are refused in its name.

    Raises:
        ValueError: the name is empty, built in, or registered already.
        TypeError: ``function`` or ``supports`` cannot be called.
    """
    if not isinstance(name, str) or not name:
        raise ValueError(f"name must be a non-empty string; got {name!r}.")
    if any(name == impl.value for impl in Impl):
        raise ValueError(f"name {name!r} is built in; choose another than {', '.join(impl.value for impl in Impl)}.")
    if name in _BACKENDS:
        raise ValueError(f"name {name!r} is registered already; call unregister_backend({name!r}) first.")
    if not callable(function) or not callable(supports):
        raise TypeError("function and supports must both be callable.")
    _BACKENDS[name] = Backend(function, supports, _takes(supports, "quant"))


def _takes(function: Callable[..., object], keyword: str) -> bool:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # built-in callables may not tell
        return False
    return keyword in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def unregister_backend(name: str) -> None:
    """Remove a registered backend; ValueError where no backend of that name is registered."""
    if name not in _BACKENDS:
        registered = ", ".join(sorted(_BACKENDS)) or "none"
        raise ValueError(f"name {name!r} is not a registered backend; registered: {registered}.")
    del _BACKENDS[name]


def backends() -> list[str]:
    """Names that ``impl`` takes: the built-in ones first, then registered ones in order of registration."""
    return [impl.value for impl in Impl] + list(_BACKENDS)


def find_backend(name: str) -> Backend | None:
    """Return the registered backend of that name, or None."""
    return _BACKENDS.get(name)
