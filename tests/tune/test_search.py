"""The search, on a bench that is no GPU: it finds the fastest, drops what is wrong, and stays within its time."""

import itertools

import pytest
from fake_bench import Clock, FakeBench, costs
from moe_kernels.tuning.names import Problem

from workbench.tune.candidates import candidates, compatible
from workbench.tune.search import LEAST_FINAL, LONG_SAMPLES, TIE, describe, search

H200 = 232448


def grids(tokens=32, most=30):
    problem = Problem(tokens, 128, 2048, 768, 8, "bf16")
    return tuple(candidates(which, problem, H200, most=most).kept for which in ("up", "down"))


def fastest(ups, downs, us=costs):
    pairs = [
        {"up": up, "down": down, "PDL": pdl}
        for up, down, pdl in itertools.product(ups, downs, (False, True))
        if compatible(up, down)
    ]
    return min(pairs, key=us)


@pytest.mark.parametrize("tokens", [1, 8, 32, 128, 4096])
def test_the_fastest_pair_is_found(tokens):
    ups, downs = grids(tokens)
    bench = FakeBench(costs)
    result = search(ups, downs, bench)
    assert result.best.us == costs(fastest(ups, downs))
    assert result.timed == len(ups) + len(downs)
    assert (result.left, result.dropped, result.lost) == (0, [], "")
    opened = len(bench.opened)
    assert bench.closed == opened


def test_a_wrong_candidate_is_named_and_dropped_however_fast():
    ups, downs = grids()
    wrong = fastest(ups, downs)["up"]

    def fault(config):
        return "wrong: error 3.00e-01 above the budget of 1.00e-02" if config["up"] == wrong else ""

    bench = FakeBench(costs, fault)
    result = search(ups, downs, bench)
    left = [row for row in ups if row != wrong]
    assert result.best.us == costs(fastest(left, downs))
    assert result.best.config["up"] != wrong
    assert all(timed.config["up"] != wrong for timed in result.finalists)
    assert all(config["up"] != wrong for config in bench.samples)
    assert any("wrong: error 3.00e-01 above" in text and "inline" in text for text in result.dropped)


def test_only_whole_layers_decide():
    """A pair whose halves are each good beside others may be bad together."""
    ups, downs = grids(8)
    best = fastest(ups, downs)

    def us(config):
        together = config["up"] == best["up"] and config["down"] == best["down"]
        return costs(config) + (500 if together else 0)

    result = search(ups, downs, FakeBench(us))
    assert result.best.config["up"] != best["up"] or result.best.config["down"] != best["down"]
    assert result.best.us < 500


def test_ties_stay_at_what_was_there():
    ups, downs = grids()
    winner = fastest(ups, downs)
    us = costs(winner)
    old = {"up": {**ups[0], "GROUP_SIZE_M": 2}, "down": {**downs[0], "GROUP_SIZE_M": 2}, "PDL": False}

    def at(old_us):
        return FakeBench(lambda config: old_us if config == old else costs(config))

    assert search(ups, downs, at(us), known=[old]).best.config == old
    assert search(ups, downs, at(us * (1 + TIE / 2)), known=[old]).best.config == old
    assert search(ups, downs, at(us * (1 + 3 * TIE)), known=[old]).best.config == winner
    assert search(ups, downs, at(us / 2), known=[old]).best.us == us / 2


def test_an_old_row_that_is_wrong_now_does_not_stay():
    ups, downs = grids()
    old = {"up": {**ups[0], "GROUP_SIZE_M": 2}, "down": downs[0], "PDL": False}
    result = search(
        ups, downs, FakeBench(lambda c: 1.0 if c == old else costs(c), lambda c: "wrong" * (c == old)), known=[old]
    )
    assert result.best.config != old


def test_finalists_are_interleaved():
    ups, downs = grids(8, most=10)
    bench = FakeBench(costs)
    result = search(ups, downs, bench)
    count = len(result.finalists)
    assert count >= 10
    assert bench.expected == bench.opened[-count:]
    last = bench.samples[-count:]
    assert [describe(config) for config in last] == [describe(timed.config) for timed in result.finalists]


def test_hopeless_candidates_are_given_up_early():
    ups, downs = grids(8, most=20)
    taken = {}

    def us(config):
        taken[describe(config)] = taken.get(describe(config), 0) + 1
        return 1000.0 if config["up"] != ups[0] else 10.0

    search(ups, downs, FakeBench(us))
    slow = [
        count
        for key, count in taken.items()
        if "up " + key.split(",")[0][3:] != describe({"up": ups[0], "down": downs[0]}).split(",")[0]
    ]
    assert min(slow) == 5


def test_the_budget_is_kept_and_what_was_found_is_compared():
    ups, downs = grids(32, most=60)
    clock = Clock()
    bench = FakeBench(costs, clock=clock, open_s=1.0)
    result = search(ups, downs, bench, seconds=40.0, clock=clock)
    assert clock.now < 40.0 + 3.0
    assert result.best is not None
    assert result.left > 0
    assert result.timed + result.left >= len(ups) + len(downs)
    whole = FakeBench(costs, clock=Clock(), open_s=1.0)
    assert search(ups, downs, whole, seconds=1e9, clock=whole.clock).left == 0


def test_a_lost_device_ends_the_search_with_a_reason():
    ups, downs = grids()
    bench = FakeBench(costs, lost_after=10)
    result = search(ups, downs, bench)
    assert result.lost == "an illegal memory access was encountered"
    assert result.best is None
    assert len(bench.opened) == 11


def test_nothing_that_runs_gives_nothing():
    ups, downs = grids(8, most=5)
    result = search(ups, downs, FakeBench(costs, lambda config: "cannot run: OutOfResources"))
    assert result.best is None
    assert len(result.dropped) == len(ups) + len(downs)


def test_the_comparison_of_layers_ends_with_the_budget_after_a_few_turns():
    ups, downs = grids(8, most=4)
    bench = FakeBench(lambda config: 1e6)
    result = search(ups, downs, bench, seconds=1.0, clock=bench.clock)
    count = len(result.finalists)
    assert count >= 1
    assert all(bench.samples.count(timed.config) >= LEAST_FINAL for timed in result.finalists)
    assert len(bench.samples) <= 2 * LONG_SAMPLES + count * LEAST_FINAL
