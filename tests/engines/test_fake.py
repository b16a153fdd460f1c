"""The fake engine behaves as the local one does, and its records say what they are."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from workbench.engines.fake import NAME, NOTE, FakeEngine
from workbench.engines.protocol import PROGRESS_STATES
from workbench.errors import DeviceBusy, InvalidInput
from workbench.record import Record, Status
from workbench.spec import RunSpec
from workbench.sweeps.runner import sweep
from workbench.sweeps.spec import SweepSpec

Point = Callable[..., RunSpec]


def test_latency_is_what_was_asked_for() -> None:
    spec = RunSpec.from_flat({"num_tokens": 8, "samples": 7})
    said: list[str] = []
    record = FakeEngine(latency=lambda spec: 3.0 * spec.point.num_tokens).run(
        spec, progress=lambda state, text: said.append(state)
    )
    assert record.status is Status.OK
    assert record.spec == spec
    assert record.latency_us == pytest.approx(24.0)
    assert record.metrics["latency"].n == 7
    assert record.correctness is not None
    assert record.correctness.passed
    assert said == ["starting", "compiling", "warming", "checking", "measuring", "done"]
    assert set(said) <= set(PROGRESS_STATES)
    assert FakeEngine(latency=lambda spec: 5.0).run(spec.replace(samples=1)).latency_us == 5.0


def test_a_record_cannot_be_taken_for_a_real_one() -> None:
    record = FakeEngine().run(RunSpec())
    assert record.source == "fake"
    assert NOTE in record.notes
    assert record.environment.device_name == NAME
    assert Record.from_json(record.to_json()) == record


@pytest.mark.parametrize("status", [s for s in Status if not s.measured])
def test_failures_of_every_kind(status: Status) -> None:
    engine = FakeEngine(fail=lambda spec: status if spec.point.num_tokens == 2 else None)
    record = engine.run(RunSpec.from_flat({"num_tokens": 2}))
    assert record.status is status
    assert record.reason
    assert record.metrics == {}
    assert engine.run(RunSpec.from_flat({"num_tokens": 4})).status is Status.OK


def test_what_cannot_run_and_what_is_no_layer() -> None:
    record = FakeEngine().run(RunSpec.from_flat({"graph": "full"}))
    assert record.status is Status.UNSUPPORTED
    assert "GPU" in record.reason
    with pytest.raises(InvalidInput, match="model"):
        FakeEngine().run(RunSpec(model="no-such-model"))


@pytest.mark.parametrize("way", ["event", "request", "close"])
def test_stop_is_quick(background: Any, way: str) -> None:
    engine, stop, spec = FakeEngine(delay_s=60), threading.Event(), RunSpec()
    going = background(engine, spec, stop=stop)
    while not engine.busy:
        time.sleep(0.01)
    with pytest.raises(DeviceBusy, match="going on"):
        engine.run(spec)
    start = time.monotonic()
    {"event": stop.set, "request": engine.request_stop, "close": engine.close}[way]()
    assert going.result(5).status is Status.CANCELLED
    assert time.monotonic() - start < 1
    assert not engine.busy


def test_a_sweep_runs_on_it() -> None:
    spec = SweepSpec(name="small", axes={"quant": ("fp32", "bf16"), "num_tokens": (1, 4)})
    results = sweep(spec, engine=FakeEngine(latency=lambda spec: float(spec.point.num_tokens)))
    assert [record.latency_us for record in results.records if not record.anchor] == pytest.approx([1, 4, 1, 4])
