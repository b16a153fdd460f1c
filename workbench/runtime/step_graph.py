"""Decode steps in CUDA graphs: one graph a batch size, everything from the tokens in to the tokens out inside it.

Shapes: B sequences, P pages of a sequence, V tokens of one rank's vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from workbench.models.network.batch import DECODE, Batch
from workbench.models.network.network import Network
from workbench.runtime.full_graph import FullGraphRunner
from workbench.runtime.graph import Recorder
from workbench.runtime.kv_cache import KVCache
from workbench.runtime.step import StepRunner, next_tokens

Forward = Callable[[Batch, KVCache], torch.Tensor]


class DecodeBuffers:
    """What a captured decode step reads: a token, a position and a page table of each sequence.

    A row of padding repeats the first one: it reads and writes what that row does, the same values in the same places.
    So nothing new is read, no other expert is chosen, and the largest value of a batch stays what it is.

    Attributes:
        token_ids_B, positions_B: int64.
        page_table_BP: int32.
        logits: of each captured size, float32 `[size, V]`, filled by its replays.
    """

    def __init__(self, forward: Forward, cache: KVCache) -> None:
        """`forward` is the network, or what `torch.compile` made of it."""
        self.forward, self.cache = forward, cache
        device = cache.page_table.device
        self.token_ids_B = torch.zeros(cache.batch_size, dtype=torch.int64, device=device)
        self.positions_B = torch.zeros(cache.batch_size, dtype=torch.int64, device=device)
        self.page_table_BP = cache.page_table.clone()
        self.cu_seqlens = torch.arange(cache.batch_size + 1, dtype=torch.int32, device=device)
        self.rows_B = torch.arange(cache.batch_size, dtype=torch.int64, device=device)
        self.logits: dict[int, torch.Tensor] = {}

    @property
    def largest(self) -> int:
        """Sequences that the cache has room for."""
        return self.cache.batch_size

    def fill(self, token_ids_B: torch.Tensor, position: int) -> None:
        """Put the tokens of the first sequences in, all at one position."""
        rows = token_ids_B.shape[0]
        self.token_ids_B[:rows].copy_(token_ids_B)
        self.positions_B[:rows].fill_(position)

    def load(self, rows: int, padded: int) -> None:
        """See `Capturable`."""
        self.page_table_BP[:padded].copy_(self.cache.page_table[:padded])
        if padded > rows:
            for tensor in (self.token_ids_B, self.positions_B, self.page_table_BP):
                tensor[rows:padded] = tensor[:1]

    def batch(self, size: int) -> Batch:
        """The first `size` rows, as a pass."""
        positions_B, page_size = self.positions_B[:size], self.cache.page_size
        table_BP = self.page_table_BP[:size]
        pages_B = table_BP.gather(1, (positions_B // page_size)[:, None])[:, 0].to(torch.int64)
        return Batch(
            kind=DECODE,
            token_ids_S=self.token_ids_B[:size],
            positions_S=positions_B,
            slots_S=pages_B * page_size + positions_B % page_size,
            page_table_BP=table_BP,
            seq_lens_B=(positions_B + 1).to(torch.int32),
            cu_seqlens=self.cu_seqlens[: size + 1],
            last_S=self.rows_B[:size],
        )

    def call(self, size: int) -> torch.Tensor:
        """See `Capturable`: the next tokens, int64 `[size]`."""
        self.logits[size] = self.forward(self.batch(size), self.cache)
        return next_tokens(self.logits[size])


class GraphStepRunner(StepRunner):
    """Prefill as it comes, decode steps replayed.

    Attributes:
        graphs: of every batch size.
        buffers: that they read.
    """

    def __init__(
        self,
        network: Network,
        cache: KVCache,
        prompts_BS: torch.Tensor,
        output_len: int,
        make_recorder: Callable[[], Recorder],
        *,
        sizes: Iterable[int] = (),
        forward: Forward | None = None,
        check: Callable[[], None] = lambda: None,
        progress: Callable[[int, int, int], None] | None = None,
    ) -> None:
        """Capture at `sizes` and at the cache's own batch size; errors as `StepRunner` and `FullGraphRunner`."""
        super().__init__(network, cache, prompts_BS, output_len)
        self.buffers = DecodeBuffers(network if forward is None else forward, cache)
        # A capture's warm-up writes keys: at position 0 of every sequence, which a prefill writes anew.
        self.graphs = FullGraphRunner(self.buffers, sizes, make_recorder, progress=progress, check=check)

    def decode_tokens(self, step: int, token_ids_B: torch.Tensor) -> torch.Tensor:
        """See `StepRunner`; a static output that the next step overwrites."""
        self.buffers.fill(token_ids_B, self.input_len + step)
        return self.graphs.replay(self.batch_size)

    def decode(self, step: int, token_ids_B: torch.Tensor) -> torch.Tensor:
        """See `StepRunner`; a copy."""
        self.decode_tokens(step, token_ids_B)
        size = self.graphs.padded(self.batch_size) or self.batch_size
        return self.buffers.logits[size][: self.batch_size].clone()

    def close(self) -> None:
        """Give the graphs' memory back."""
        self.graphs.close()
        self.buffers.logits.clear()
