"""The plan: what runs, what does not and why, and how long."""

from __future__ import annotations

import pytest
from stand_in import no_graphs

from workbench.devices import DeviceInfo
from workbench.errors import InvalidInput
from workbench.spec import RunSpec
from workbench.sweeps.estimate import Clock, estimate
from workbench.sweeps.planner import duration, plan
from workbench.sweeps.spec import SweepSpec

CPU = DeviceInfo(type="cpu", name="some CPU", torch_device="cpu")


def test_points_that_cannot_run_say_why() -> None:
    sweep = SweepSpec(axes={"graph": ["disabled", "full"], "num_tokens": [1, 16]})
    planned = plan(sweep, CPU, find=no_graphs)
    assert [len(planned.points), len(planned.runnable), len(planned.skipped)] == [4, 2, 2]
    assert planned.why() == {"graph full needs a GPU.": 2}
    assert planned.estimate_s == pytest.approx(sum(point.estimate_s for point in planned.runnable))
    assert all(point.estimate_s == 0 for point in planned.skipped)
    header, rows = planned.to_table()
    assert header == ["graph", "num_tokens", "runs"]
    assert rows[2] == ["full", "1", "no: graph full needs a GPU."]
    assert rows[0][:2] == ["disabled", "1"]
    assert rows[0][2].startswith("yes, about ")
    assert "2 cannot run here" in planned.summary()


def test_compiling_is_counted_once_where_it_is_shared() -> None:
    def seconds(dynamic: bool) -> float:
        base = RunSpec().replace(dynamic=dynamic, compile="default")
        return sum(estimate(list(SweepSpec(axes={"num_tokens": [1, 2, 4, 8]}, base=base).points()), CPU))

    plain = sum(estimate(list(SweepSpec(axes={"num_tokens": [1, 2, 4, 8]}).points()), CPU))
    assert seconds(True) - plain == pytest.approx(6.0)
    assert seconds(False) - plain == pytest.approx(24.0)


def test_more_tokens_and_samples_take_longer() -> None:
    def one(**fields: object) -> float:
        return estimate([RunSpec().replace(**fields)], CPU)[0]

    assert one(num_tokens=1024) > one(num_tokens=16) > one(num_tokens=1)
    assert one(num_tokens=1024, samples=200) > 3 * one(num_tokens=1024, samples=20)


def test_the_clock_learns_from_what_was_measured() -> None:
    clock = Clock([10.0, 10.0, 10.0, 10.0])
    assert clock.remaining_s == pytest.approx(40.0)
    clock.observe(0, 40.0)
    assert clock.remaining_s == pytest.approx(30.0 * 43 / 13)
    clock.skip(1)
    clock.observe(2, 40.0)
    clock.observe(3, 40.0)
    assert clock.remaining_s == 0.0


@pytest.mark.parametrize(
    ("axes", "base", "sentence"),
    [
        ({"num_tokens": [1]}, {"model": "gpt-17"}, "model: must be smollm2-135m, mixtral-8x7b"),
        ({"num_tokens": [1]}, {"top_k": 9}, "top_k: "),
        ({"top_k": [9, 10]}, {}, "top_k: "),
        ({"num_tokens": [1]}, {"tp_size": 7}, "tp_size: "),
    ],
)
def test_a_sweep_without_one_layer_that_can_be_built_is_refused(
    axes: dict[str, list[int]], base: dict[str, object], sentence: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        plan(SweepSpec(axes=axes, base=RunSpec.from_flat(base)), CPU, find=no_graphs)
    assert str(caught.value).startswith(sentence)


def test_one_layer_that_can_be_built_is_enough() -> None:
    planned = plan(SweepSpec(axes={"top_k": [2, 9]}), CPU)
    assert [len(point.reasons) for point in planned.points] == [0, 1]
    assert planned.points[1].reasons[0].field == "top_k"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.42, "0.4 s"), (12.4, "12 s"), (60, "1 min"), (200, "3 min 20 s"), (7500, "2 h 5 min")]
)
def test_durations_read_well(seconds: float, text: str) -> None:
    assert duration(seconds) == text
