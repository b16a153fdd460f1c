"""Attention backends of others: the one seam through which foreign attention comes in. Torch is not imported here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from moe_kernels.attention.flashinfer import (
    flashinfer_decode,
    flashinfer_mla_decode,
    flashinfer_prefill,
    flashinfer_reasons,
)
from moe_kernels.attention.rules import AttentionImpl, AttentionKind

AttentionFunction = Callable[..., Any]
AttentionSupports = Callable[..., list[str]]


class AttentionBackend(NamedTuple):
    """A registered backend: a function for each operation that it has, and its own account of what it runs."""

    functions: Mapping[str, AttentionFunction]
    supports: AttentionSupports


# Where flashinfer is not installed, its own account says so.
_BACKENDS: dict[str, AttentionBackend] = {
    "flashinfer": AttentionBackend(
        {"decode": flashinfer_decode, "mla_decode": flashinfer_mla_decode, "prefill": flashinfer_prefill},
        flashinfer_reasons,
    )
}


def register_attention_backend(
    name: str, functions: Mapping[str, AttentionFunction], supports: AttentionSupports
) -> None:
    """Make functions available as ``impl=name`` of the attention operations.

    Args:
        name: a new name; the built-in names and names in use are refused.
        functions: by operation, ``"decode"``, ``"mla_decode"`` and ``"prefill"``: a function with the arguments of
            ``decode_attention``, ``mla_decode_attention`` or ``prefill_attention`` without ``impl`` and
            ``num_kv_splits``, which must not write to them. An operation that is left out is refused in its name.
        supports: called with ``kind`` (the operation) and the keywords of ``attention_reasons`` (``device_type``,
            ``dtype`` as ``"bf16"``, ``num_heads``, ``num_kv_heads``, ``head_dim``, ``v_head_dim``, ``page_size`` (None
            where there is no cache), ``window``, ``compile``, ``graph``); returns reasons as sentences, an empty list
            where it runs.

    Raises:
        ValueError: the name is empty, built in or registered already; no operation, or an unknown one, is given.
        TypeError: a function cannot be called.
    """
    kinds = [kind.value for kind in AttentionKind]
    if not isinstance(name, str) or not name:
        raise ValueError(f"name must be a non-empty string; got {name!r}.")
    if name in [impl.value for impl in AttentionImpl]:
        raise ValueError(f"name {name!r} is built in; choose another than {', '.join(AttentionImpl)}.")
    if name in _BACKENDS:
        raise ValueError(f"name {name!r} is registered already; call unregister_attention_backend({name!r}) first.")
    if not functions or any(kind not in kinds for kind in functions):
        raise ValueError(
            f"functions must hold at least one of {', '.join(kinds)}; got {', '.join(functions) or 'none'}."
        )
    if not callable(supports) or not all(callable(function) for function in functions.values()):
        raise TypeError("functions and supports must all be callable.")
    _BACKENDS[name] = AttentionBackend(dict(functions), supports)


def unregister_attention_backend(name: str) -> None:
    """Remove a registered backend; ValueError where none of that name is registered."""
    if name not in _BACKENDS:
        registered = ", ".join(sorted(_BACKENDS)) or "none"
        raise ValueError(f"name {name!r} is not a registered attention backend; registered: {registered}.")
    del _BACKENDS[name]


def attention_backends() -> list[str]:
    """Names that ``impl`` takes: the built-in ones first, then registered ones in order of registration."""
    return [impl.value for impl in AttentionImpl] + list(_BACKENDS)


def find_attention_backend(name: str) -> AttentionBackend | None:
    """Return the registered backend of that name, or None."""
    return _BACKENDS.get(name)
