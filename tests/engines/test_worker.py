"""The whole way with the real point: a tiny layer on the CPU, in a worker."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from workbench.engines.local import LocalEngine
from workbench.record import Record, Status
from workbench.spec import RunSpec

Point = Callable[..., RunSpec]


def good(record: Record) -> bool:
    """Measured and found right."""
    assert record.status is Status.OK, f"{record.status}: {record.reason}\n{record.detail}"
    assert record.correctness is not None
    return record.correctness.passed and record.latency_us is not None and record.latency_us > 0


def test_points_in_one_worker(engine: LocalEngine, point: Point) -> None:
    states: list[str] = []
    first = engine.run(point("noisy"), progress=lambda state, text: states.append(state))
    pid = engine.pid
    second = engine.run(point(moe_backend="reference", num_tokens=7))
    assert good(first)
    assert good(second)
    assert [record.spec.point.num_tokens for record in (first, second)] == [4, 7]
    assert second.resolved["device"] == "cpu"
    assert second.environment.fingerprint == first.environment.fingerprint == engine.environment.fingerprint
    assert second.environment.roofs
    assert engine.pid == pid is not None
    assert [s for s in dict.fromkeys(states) if s != "compiling"] == [
        "starting",
        "warming",
        "checking",
        "measuring",
        "done",
    ]


@pytest.mark.parametrize(
    ("backend", "status", "words"),
    [
        ("raises", Status.RUNTIME_ERROR, ["ZeroDivisionError", "divided by nought"]),
        ("wrong", Status.INCORRECT, []),
        ("missing", Status.UNSUPPORTED, ["moe_backend", "missing"]),
    ],
)
def test_a_point_that_fails_leaves_the_worker_alone(
    engine: LocalEngine, point: Point, backend: str, status: Status, words: list[str]
) -> None:
    assert good(engine.run(point()))
    pid = engine.pid
    record = engine.run(point(backend))
    assert record.status is status
    assert record.reason
    assert all(word in record.reason for word in words), record.reason
    assert record.metrics == {}
    assert good(engine.run(point()))
    assert engine.pid == pid


def test_stop_is_heard_between_samples_and_the_worker_stays(engine: LocalEngine, point: Point) -> None:
    engine.run(point())
    pid = engine.pid
    stop = threading.Event()

    def progress(state: str, text: str) -> None:
        if state == "measuring":
            stop.set()

    start = time.monotonic()
    record = engine.run(point(samples=100_000), stop=stop, progress=progress)
    assert record.status is Status.CANCELLED
    assert time.monotonic() - start < 10
    assert good(engine.run(point()))
    assert engine.pid == pid


def test_an_abort_costs_one_point(engine: LocalEngine, point: Point) -> None:
    engine.run(point())
    pid = engine.pid
    record = engine.run(point("aborts"))
    assert record.status is Status.CRASHED
    assert "SIGABRT" in record.reason
    assert "last words before the abort" in record.detail
    assert good(engine.run(point()))
    assert engine.pid != pid
