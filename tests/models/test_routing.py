"""Synthetic routings: no repeats, the promised balance or skew, determinism, speed of the largest."""

from __future__ import annotations

import time

import pytest
import torch
from moe_kernels import Routing

from workbench.models.routing import synthetic_ids, synthetic_weights, windows
from workbench.models.seeding import derive_seed, normal_rows
from workbench.modes import RoutingKind

KINDS = [RoutingKind.BALANCED, RoutingKind.UNIFORM, RoutingKind.ZIPF, RoutingKind.SINGLE_EXPERT]
SHAPES = [(8, 2), (64, 6), (128, 8), (7, 5), (5, 4), (1, 1), (4, 4), (256, 8)]


def distinct(ids: torch.Tensor) -> int:
    return int(ids.unique().numel())


@pytest.mark.parametrize("tokens", [1, 7, 67])
@pytest.mark.parametrize(("experts", "top_k"), SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_no_token_chooses_an_expert_twice(kind: RoutingKind, experts: int, top_k: int, tokens: int) -> None:
    for ids in synthetic_ids(kind, tokens, experts, top_k, 5, 1.2, seed=3):
        assert ids.dtype == torch.int32
        assert ids.shape == (tokens, top_k)
        assert 0 <= int(ids.min()) <= int(ids.max()) < experts
        assert all(distinct(row) == top_k for row in ids)


@pytest.mark.parametrize("tokens", [1, 13, 64, 1000])
@pytest.mark.parametrize(("experts", "top_k"), SHAPES, ids=str)
def test_balanced_counts_differ_by_at_most_one(experts: int, top_k: int, tokens: int) -> None:
    for ids in synthetic_ids(RoutingKind.BALANCED, tokens, experts, top_k, 3, 1.2, seed=0):
        counts = ids.flatten().bincount(minlength=experts)
        assert int(counts.max() - counts.min()) <= 1
        assert int(counts.sum()) == tokens * top_k


@pytest.mark.parametrize("kind", KINDS)
def test_routings_of_one_list_differ_and_come_again_by_seed(kind: RoutingKind) -> None:
    first = synthetic_ids(kind, 16, 64, 6, 8, 1.2, seed=5)
    again = synthetic_ids(kind, 16, 64, 6, 3, 1.2, seed=5)
    other = synthetic_ids(kind, 16, 64, 6, 8, 1.2, seed=6)
    assert all(not torch.equal(a, b) for i, a in enumerate(first) for b in first[:i])
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=False))  # the same whatever the count
    assert all(not torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize(("experts", "top_k", "tokens"), [(64, 6, 8), (128, 8, 16), (8, 2, 2), (256, 8, 32)])
def test_uniform_touches_as_many_experts_as_chance_says(experts: int, top_k: int, tokens: int) -> None:
    made = synthetic_ids(RoutingKind.UNIFORM, tokens, experts, top_k, 200, 1.2, seed=1)
    mean = sum(map(distinct, made)) / len(made)
    expected = experts * (1 - (1 - top_k / experts) ** tokens)
    assert mean == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("exponent", [0.5, 1.0, 1.5])
def test_zipf_first_choices_follow_the_power_law(exponent: float) -> None:
    ids = torch.cat(synthetic_ids(RoutingKind.ZIPF, 4000, 16, 1, 10, exponent, seed=2)).flatten()
    shares = ids.bincount(minlength=16).sort(descending=True).values / len(ids)
    law = torch.arange(1, 17, dtype=torch.float64) ** -exponent
    assert torch.allclose(shares.double(), law / law.sum(), atol=0.012)


def test_zipf_keeps_its_popular_experts_over_routings() -> None:
    tops = {int(ids.flatten().mode().values) for ids in synthetic_ids(RoutingKind.ZIPF, 512, 64, 2, 6, 1.5, seed=4)}
    assert len(tops) == 1


def test_zipf_of_the_largest_exponent_stays_finite() -> None:
    (ids,) = synthetic_ids(RoutingKind.ZIPF, 64, 512, 8, 1, 10.0, seed=0)
    assert all(distinct(row) == 8 for row in ids)


def test_single_expert_rotates_through_all() -> None:
    made = synthetic_ids(RoutingKind.SINGLE_EXPERT, 9, 64, 8, 8, 1.2, seed=0)
    assert [distinct(ids) for ids in made] == [8] * 8
    assert distinct(torch.cat(made)) == 64


def test_model_routing_is_not_made_here() -> None:
    with pytest.raises(ValueError, match="router"):
        synthetic_ids(RoutingKind.MODEL, 1, 8, 2, 1, 1.2, seed=0)


def test_weights_are_positive_and_sum_to_one() -> None:
    weights = synthetic_weights(100, 6, 0, seed=9)
    assert weights.dtype == torch.float32
    assert bool((weights > 0).all())
    assert torch.allclose(weights.sum(dim=-1), torch.ones(100))
    assert bool((weights.diff(dim=-1) <= 0).all())


def test_windows_follow_one_another_then_overlap() -> None:
    pool = Routing(torch.ones(4, 1), torch.arange(4, dtype=torch.int32)[:, None])
    rows = [[r.topk_ids.flatten().tolist() for r in windows(pool, 2, count)] for count in (2, 4)]
    assert rows == [[[0, 1], [2, 3]], [[0, 1], [1, 2], [2, 3], [3, 0]]]
    assert [r.topk_ids.flatten().tolist() for r in windows(pool, 4, 2)] == [[0, 1, 2, 3], [2, 3, 0, 1]]
    assert len(windows(pool, 1, 9)) == 9


@pytest.mark.parametrize("kind", KINDS)
def test_fifty_routings_of_4096_tokens_take_seconds(kind: RoutingKind) -> None:
    start = time.monotonic()
    made = synthetic_ids(kind, 4096, 256, 8, 50, 1.2, seed=0)
    assert len(made) == 50
    assert time.monotonic() - start < 15  # about 2 s on two free cores


def test_seeds_use_all_their_parts() -> None:
    seeds = {derive_seed(seed, "w1", expert) for seed in (0, 1, 2**16, 2**30) for expert in range(300)}
    assert len({seed & 0xFFFFFFFF for seed in seeds}) == len(seeds) == 1200  # the CPU generator keeps 32 bits


def test_fewer_rows_are_the_first_of_more() -> None:
    many = normal_rows(2500, 8, 0, "x")
    assert torch.equal(normal_rows(7, 8, 0, "x"), many[:7])
    assert many.std().item() == pytest.approx(1.0, abs=0.02)
    assert normal_rows(0, 8, 0, "x").shape == (0, 8)
