"""Decode steps on static buffers, as they are compiled and captured: from the tokens in to the tokens out.

Shapes: B sequences, P pages of a sequence, K experts a token, V tokens of one rank's vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from moe_kernels import Routing

from workbench.models.network.batch import DECODE, Batch
from workbench.models.network.moe import MoE
from workbench.models.network.network import Network
from workbench.runtime.full_graph import FullGraphRunner
from workbench.runtime.graph import Recorder
from workbench.runtime.kv_cache import KVCache
from workbench.runtime.step import Routings, StepRunner, next_tokens

Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""`(token_ids_B, positions_B, page_table_BP) -> logits_BV`: a decode step, writing to its cache."""


def decode_forward(network: Network, cache: KVCache) -> Forward:
    """A decode step of `network` as a function of tensors alone."""
    page_size = cache.page_size
    device = cache.page_table.device
    most = cache.batch_size
    counts = torch.arange(most + 1, dtype=torch.int32, device=device)
    rows = torch.arange(most, dtype=torch.int64, device=device)

    def forward(token_ids_B: torch.Tensor, positions_B: torch.Tensor, page_table_BP: torch.Tensor) -> torch.Tensor:
        size = token_ids_B.shape[0]
        pages_B = page_table_BP.gather(1, (positions_B // page_size)[:, None])[:, 0].to(torch.int64)
        batch = Batch(
            kind=DECODE,
            token_ids_S=token_ids_B,
            positions_S=positions_B,
            slots_S=pages_B * page_size + positions_B % page_size,
            page_table_BP=page_table_BP,
            seq_lens_B=(positions_B + 1).to(torch.int32),
            cu_seqlens=counts[: size + 1],
            last_S=rows[:size],
        )
        logits_BV: torch.Tensor = network(batch, cache)
        return logits_BV

    return forward


class DecodeBuffers:
    """What a decode step reads: a token, a position and a page table of each sequence, and routings that are given.

    A row of padding repeats the first one: it reads and writes what that row does, the same values in the same places.
    So nothing new is read, no other expert is chosen, and the largest value of a batch stays what it is.

    Attributes:
        token_ids_B, positions_B: int64.
        page_table_BP: int32.
        routings: of each layer with experts, `[B, K]`; empty where the model's gates choose.
        logits: of each size, float32 `[size, V]`; those of a captured one are filled by its replays.
    """

    def __init__(
        self, network: Network, cache: KVCache, pick: Callable[[int], Forward], *, given: bool = False
    ) -> None:
        """Make the buffers, with room for as many sequences as the cache.

        Args:
            network: that is run.
            cache: that it writes.
            pick: the function for a size: some sizes may be compiled, and others not.
            given: whether routings are given.
        """
        self.network, self.cache, self.pick = network, cache, pick
        most, device = cache.batch_size, cache.page_table.device
        self.token_ids_B = torch.zeros(most, dtype=torch.int64, device=device)
        self.positions_B = torch.zeros(most, dtype=torch.int64, device=device)
        self.page_table_BP = cache.page_table.clone()
        self.logits: dict[int, torch.Tensor] = {}
        self.routings: dict[int, Routing] = {}
        if given and network.config.moe is not None:
            shape = (most, network.config.moe.top_k)
            for index, layer in enumerate(network.layers):
                if isinstance(layer.mlp, MoE):
                    weights = torch.zeros(shape, dtype=torch.float32, device=device)
                    # Any choice without repeats will do until one is given.
                    ids = torch.arange(shape[1], dtype=torch.int32, device=device).repeat(most, 1)
                    self.routings[index] = Routing(weights, ids)

    @property
    def largest(self) -> int:
        """Sequences that there is room for."""
        return self.cache.batch_size

    def fill(self, token_ids_B: torch.Tensor, position: int) -> None:
        """Put the tokens of the first sequences in, all at one position."""
        rows = token_ids_B.shape[0]
        self.token_ids_B[:rows].copy_(token_ids_B)
        self.positions_B[:rows].fill_(position)

    def give(self, layer: int, routing: Routing) -> None:
        """Put a layer's routing of the first sequences in."""
        for own, new in zip(self.routings[layer], routing, strict=True):
            own[: new.shape[0]].copy_(new)

    def load(self, rows: int, padded: int) -> None:
        """See `Capturable`."""
        self.page_table_BP[:padded].copy_(self.cache.page_table[:padded])
        if padded > rows:
            held = [tensor for routing in self.routings.values() for tensor in routing]
            for tensor in (self.token_ids_B, self.positions_B, self.page_table_BP, *held):
                tensor[rows:padded] = tensor[:1]

    def call(self, size: int) -> torch.Tensor:
        """See `Capturable`: the next tokens, int64 `[size]`."""
        for index, layer in enumerate(self.network.layers):
            if isinstance(layer.mlp, MoE):
                given = self.routings.get(index)
                layer.mlp.forced = given and Routing(given.topk_weights[:size], given.topk_ids[:size])
        forward = self.pick(size)
        self.logits[size] = forward(self.token_ids_B[:size], self.positions_B[:size], self.page_table_BP[:size])
        return next_tokens(self.logits[size])


class BufferedStepRunner(StepRunner):
    """Prefill as it comes; decode steps on static buffers, compiled, replayed, or both.

    Attributes:
        buffers: that decode steps read.
        graphs: of batch sizes; None where steps are not captured.
    """

    def __init__(
        self,
        network: Network,
        cache: KVCache,
        prompts_BS: torch.Tensor,
        output_len: int,
        routings: Routings | None = None,
        *,
        pick: Callable[[int], Forward] | None = None,
    ) -> None:
        """As `StepRunner`; `pick` gives the function for a batch size, and None runs the network as it is."""
        super().__init__(network, cache, prompts_BS, output_len, routings)
        plain = decode_forward(network, cache)
        self.buffers = DecodeBuffers(network, cache, pick or (lambda _size: plain), given=routings is not None)
        self.graphs: FullGraphRunner | None = None

    def capture(
        self,
        sizes: Iterable[int],
        largest: int,
        make_recorder: Callable[[], Recorder],
        *,
        progress: Callable[[int, int, int], None] | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> FullGraphRunner:
        """Capture decode steps at `sizes` and at `largest`; errors as `FullGraphRunner`.

        Warming up writes a key at position 0 of every sequence, which a prefill writes anew.
        """
        self.close()
        self.graphs = FullGraphRunner(
            self.buffers, sizes, make_recorder, largest=largest, progress=progress, check=check
        )
        return self.graphs

    @property
    def size(self) -> int:
        """Rows that a decode step runs, padding included."""
        padded = None if self.graphs is None else self.graphs.padded(self.batch_size)
        return self.batch_size if padded is None else padded

    def prepare(self, step: int | None) -> None:
        """See `StepRunner`: a decode step's routings go to where it reads them."""
        if step is None or self.routings is None:
            super().prepare(step)
            return
        for index in self.buffers.routings:
            given = self.routing(step, index)
            assert given is not None
            self.buffers.give(index, given)

    def decode_tokens(self, step: int, token_ids_B: torch.Tensor) -> torch.Tensor:
        """See `StepRunner`; a static output that the next step overwrites."""
        self.buffers.fill(token_ids_B, self.input_len + step)
        if self.graphs is not None:
            return self.graphs.replay(self.batch_size)
        self.buffers.load(self.batch_size, self.batch_size)
        return self.buffers.call(self.batch_size)

    def decode(self, step: int, token_ids_B: torch.Tensor) -> torch.Tensor:
        """See `StepRunner`; a copy."""
        self.decode_tokens(step, token_ids_B)
        return self.buffers.logits[self.size][: self.batch_size].clone()

    def uncaptured(self) -> torch.Tensor:
        """Logits of what the buffers hold, at the size that a replay has and without its graph: `[size, V]`."""
        own = self.buffers.logits.get(self.size)
        self.buffers.load(self.batch_size, self.size)
        self.buffers.call(self.size)
        found = self.buffers.logits[self.size].clone()
        if own is not None:
            self.buffers.logits[self.size] = own  # the graph's own, which every replay fills
        return found

    def close(self) -> None:
        """Give the graphs' memory back. May be called again."""
        if self.graphs is not None:
            self.graphs.close()
            self.graphs = None
        self.buffers.logits.clear()
