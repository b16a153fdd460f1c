"""A stand-in for the worker process, and panels on it that write into a temporary folder."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from workbench.record import Correctness, Difference, Environment, Metric, Record
from workbench.spec import RunSpec
from workbench.widgets import SweepPanel


class StandIn:
    """An engine without a process: `latency` decides, `hold` keeps a point until it is set or the sweep is stopped."""

    def __init__(self, latency: Callable[[RunSpec], float] | None = None) -> None:
        self.latency = latency or (lambda spec: 100.0 + spec.point.num_tokens)
        self.wall: Callable[[RunSpec], float] | None = None  # as on a GPU: the time with host launches
        self.hold: threading.Event | None = None
        self.reached = threading.Event()
        self.calls = 0
        self.closed = 0
        self.environment = Environment(device_type="cpu", device_name="Test CPU", torch="2.13.0")

    def run(self, spec: RunSpec, *, progress: Any = None, stop: threading.Event | None = None) -> Record:
        self.calls += 1
        for state in ("starting", "warming", "checking", "measuring"):
            if progress is not None:
                progress(state, f"{state} {spec.point.num_tokens} tokens")
        self.reached.set()
        while self.hold is not None and not self.hold.wait(0.005):
            if stop is not None and stop.is_set():
                return Record(spec=spec, status="cancelled", reason="stopped", environment=self.environment)
        try:
            time = self.latency(spec)
        except MemoryError as error:
            return Record(spec=spec, status="out_of_memory", reason=str(error), environment=self.environment)
        metrics = {"latency": Metric.from_samples([time * 0.99, time, time * 1.01], "us")}
        if self.wall is not None:
            metrics["wall"] = Metric.from_samples([self.wall(spec)], "us")
        small = Difference(relative_l2=1e-3, max_over_rms=1e-2, dissimilarity=1e-6)
        return Record(
            spec=spec,
            status="ok",
            metrics=metrics,
            environment=self.environment,
            correctness=Correctness(
                total=small, kernel=small, kernel_budget=2e-3, ratio=0.5, rows_checked=1, rows=1, passed=True
            ),
            command=spec.command,
        )

    def request_stop(self) -> None:
        """The stop event is enough."""

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def engine() -> StandIn:
    return StandIn()


@pytest.fixture
def make_panel(engine: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., SweepPanel]]:
    """Makes panels on the stand-in engine, on the CPU, without recordings; closes them at the end."""
    from workbench.sweeps.results import Results

    monkeypatch.setattr("workbench.widgets.panel.recordings", Results)
    made: list[SweepPanel] = []

    def make(spec: Any = None, **options: Any) -> SweepPanel:
        given = {"engine": engine, "out": tmp_path / "results", "device": "cpu"} | options
        made.append(SweepPanel(spec, **given))
        return made[-1]

    yield make
    for panel in made:
        panel.close()


@pytest.fixture
def panel(make_panel: Callable[..., SweepPanel]) -> SweepPanel:
    return make_panel()


@pytest.fixture
def drawn() -> Callable[[SweepPanel], list[float | None]]:
    """`drawn(panel)`: the points in the lines of the latency figure."""

    def points(panel: SweepPanel) -> list[float | None]:
        figure = panel.figures.figures[0]
        return [y for t in figure.data if t.visible is True and t.mode == "lines+markers" for y in t.y]

    return points
