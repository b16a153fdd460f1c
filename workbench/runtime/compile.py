"""`torch.compile` of a layer, with what it did counted and nothing silent.

Shapes: T tokens, D model, K experts per token.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch._dynamo.utils import counters

from workbench.modes import Compile
from workbench.runtime.inputs import LayerFunction

_TRITON_COMPILES = [0]


@dataclass(frozen=True, slots=True)
class CompileCount:
    """What has been compiled so far in this process: graphs by dynamo, kernels by Triton's just-in-time compiler.

    A kernel that Triton reads from its cache on disk counts too: it stalls the first launch all the same.
    """

    graphs: int = 0
    graph_breaks: int = 0
    kernels: int = 0

    def since(self, earlier: CompileCount) -> CompileCount:
        """The difference to an earlier count."""
        return CompileCount(
            self.graphs - earlier.graphs, self.graph_breaks - earlier.graph_breaks, self.kernels - earlier.kernels
        )

    def __bool__(self) -> bool:
        return self.graphs > 0 or self.kernels > 0


def _count_kernel(**_: object) -> None:
    _TRITON_COMPILES[0] += 1


def watch_compiles() -> None:
    """Count Triton's compiles from now on; a hook that someone else set is left alone."""
    try:
        from triton import knobs
    except ImportError:
        return
    if knobs.runtime.jit_post_compile_hook is None:
        knobs.runtime.jit_post_compile_hook = _count_kernel


def compile_count() -> CompileCount:
    """What this process has compiled since dynamo was last reset."""
    return CompileCount(
        graphs=int(counters["stats"]["unique_graphs"]),
        graph_breaks=sum(counters["graph_break"].values()),
        kernels=_TRITON_COMPILES[0],
    )


def compile_layer(function: LayerFunction, mode: Compile, *, dynamic: bool) -> LayerFunction:
    """Compile `function` afresh: dynamo forgets whatever an earlier set of modes left behind.

    A graph break is an error (`fullgraph`), as is running out of recompiles (`strict_recompiles`).
    """
    torch._dynamo.reset()
    if mode is Compile.NONE:
        return function
    return torch.compile(function, mode=mode.value, fullgraph=True, dynamic=dynamic)


@contextmanager
def strict_recompiles() -> Iterator[None]:
    """Inside, code that would fall back to eager for too many recompiles raises instead."""
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield


@contextmanager
def cold_caches() -> Iterator[None]:
    """Inside, inductor's and Triton's caches start empty, on disk and in this process; the old ones come back after."""
    from torch._inductor.utils import fresh_cache

    torch._dynamo.reset()
    forget_kernels()
    with fresh_cache():
        yield
    torch._dynamo.reset()


def forget_kernels() -> None:
    """Drop what Triton's just-in-time functions hold compiled in memory. They stay in the cache on disk."""
    if "triton" not in sys.modules:
        return
    from triton.runtime.jit import JITFunction

    for found in gc.get_objects():
        if type(found) is JITFunction:
            found.device_caches.clear()
