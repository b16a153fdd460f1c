"""Greedy text of several prompts at once against transformers, one prompt and one whole text at a time."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from load_cases import PROMPTS, greedy
from network_cases import config_of, oracle, random_tensors

from workbench.errors import InvalidInput
from workbench.models.network.build import build_network
from workbench.models.network.config import cut_network
from workbench.models.network.generate import generate
from workbench.models.network.network import Network
from workbench.runtime.kv_cache import KVCache

COUNT = 9


@cache
def expected(case: str) -> list[list[int]]:
    model = oracle(case, random_tensors(config_of(case)))
    return [greedy(model, prompt, COUNT) for prompt in PROMPTS]


def network(case: str, **options: str) -> Network:
    config = config_of(case)
    return build_network(config, random_tensors(config), quant="fp32", moe_backend="reference", **options)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(
    ("case", "prefill", "decode"),
    [
        ("llama", "expanded", "absorbed"),
        ("mixtral", "expanded", "absorbed"),
        ("deepseek_v3", "expanded", "absorbed"),
        ("deepseek_v3", "absorbed", "expanded"),
    ],
)
def test_text_of_a_batch_is_that_of_each_prompt(case: str, prefill: str, decode: str, page_size: int) -> None:
    """Prompts of 6, 3 and 11 tokens; Mixtral's window is 5 tokens, which all of them leave behind."""
    model = network(case, mla_prefill=prefill, mla_decode=decode)
    made = generate(model, KVCache.for_network, PROMPTS, COUNT, page_size=page_size)
    assert made == expected(case)
    assert len({tuple(row) for row in made}) == len(PROMPTS)


def test_a_sequence_ends_at_its_own_end() -> None:
    wanted = expected("llama")
    end = wanted[1][2]
    made = generate(network("llama"), KVCache.for_network, PROMPTS, COUNT, eos=end)
    cut = [row[: row.index(end) + 1] if end in row else row for row in wanted]
    assert len(cut[1]) <= 3
    assert any(len(row) == COUNT for row in cut)
    assert made == cut
    both = generate(network("llama"), KVCache.for_network, PROMPTS[1:2], COUNT, eos={end, 999})
    assert both == cut[1:2]


def test_one_token_needs_no_decode() -> None:
    assert generate(network("llama"), KVCache.for_network, PROMPTS, 1) == [row[:1] for row in expected("llama")]
    assert generate(network("llama"), KVCache.for_network, [], 3) == []


def test_tensors_are_prompts_too() -> None:
    made = generate(network("llama"), KVCache.for_network, [torch.tensor(PROMPTS[0], dtype=torch.int32)], 2)
    assert made == [expected("llama")[0][:2]]


def test_bad_prompts_are_refused() -> None:
    model = network("llama")
    for prompts, count, pattern in (
        ([[]], 3, r"prompts\[0\]: must have at least one token"),
        ([[1], [5, 101]], 3, r"prompts\[1\]: tokens must be from 0 to 100, not 5 to 101"),
        ([[-1]], 3, r"prompts\[0\]: tokens must be from 0 to 100"),
        ([[1]], 0, "max_new_tokens: must be at least 1, not 0"),
    ):
        with pytest.raises(InvalidInput, match=pattern):
            generate(model, KVCache.for_network, prompts, count)


def test_a_rank_of_several_makes_no_text() -> None:
    config = cut_network(config_of("mixtral", vocab_size=102), tp_size=3)
    rank = build_network(config, random_tensors(config), quant="fp32", moe_backend="reference")
    with pytest.raises(InvalidInput, match="tp_size: generation needs a whole network, tp_size 1; this is one rank of"):
        generate(rank, KVCache.for_network, [[1]], 1)
