"""What one forward pass reads beside the weights: tokens, where they stand, and where their keys and values go.

Shapes: S rows (tokens of all sequences, one after another), B sequences, P pages of a sequence.
"""

from __future__ import annotations

# ruff: noqa: N815  (fields carry shape suffixes, as every tensor name does)
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from workbench.errors import InvalidInput

PREFILL, DECODE = "prefill", "decode"


class LayerCache(Protocol):
    """One layer's pages, as `workbench.runtime.kv_cache` makes them.

    Attributes:
        k: `[pages, page_size, kv heads, head size]`; with a latent the one head of it.
        v: the same with the values' head size; a view of the latent where there is one.
        latent: `[pages, page_size, L]`; None where keys and values are kept.
    """

    @property
    def k(self) -> torch.Tensor: ...

    @property
    def v(self) -> torch.Tensor: ...

    @property
    def latent(self) -> torch.Tensor | None: ...

    def write(self, k: torch.Tensor, v: torch.Tensor | None, slots_S: torch.Tensor) -> None:
        """Keep `k` `[S, heads, size]` and `v`, or a latent `[S, L]` given as `k` with no `v`."""


class Cache(Protocol):
    """All layers' pages and who has which, as `workbench.runtime.kv_cache` makes them."""

    @property
    def layers(self) -> Sequence[LayerCache]: ...

    @property
    def page_table(self) -> torch.Tensor: ...

    @property
    def page_size(self) -> int: ...

    @property
    def batch_size(self) -> int: ...

    @property
    def max_len(self) -> int: ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Batch:
    """Tensors of one pass. Nothing in a pass depends on their values but results: no host reads them.

    Attributes:
        kind: `prefill` or `decode` (one row a sequence).
        token_ids_S: int64.
        positions_S: int64, in the row's own sequence, from 0.
        slots_S: int64, `page * page_size + offset`: where the row's key and value go.
        page_table_BP: int32, pages of each sequence in order.
        seq_lens_B: int32, keys of each sequence after this pass.
        cu_seqlens: int32 `[B + 1]`, where each sequence's rows begin, and S.
        prefix_lens_B: int32, keys that each sequence had before; None where none has any, and in decode.
        last_S: int64 `[B]`, each sequence's last row.
        max_prefix: the longest prefix, as a number that shapes may depend on.
    """

    kind: str
    token_ids_S: torch.Tensor
    positions_S: torch.Tensor
    slots_S: torch.Tensor
    page_table_BP: torch.Tensor
    seq_lens_B: torch.Tensor
    cu_seqlens: torch.Tensor
    last_S: torch.Tensor
    prefix_lens_B: torch.Tensor | None = None
    max_prefix: int = 0


def prefill_batch(
    token_ids: Sequence[torch.Tensor] | torch.Tensor, cache: Cache, start: int | Sequence[int] = 0
) -> Batch:
    """A pass over several tokens of each sequence; sequence b is row b of the cache.

    Args:
        token_ids: int64 `[B, S]`, or one `[S_b]` for each sequence, on the cache's device.
        cache: says which pages a sequence has.
        start: keys that the sequences have already, as one number or one for each (chunked prefill).

    Raises:
        InvalidInput: more sequences than the cache has, a sequence without tokens, or one longer than the cache.
    """
    rows = list(token_ids)
    lengths = [int(row.shape[0]) for row in rows]
    starts = [start] * len(rows) if isinstance(start, int) else [int(one) for one in start]
    if len(starts) != len(rows):
        raise InvalidInput(f"start: must be one number or {len(rows)}, one for each sequence, not {len(starts)}")
    _check(len(rows), max((s + n for s, n in zip(starts, lengths, strict=True)), default=0), cache)
    if not rows or min(lengths) < 1 or min(starts) < 0:
        raise InvalidInput("token_ids: every sequence must have at least one token, and start must be at least 0")
    device = cache.page_table.device
    positions = torch.cat([torch.arange(s, s + n, device=device) for s, n in zip(starts, lengths, strict=True)])
    lengths_B = torch.tensor(lengths, device=device)
    sequence_S = torch.repeat_interleave(torch.arange(len(rows), device=device), lengths_B, output_size=sum(lengths))
    ends_B = lengths_B.cumsum(0)
    prefix_B = torch.tensor(starts, device=device)
    return Batch(
        kind=PREFILL,
        token_ids_S=torch.cat([row.to(device, torch.int64) for row in rows]),
        positions_S=positions,
        slots_S=_slots(cache, sequence_S, positions),
        page_table_BP=cache.page_table[: len(rows)],
        seq_lens_B=(prefix_B + lengths_B).to(torch.int32),
        cu_seqlens=torch.cat([ends_B.new_zeros(1), ends_B]).to(torch.int32),
        last_S=ends_B - 1,
        prefix_lens_B=prefix_B.to(torch.int32) if max(starts) else None,
        max_prefix=max(starts),
    )


def decode_batch(token_ids_B: torch.Tensor, cache: Cache, position: int | Sequence[int] | torch.Tensor) -> Batch:
    """A pass over one token of each sequence; sequence b is row b of the cache.

    Args:
        token_ids_B: int64 `[B]` on the cache's device.
        cache: says which pages a sequence has.
        position: of the tokens, from 0: one number, one for each, or int64 `[B]` on the device, which is not looked at.

    Raises:
        InvalidInput: more sequences than the cache has, or a position past the cache.
    """
    count, device = int(token_ids_B.shape[0]), cache.page_table.device
    if isinstance(position, torch.Tensor):
        _check(count, 0, cache)
        positions = position.to(device, torch.int64)
    else:
        known = [position] * count if isinstance(position, int) else [int(one) for one in position]
        if len(known) != count:
            raise InvalidInput(f"position: must be one number or {count}, one for each sequence, not {len(known)}")
        _check(count, max(known, default=0) + 1, cache)
        if min(known, default=0) < 0:
            raise InvalidInput(f"position: must be at least 0, not {min(known)}")
        same = isinstance(position, int)
        positions = torch.full((count,), known[0], device=device) if same and known else torch.tensor(known).to(device)
    sequence_B = torch.arange(count, device=device)
    return Batch(
        kind=DECODE,
        token_ids_S=token_ids_B.to(device, torch.int64),
        positions_S=positions,
        slots_S=_slots(cache, sequence_B, positions),
        page_table_BP=cache.page_table[:count],
        seq_lens_B=(positions + 1).to(torch.int32),
        cu_seqlens=torch.arange(count + 1, device=device, dtype=torch.int32),
        last_S=sequence_B,
    )


def _slots(cache: Cache, sequence_S: torch.Tensor, positions_S: torch.Tensor) -> torch.Tensor:
    """Page 3 of a sequence, offset 2, with pages of 16: `page_table[b, 3] * 16 + 2`."""
    pages_S = cache.page_table[sequence_S, positions_S // cache.page_size].to(torch.int64)
    return pages_S * cache.page_size + positions_S % cache.page_size


def _check(sequences: int, longest: int, cache: Cache) -> None:
    if sequences > cache.batch_size:
        raise InvalidInput(f"batch_size: the cache has room for {cache.batch_size} sequences, not {sequences}")
    if longest > cache.max_len:
        raise InvalidInput(f"input_len: the cache has room for {cache.max_len} tokens a sequence, not {longest}")
