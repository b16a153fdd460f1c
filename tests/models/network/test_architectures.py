"""Every architecture against transformers' own, in float32: prefill in two chunks, then decode, row by row."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from network_cases import CASES, CPU, config_of, oracle, random_tensors

from workbench.errors import InvalidInput
from workbench.models.network.batch import decode_batch, prefill_batch
from workbench.models.network.build import build_network
from workbench.models.network.network import Network
from workbench.runtime.kv_cache import KVCache

# Tokens of each sequence in the first chunk, in the second, and one by one.
FIRST, SECOND, STEPS = (5, 1, 8), (2, 4, 3), 3
LENGTHS = [a + b + STEPS for a, b in zip(FIRST, SECOND, strict=True)]
# float32 rounds at 6e-8; sums over a few dozen terms, in a few layers.
LIMIT = 2e-5
LATENT = [name for name in CASES if name.startswith("deepseek")]
PLAIN = [name for name in CASES if name not in LATENT]


@cache
def expected(case: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Token ids of each sequence, and the logits after each of them."""
    draw = torch.Generator().manual_seed(7)
    ids = [torch.randint(0, 101, (length,), generator=draw) for length in LENGTHS]
    model = oracle(case, random_tensors(config_of(case)))
    with torch.no_grad():
        return ids, [model(input_ids=row[None]).logits[0] for row in ids]


def network(case: str, **options: Any) -> Network:
    config = config_of(case)
    return build_network(config, random_tensors(config), quant="fp32", moe_backend="reference", **options)


def difference(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got - wanted).abs().max() / wanted.square().mean().sqrt())


@torch.no_grad()
def check(case: str, page_size: int, *, chunks: bool = True, **options: Any) -> None:
    """Rows of all passes: nothing that the cache held before may reach them."""
    ids, logits = expected(case)
    model = network(case, **options)
    assert model.dtype == torch.float32
    cache = KVCache.for_network(model, len(ids), max(LENGTHS), page_size)
    cache.reset()
    done = [0] * len(ids)
    for lengths in (FIRST, SECOND) if chunks else ([a + b for a, b in zip(FIRST, SECOND, strict=True)],):
        rows = [row[start : start + n] for row, start, n in zip(ids, done, lengths, strict=True)]
        batch = prefill_batch(rows, cache, done)
        hidden = model.hidden_states(batch, cache)
        wanted = [row[start : start + n] for row, start, n in zip(logits, done, lengths, strict=True)]
        assert difference(model.logits(hidden), torch.cat(wanted)) < LIMIT
        assert torch.equal(model.logits(hidden[batch.last_S]), model(batch, cache))
        done = [start + n for start, n in zip(done, lengths, strict=True)]
    for _ in range(STEPS):
        tokens = torch.stack([row[at] for row, at in zip(ids, done, strict=True)])
        got = model(decode_batch(tokens, cache, done), cache)
        assert got.shape == (len(ids), 101)
        assert difference(got, torch.stack([row[at] for row, at in zip(logits, done, strict=True)])) < LIMIT
        done = [at + 1 for at in done]


@pytest.mark.parametrize(("backend", "page_size"), [("reference", 3), ("sdpa", 16)])
@pytest.mark.parametrize("case", PLAIN)
def test_plain_attention(case: str, backend: str, page_size: int) -> None:
    check(case, page_size, attention_backend=backend)


@pytest.mark.parametrize(
    ("prefill", "decode", "backend", "page_size"),
    [
        ("expanded", "absorbed", "reference", 3),
        ("absorbed", "absorbed", "sdpa", 1),
        ("expanded", "expanded", "sdpa", 16),
        ("absorbed", "expanded", "reference", 3),
    ],
)
@pytest.mark.parametrize("case", LATENT)
def test_latent_attention(case: str, prefill: str, decode: str, backend: str, page_size: int) -> None:
    chunks = (prefill, decode) != ("absorbed", "expanded")
    check(case, page_size, chunks=chunks, attention_backend=backend, mla_prefill=prefill, mla_decode=decode)


@torch.no_grad()
def test_absorbed_prefill_over_an_expanded_prefix_is_refused() -> None:
    model = network("deepseek_v2", attention_backend="reference", mla_prefill="absorbed", mla_decode="expanded")
    cache = KVCache.for_network(model, 1, 8, 3)
    ids = torch.zeros(1, 4, dtype=torch.int64, device=CPU)
    model(prefill_batch(ids, cache), cache)
    with pytest.raises(InvalidInput, match=r"mla_prefill: absorbed .*; expanded is allowed"):
        model(prefill_batch(ids, cache, 4), cache)


@torch.no_grad()
def test_what_lies_past_a_prefix_reaches_no_scale() -> None:
    """With one scale for all rows, a slot that was never written would spoil every key of the prefix."""
    config = config_of("deepseek_v2")
    model = build_network(config, random_tensors(config), quant="fp8_tensor", moe_backend="reference")
    ids = torch.randint(0, 101, (2, 7), generator=torch.Generator().manual_seed(8))
    found = []
    for held in (0.0, 1e4, float("nan")):
        cache = KVCache.for_network(model, 2, 7, 5)
        for layer in cache.layers:
            layer.fill(held)
        model(prefill_batch([ids[0, :4], ids[1, :2]], cache), cache)
        found.append(model(prefill_batch([ids[0, 4:], ids[1, 2:3]], cache, [4, 2]), cache))
    assert bool(found[0].isfinite().all())
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
