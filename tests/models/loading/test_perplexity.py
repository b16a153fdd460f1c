"""Perplexity against the loss that transformers gives, window by window, and what formats do to it."""

from __future__ import annotations

from functools import cache
from math import exp, log

import pytest
import torch
from network_cases import config_of, oracle, random_tensors

from workbench.errors import InvalidInput
from workbench.models.network.build import build_network
from workbench.models.network.config import cut_network
from workbench.models.network.network import Network
from workbench.models.network.perplexity import perplexities, perplexity
from workbench.runtime.kv_cache import KVCache

CASE = "qwen3_moe"
TEXT = torch.randint(0, 101, (23,), generator=torch.Generator().manual_seed(3)).tolist()


@cache
def network() -> Network:
    config = config_of(CASE)
    return build_network(config, random_tensors(config), quant="fp32", moe_backend="reference")


@cache
def model() -> torch.nn.Module:
    return oracle(CASE, random_tensors(config_of(CASE)))


@torch.no_grad()
def surprises(ids: list[int]) -> list[float]:
    """`-log p` of every token but the first, by transformers and in float64."""
    logits = model()(input_ids=torch.tensor([ids])).logits[0].double()
    return [float(-logits[at - 1].log_softmax(-1)[ids[at]]) for at in range(1, len(ids))]


def mean_exp(parts: list[float]) -> float:
    return exp(sum(parts) / len(parts))


@torch.no_grad()
def test_one_window_is_the_loss_of_transformers() -> None:
    found = perplexity(network(), KVCache.for_network, TEXT, 64)
    loss = model()(input_ids=torch.tensor([TEXT]), labels=torch.tensor([TEXT])).loss
    assert log(found.value) == pytest.approx(float(loss), rel=1e-5)
    assert (found.tokens, found.windows) == (22, 1)


def test_windows_that_do_not_overlap() -> None:
    """23 tokens in windows of 7: 7, 7, 7 and 2, the first of each is not foretold."""
    found = perplexity(network(), KVCache.for_network, TEXT, 7)
    parts = [value for start in (0, 7, 14, 21) for value in surprises(TEXT[start : start + 7])]
    assert found.value == pytest.approx(mean_exp(parts), rel=1e-5)
    assert (found.tokens, found.windows) == (19, 4)


def test_windows_that_overlap_count_each_token_once() -> None:
    """Stride 3 and windows of 8: tokens 8 to 10 are foretold in the window from 3 to 10, and so on."""
    seen: list[tuple[int, int]] = []
    found = perplexity(network(), KVCache.for_network, TEXT, 8, 3, progress=lambda done, of: seen.append((done, of)))
    parts = surprises(TEXT[:8])
    for start in range(3, 18, 3):
        end = min(start + 8, 23)
        parts += surprises(TEXT[start:end])[-(end - start - 5) :]
    assert len(parts) == 22
    assert found.value == pytest.approx(mean_exp(parts), rel=1e-5)
    assert (found.tokens, found.windows) == (22, 6)
    assert seen == [(n, 6) for n in range(1, 7)]


def test_a_window_that_begins_with_a_token_of_the_models() -> None:
    """A window of 8 has 7 tokens of the text behind it, all of which are foretold."""
    found = perplexity(network(), KVCache.for_network, TEXT, 8, bos=99)
    parts = [value for start in (0, 7, 14, 21) for value in surprises([99, *TEXT[start : start + 7]])]
    assert found.value == pytest.approx(mean_exp(parts), rel=1e-5)
    assert (found.tokens, found.windows) == (23, 4)


def test_a_last_window_of_one_token_is_left_out() -> None:
    found = perplexity(network(), KVCache.for_network, TEXT[:15], 7)
    assert (found.tokens, found.windows) == (12, 2)


def test_formats_change_it_as_much_as_they_round() -> None:
    """The finer format stays nearer to float32, and a network that is given wrong weights does not."""
    config = config_of(CASE)
    found = perplexities(
        config,
        random_tensors(config),
        ["fp32", "int8_weight", "int4"],
        KVCache.for_network,
        TEXT[:12],
        64,
        group_size=32,
        moe_backend="reference",
    )
    plain = found["fp32"].value
    assert plain == perplexity(network(), KVCache.for_network, TEXT[:12], 64).value
    errors = {name: abs(log(one.value / plain)) for name, one in found.items()}
    assert 0 < errors["int8_weight"] < 0.05
    assert errors["int8_weight"] < errors["int4"] < 1


def test_bad_windows_are_refused() -> None:
    for ids, window, stride, bos, pattern in (
        (TEXT, 1, None, None, "window: must be at least 2, not 1"),
        (TEXT, 8, 9, None, "stride: must be from 1 to 8, the tokens of the text in a window, not 9"),
        (TEXT, 8, 8, 5, "stride: must be from 1 to 7"),
        (TEXT, 8, 0, None, "stride: must be from 1 to 8"),
        ([4], 8, None, None, "token_ids: must be at least 2 tokens, not 1"),
        ([4, 101], 8, None, None, "token_ids: tokens must be from 0 to 100"),
        (TEXT, 8, None, 101, "bos: tokens must be from 0 to 100"),
    ):
        with pytest.raises(InvalidInput, match=pattern):
            perplexity(network(), KVCache.for_network, ids, window, stride, bos=bos)
    config = cut_network(config_of("mixtral", vocab_size=102), tp_size=3)
    rank = build_network(config, random_tensors(config), quant="fp32", moe_backend="reference")
    with pytest.raises(InvalidInput, match="tp_size: perplexity needs a whole network"):
        perplexity(rank, KVCache.for_network, TEXT, 8)
