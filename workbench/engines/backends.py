"""Backends that are not built in, imported in the worker alone: known ones, and `package.module:function`."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from moe_kernels import backends, register_backend

from workbench.engines.faults import Unsupported
from workbench.modes import BUILTIN_BACKENDS, PEER_BACKENDS


def prepare_backend(name: str) -> None:
    """Make `name` known to `fused_experts`.

    A name with a colon names a function `function(x_TD, weights, routing) -> [T, D]`; it may carry an attribute
    `supports`, a callable that takes the keywords of `moe_kernels.supports_impl` and returns reasons as sentences.

    Raises:
        Unsupported: the module cannot be imported, or holds no such function.
    """
    if name in BUILTIN_BACKENDS or name in backends():
        return
    if name in PEER_BACKENDS:
        peer = import_module(f"workbench.peers.{name}")
        register_backend(name, peer.run, peer.supports)
        return
    module, _, function = name.partition(":")
    try:
        found: Any = getattr(import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise Unsupported(f"moe_backend: {name!r} cannot be imported ({error})") from None
    if not callable(found):
        raise Unsupported(f"moe_backend: {name!r} is no function but {type(found).__name__}")
    register_backend(name, found, getattr(found, "supports", _runs_everywhere))


def _runs_everywhere(**_: object) -> list[str]:
    return []
