"""`torch.compile` of a decode step, whole or with the experts left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from workbench.models.network.apart import kept_apart
from workbench.models.network.network import Network
from workbench.modes import Compile
from workbench.runtime.kv_cache import KVCache
from workbench.runtime.step_decode import Forward, decode_forward

# One compiled form a batch size, and each may be compiled twice.
RECOMPILES = 256


class CompiledDecode:
    """Decode steps of a network, compiled where they are to be.

    Attributes:
        network: that is run.
        mode: of the compiled ones.
        skip_moe: whether experts, their gate and shared experts stay as they are, seen by the compiler as one op.
        max_batch: the largest compiled batch; None for all.
    """

    def __init__(
        self, network: Network, cache: KVCache, mode: Compile, *, skip_moe: bool = False, max_batch: int | None = None
    ) -> None:
        """Compile nothing yet: each batch size is compiled when it is first run.

        Weights and caches are marked as fixed in size and address, as in a serving engine.
        """
        self.network, self.mode = network, mode
        self.skip_moe, self.max_batch = skip_moe, max_batch
        self.plain = decode_forward(network, cache)
        self._compiled: Forward | None = None
        if mode is not Compile.NONE:
            _mark(network, cache)
            # A graph break is an error: nothing runs eager that is said to be compiled.
            self._compiled = torch.compile(self.plain, mode=mode.value, fullgraph=True, dynamic=False)

    def compiles(self, size: int) -> bool:
        """Whether a batch of this size is compiled."""
        return self._compiled is not None and (self.max_batch is None or size <= self.max_batch)

    def pick(self, size: int) -> Forward:
        """The function for a batch of this size."""
        compiled = self._compiled
        if compiled is None or not self.compiles(size):
            return self.plain

        def run(token_ids_B: torch.Tensor, positions_B: torch.Tensor, page_table_BP: torch.Tensor) -> torch.Tensor:
            if self.mode.owns_graphs:
                torch.compiler.cudagraph_mark_step_begin()
            with kept_apart(self.network, self.skip_moe), room_for_sizes():
                logits_BV = compiled(token_ids_B, positions_B, page_table_BP)
            return logits_BV.clone() if self.mode.owns_graphs else logits_BV

        return run


@contextmanager
def room_for_sizes() -> Iterator[None]:
    """Inside, one function may be compiled for many batch sizes; more than that is an error, not a fall to eager."""
    with torch._dynamo.config.patch(recompile_limit=RECOMPILES, fail_on_recompile_limit_hit=True):
        yield


def _mark(network: Network, cache: KVCache) -> None:
    for tensor in _held(network):
        torch._dynamo.mark_static_address(tensor)
    for layer in cache.layers:
        for tensor in (layer.k, layer.v) if layer.latent is None else (layer.latent,):
            torch._dynamo.mark_static_address(tensor)


def _held(network: Network) -> Iterator[torch.Tensor]:
    for module in network.modules():
        tensors: Callable[[], list[torch.Tensor]] = getattr(module, "tensors", list)
        yield from tensors()
