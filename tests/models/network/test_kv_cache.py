"""Pages, who has them, and the batches that say where rows go."""

from __future__ import annotations

import pytest
import torch
from network_cases import CPU, config_of

from workbench.errors import InvalidInput
from workbench.models.network.batch import decode_batch, prefill_batch
from workbench.runtime.kv_cache import KVCache


def cache_of(case: str, batch_size: int = 2, max_len: int = 8, page_size: int = 3, form: str = "absorbed") -> KVCache:
    return KVCache(config_of(case), batch_size, max_len, page_size, torch.float32, CPU, mla_decode=form)


def test_pages_are_dealt_in_turn_from_the_last() -> None:
    cache = cache_of("llama")
    assert cache.page_table.tolist() == [[5, 3, 1], [4, 2, 0]]
    assert cache.page_table.dtype == torch.int32
    assert len(cache.layers) == 2
    assert cache.layers[0].k.shape == cache.layers[0].v.shape == (6, 3, 2, 10)
    assert cache.nbytes == 2 * 2 * 6 * 3 * 2 * 10 * 4


def test_latent_and_expanded_layouts() -> None:
    kept = cache_of("deepseek_v2").layers[0]
    assert kept.latent is not None
    assert kept.latent.shape == (6, 3, 40)
    assert (kept.k.shape, kept.v.shape) == ((6, 3, 1, 40), (6, 3, 1, 32))
    assert kept.k.data_ptr() == kept.v.data_ptr() == kept.latent.data_ptr()
    expanded = cache_of("deepseek_v2", form="expanded").layers[0]
    assert expanded.latent is None
    assert (expanded.k.shape, expanded.v.shape) == ((6, 3, 4, 20), (6, 3, 4, 10))
    config = config_of("deepseek_v2")
    for form in ("absorbed", "expanded"):
        cache = cache_of("deepseek_v2", 1, 9, 3, form)
        assert cache.nbytes == 9 * config.kv_bytes_per_token(4, form)


def test_rows_are_written_to_their_slots_and_nowhere_else() -> None:
    cache = cache_of("llama")
    cache.reset()
    batch = prefill_batch([torch.arange(5), torch.arange(1)], cache, [0, 4])
    assert batch.slots_S.tolist() == [15, 16, 17, 9, 10, 7]
    assert batch.positions_S.tolist() == [0, 1, 2, 3, 4, 4]
    assert batch.cu_seqlens.tolist() == [0, 5, 6]
    assert batch.seq_lens_B.tolist() == [5, 5]
    assert batch.prefix_lens_B is not None
    assert batch.prefix_lens_B.tolist() == [0, 4]
    assert batch.last_S.tolist() == [4, 5]
    k, v = torch.rand(6, 2, 10), torch.rand(6, 2, 10)
    cache.layers[1].write(k, v, batch.slots_S)
    flat = cache.layers[1].k.flatten(0, 1)
    assert torch.equal(flat[batch.slots_S], k)
    assert int(flat[:, 0, 0].isnan().sum()) == 18 - 6
    assert torch.equal(cache.layers[1].v.flatten(0, 1)[batch.slots_S], v)
    assert bool(cache.layers[0].k.isnan().all())
    copy = cache.layers[1].upcast()
    copy.fill(0.0)
    assert torch.equal(cache.layers[1].k.flatten(0, 1)[batch.slots_S], k)


def test_decode_takes_positions_in_three_ways() -> None:
    cache = cache_of("deepseek_v2")
    tokens = torch.tensor([4, 9])
    one, each, tensor = (decode_batch(tokens, cache, p) for p in (7, [7, 7], torch.tensor([7, 7])))
    for batch in (one, each, tensor):
        assert batch.kind == "decode"
        assert batch.slots_S.tolist() == [4, 1]  # third pages are 1 and 0, offset 1
        assert batch.seq_lens_B.tolist() == [8, 8]
        assert batch.cu_seqlens.tolist() == [0, 1, 2]
        assert (batch.token_ids_S.dtype, batch.positions_S.dtype) == (torch.int64, torch.int64)
    assert decode_batch(tokens, cache, [0, 5]).slots_S.tolist() == [15, 8]


def test_what_does_not_fit_is_refused_with_both_numbers() -> None:
    cache = cache_of("llama")
    ids = torch.zeros(2, 8, dtype=torch.int64)
    prefill_batch(ids, cache)
    for rows, start, message in (
        (torch.zeros(2, 9, dtype=torch.int64), 0, "input_len: the cache has room for 8 tokens a sequence, not 9"),
        (ids, [1, 0], "input_len: the cache has room for 8 tokens a sequence, not 9"),
        (torch.zeros(3, 1, dtype=torch.int64), 0, "batch_size: the cache has room for 2 sequences, not 3"),
        (torch.zeros(2, 0, dtype=torch.int64), 0, "token_ids: every sequence must have at least one token"),
        (ids[:1], [0, 0], "start: must be one number or 1"),
    ):
        with pytest.raises(InvalidInput, match=message):
            prefill_batch(rows, cache, start)
    tokens = torch.zeros(2, dtype=torch.int64)
    for position, message in (
        (8, "room for 8 tokens a sequence, not 9"),
        ([1], "one number or 2"),
        ([-1, 0], "at least 0"),
    ):
        with pytest.raises(InvalidInput, match=message):
            decode_batch(tokens, cache, position)
    with pytest.raises(InvalidInput, match="room for 2 sequences, not 3"):
        decode_batch(torch.zeros(3, dtype=torch.int64), cache, 0)
    with pytest.raises(InvalidInput, match="page_size: must be at least 1, not 0"):
        cache_of("llama", page_size=0)
    with pytest.raises(InvalidInput, match="mla_decode: must be absorbed or expanded, not 'both'"):
        cache_of("llama", form="both")
