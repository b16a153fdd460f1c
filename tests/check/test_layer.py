"""What the check catches, and in which part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from moe_kernels import ExpertWeights, Quant, Routing, fused_experts
from moe_kernels.testing.oracle import random_problem

from workbench.check.layer import Variant, check_layer, distinct_outputs
from workbench.check.oracle import dequantized
from workbench.check.truth import Problem, Truth, TruthCache, find_truth
from workbench.record import Correctness
from workbench.runtime.inputs import Inputs


class Source:
    """Stands for a `LayerSource` over given weights."""

    class shape:  # noqa: N801 - an attribute of that name
        top_k, num_experts = 2, 4

    def __init__(self, weights: ExpertWeights, dense: torch.Tensor | None = None) -> None:
        self.expert = dequantized(weights)
        self._dense = dense
        self.asked = 0

    def dense_output(self, x: torch.Tensor) -> torch.Tensor | None:
        self.asked += 1
        return None if self._dense is None else self._dense[: x.shape[0]]


@pytest.fixture(params=list(Quant))
def bench(request: pytest.FixtureRequest) -> Any:
    return Bench(request.param)


class Bench:
    def __init__(self, quant: str, tokens: int = 9) -> None:
        x, master, routing = random_problem(tokens + 1, 4, 64, 32, 2)
        self.weights = ExpertWeights.from_dense(master.w1, master.w2, quant)
        low = x.to(self.weights.dtype)
        second = Routing(routing.topk_weights[1:].contiguous(), routing.topk_ids[1:].contiguous())
        first = Routing(routing.topk_weights[:-1].contiguous(), routing.topk_ids[:-1].contiguous())
        self.problems = (
            Problem(x=low[:-1], x_float32=x[:-1], routing=first),
            Problem(x=low[1:], x_float32=x[1:], routing=second),
        )
        self.source: Any = Source(master)
        self.inputs = Inputs(self.problems[0].x, first)
        self.truth: Truth = find_truth(self.source, self.weights, self.problems[0], 0)

    def layer(self, x: torch.Tensor, w: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return fused_experts(x, self.weights, Routing(w, ids), impl="reference")

    def check(self, backend: Callable[..., Any], **kind: Any) -> Correctness:
        def run() -> Any:
            return backend(self.inputs.x, self.inputs.topk_weights, self.inputs.topk_ids)

        variant = Variant(**{"run": run, "eager": lambda: self.inputs.call(self.layer), **kind})
        return check_layer(variant, self.inputs, self.problems, self.truth, lambda: None)[0]


def test_right_is_right(bench: Bench) -> None:
    found = bench.check(bench.layer)
    assert found.passed
    assert found.reason == ""
    assert found.ratio is not None
    assert 0 <= found.ratio < 1
    assert found.mode is None
    assert found.bitwise is None
    assert (found.rows_checked, found.rows) == (9, 9)
    assert found.total.relative_l2 is not None
    assert found.kernel.relative_l2 is not None
    assert found.total.relative_l2 >= 0.9 * found.kernel.relative_l2


def swapped(bench: Bench) -> Callable[..., torch.Tensor]:
    w1, w2 = bench.weights.dequantize()
    turned = ExpertWeights.from_dense(torch.cat((w1[:, 32:], w1[:, :32]), dim=1), w2, bench.weights.quant.value)
    return lambda x, w, ids: fused_experts(x, turned, Routing(w, ids), impl="reference")


@pytest.mark.parametrize(
    "wrong",
    [
        lambda b: lambda x, w, ids: torch.zeros_like(x),
        lambda b: lambda x, w, ids: b.layer(x, torch.ones_like(w), ids),  # router weights dropped
        lambda b: lambda x, w, ids: b.layer(x, w * 1.05, ids),
        lambda b: lambda x, w, ids: b.layer(x, w, ids.roll(1, 0)),  # the neighbour's experts
        lambda b: lambda x, w, ids: b.layer(x, w, ids) * torch.tensor([[1.0]] * 8 + [[2.0]]).to(x.dtype),  # last row
        swapped,
    ],
    ids=["zeros", "weights dropped", "5 % scale", "other experts", "last row", "gate and up swapped"],
)
def test_the_budget_catches(bench: Bench, wrong: Callable[[Bench], Callable[..., Any]]) -> None:
    found = bench.check(wrong(bench))
    assert not found.passed
    assert found.ratio is not None
    assert found.ratio > 1
    assert "above the budget" in found.reason


def in_place(bench: Bench) -> Callable[..., torch.Tensor]:
    def backend(x: torch.Tensor, w: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        out = bench.layer(x, w, ids)
        x.copy_(out)
        return out

    return backend


def unwritten_row(bench: Bench) -> Callable[..., torch.Tensor]:
    def backend(x: torch.Tensor, w: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        out = bench.layer(x, w, ids).clone()
        out[5] = float("nan")
        return out

    return backend


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (in_place, "wrote to its inputs"),
        (unwritten_row, "1 of 9 rows hold NaN"),
        (lambda b: lambda *a: b.layer(*a)[:-1], "[8, 64], not [9, 64]"),
        (lambda b: lambda *a: b.layer(*a).double(), "float64"),
        (lambda b: lambda *a: None, "NoneType"),
    ],
    ids=["in place", "unwritten", "shape", "dtype", "nothing"],
)
def test_form_is_checked_too(bench: Bench, wrong: Callable[[Bench], Callable[..., Any]], words: str) -> None:
    found = bench.check(wrong(bench))
    assert not found.passed
    assert found.ratio is None
    assert words in found.reason


def test_compiled_is_held_to_eager_within_the_budget(bench: Bench) -> None:
    good = bench.check(lambda x, w, ids: bench.layer(x, w, ids), compiled=True)
    assert good.passed
    assert good.mode is not None
    assert good.mode.relative_l2 == 0.0
    assert good.mode_budget == good.kernel_budget
    assert good.bitwise is None
    runs = []

    def right_once(x: torch.Tensor, w: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return bench.layer(x, w, ids) * (1 if len(runs) == 1 else 1.2)  # wrong for the second problem alone

    bad = bench.check(right_once, compiled=True)
    assert not bad.passed
    assert "eager run" in bad.reason


def test_a_replay_must_repeat_eager_bit_for_bit(bench: Bench) -> None:
    output = torch.empty_like(bench.problems[0].x)

    def replay(x: torch.Tensor, w: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return output.copy_(bench.layer(x, w, ids))

    eager = lambda: bench.inputs.call(bench.layer)  # noqa: E731
    good = bench.check(replay, uncaptured=eager, output=output)
    assert good.passed
    assert good.bitwise is True

    first: list[torch.Tensor] = []

    def stale(x: torch.Tensor, w: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        first.append(bench.layer(x, w, ids).clone())
        return output.copy_(first[0])  # what was captured, whatever the inputs

    bad = bench.check(stale, uncaptured=eager, output=output)
    assert not bad.passed
    assert bad.bitwise is False
    assert "replay differs" in bad.reason

    def never_writes(x: torch.Tensor, w: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return output

    unwritten = bench.check(never_writes, uncaptured=eager, output=output)
    assert "9 of 9 rows hold NaN" in unwritten.reason


def test_what_does_not_repeat_itself_is_held_to_the_budget_alone() -> None:
    bench = Bench("bf16")
    output = torch.empty_like(bench.problems[0].x)
    calls = []

    def atomics() -> torch.Tensor:
        calls.append(1)
        out = bench.inputs.call(bench.layer)
        out[0, 0] *= 1 + 2**-7 * (len(calls) % 2)
        return out

    found = bench.check(lambda x, w, ids: output.copy_(bench.layer(x, w, ids)), uncaptured=atomics, output=output)
    assert found.bitwise is None
    assert found.passed


def test_atomics_are_excused_from_the_bits_and_from_nothing_else() -> None:
    bench = Bench("bf16")
    output = torch.empty_like(bench.problems[0].x)
    eager = lambda: bench.inputs.call(bench.layer)  # noqa: E731

    def replay(factor: float) -> Callable[..., torch.Tensor]:
        return lambda x, w, ids: output.copy_(bench.layer(x, w, ids) * factor)

    near = bench.check(replay(1 + 2**-8), uncaptured=eager, output=output)
    assert near.bitwise is False
    assert not near.passed
    excused = bench.check(replay(1 + 2**-8), uncaptured=eager, output=output, repeatable=False)
    assert excused.bitwise is None
    assert excused.passed
    far = bench.check(replay(1.05), uncaptured=eager, output=output, repeatable=False)
    assert far.bitwise is None
    assert not far.passed
    assert "above the budget" in far.reason


def test_different_results_are_counted_bit_for_bit() -> None:
    made = iter([1.0, 1.0, 2.0, 1.0, -0.0, 0.0, 2.0, float("nan")])
    out = torch.empty(2, 3)
    assert distinct_outputs(lambda: out.fill_(next(made)), 8) == 5  # 1, 2, -0, 0 and NaN; the output is overwritten
    same = torch.full((3,), float("nan"))
    assert distinct_outputs(lambda: same, 3) == 1


def test_experts_that_do_not_add_up_to_the_mlp() -> None:
    bench = Bench("fp32")

    class Whole(Source):
        class shape:  # noqa: N801
            top_k = num_experts = 4

    right = find_truth(bench.source, bench.weights, bench.problems[0], 0).total
    for dense, passed in ((right.float(), True), (1.01 * right.float(), False)):
        source: Any = Whole(bench.weights, dense)
        bench.truth = find_truth(source, bench.weights, bench.problems[0], 0)
        assert bench.truth.complete
        found = bench.check(bench.layer)
        assert found.passed is passed
        assert passed or "do not add up to the whole MLP" in found.reason


def test_truths_are_kept_and_bounded() -> None:
    bench = Bench("fp32")
    cache = TruthCache(size=2)

    def ask(key: str) -> Truth:
        return cache.find(key, bench.source, bench.weights, bench.problems[0], 0)

    before = bench.source.asked
    first = ask("a")
    assert ask("a") is first
    ask("b")
    ask("c")
    assert bench.source.asked - before == 3
    assert ask("a") is not first
