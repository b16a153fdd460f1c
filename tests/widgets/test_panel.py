"""The sweep panel's runs without a page: buttons are clicked, a stand-in takes the place of the worker."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ipywidgets
import pytest

from workbench.errors import InvalidInput
from workbench.spec import RunSpec
from workbench.sweeps.spec import SweepSpec
from workbench.widgets import SweepPanel
from workbench.widgets.runs import Runs

Make = Callable[..., SweepPanel]
Drawn = Callable[[SweepPanel], list[float | None]]
WAIT_S = 30


def test_run_draws_every_point_and_ends_as_done(panel: SweepPanel, engine: Any, tmp_path: Path, drawn: Drawn) -> None:
    assert (panel.state, panel.running) == ("idle", False)
    assert "12 points" in panel._plan_text.value
    panel.bar.run.click()
    results = panel.result(WAIT_S)
    assert panel.state == "done"
    assert results.totals() == "12 ok, 0 failed, 0 unsupported"
    assert sorted(drawn(panel)) == sorted([101.0, 116.0, 228.0] * 4)
    assert panel.bar.progress.value == panel.bar.progress.max == 12
    assert (tmp_path / "results" / "quick" / "records.jsonl").read_text().count("\n") >= 12
    assert panel.bar.error_view.value == ""
    assert engine.closed == 0  # an engine that was given stays open


def test_stop_in_the_middle_keeps_what_was_measured(panel: SweepPanel, engine: Any) -> None:
    import threading

    engine.hold = threading.Event()
    panel.bar.run.click()
    assert engine.reached.wait(WAIT_S)
    assert not panel.bar.stop.disabled
    panel.bar.stop.click()
    assert panel.state == "stopping"
    assert panel.bar.stop.disabled
    results = panel.result(WAIT_S)
    assert panel.state == "cancelled"
    assert [str(record.status) for record in results.records] == ["cancelled"]
    engine.hold = None
    panel.bar.run.click()
    assert len(panel.result(WAIT_S).records) >= 12
    assert panel.state == "done"


def test_a_second_press_of_run_is_refused_visibly(panel: SweepPanel, engine: Any) -> None:
    import threading

    engine.hold = threading.Event()
    panel.bar.run.click()
    assert engine.reached.wait(WAIT_S)
    panel.bar.run.click()
    assert "a sweep is running" in panel.bar.error_view.value
    with pytest.raises(InvalidInput, match="a sweep is running"):
        panel.run()
    engine.hold.set()
    assert panel.result(WAIT_S).totals().startswith("12 ok")
    assert panel.bar.error_view.value == ""


def test_bad_input_is_said_and_run_is_usable_again(panel: SweepPanel) -> None:
    panel.modes.fields["top_k"].text.value = "99"
    assert "top_k: must be from 1 to 8" in panel._plan_text.value
    panel.bar.run.click()
    assert "top_k: must be from 1 to 8" in panel.bar.error_view.value
    assert panel.bar.error_view.layout.display is None
    assert (panel.running, panel.bar.run.disabled) == (False, False)
    panel.modes.fields["top_k"].text.value = "2"
    panel.bar.run.click()
    assert panel.result(WAIT_S).totals().startswith("12 ok")
    assert panel.bar.error_view.layout.display == "none"


def test_what_the_job_raises_is_shown_escaped_and_raised_by_result(make_panel: Make) -> None:
    class Broken:
        @property
        def environment(self) -> Any:
            raise RuntimeError("<b>no driver</b>")

        def close(self) -> None:
            pass

    panel = make_panel(engine=Broken())
    panel.bar.run.click()
    with pytest.raises(RuntimeError, match="no driver"):
        panel.result(WAIT_S)
    assert panel.state == "failed"
    assert "RuntimeError: &lt;b&gt;no driver" in panel.bar.error_view.value
    assert not panel.running


def test_a_failed_point_is_a_gap_and_the_sweep_goes_on(make_panel: Make, engine: Any, drawn: Drawn) -> None:
    def latency(spec: RunSpec) -> float:
        if spec.point.num_tokens == 128 and spec.modes.quant == "fp32":
            raise MemoryError("out of <memory>")
        return 50.0

    engine.latency = latency
    panel = make_panel()
    results = panel.run(wait=True, timeout_s=WAIT_S)
    assert results is not None
    assert results.totals() == "10 ok, 2 failed, 0 unsupported"
    assert panel.state == "done"
    assert drawn(panel).count(None) == 2
    assert "NaN" not in panel.figures.figures[0].to_json()


def test_a_sweep_that_measures_nothing_fails(make_panel: Make, engine: Any) -> None:
    def broken(spec: RunSpec) -> float:
        raise MemoryError("none left")

    engine.latency = broken
    panel = make_panel()
    with pytest.raises(RuntimeError, match="measured nothing: 0 ok"):
        panel.run_to_end(timeout_s=WAIT_S)
    assert panel.state == "failed"


def test_a_second_run_gets_a_folder_of_its_own(panel: SweepPanel) -> None:
    first = panel.run(wait=True, timeout_s=WAIT_S)
    second = panel.run(wait=True, timeout_s=WAIT_S)
    assert first is not None
    assert second is not None
    assert [r.folder.name for r in (first, second) if r.folder] == ["quick", "quick-2"]


def test_running_the_cell_again_leaves_nothing_behind(
    make_panel: Make, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import psutil

    closed: list[str] = []

    class Own:
        def __init__(self, device: str) -> None:
            self.environment, self.run = engine.environment, engine.run

        def request_stop(self) -> None:
            pass

        def close(self) -> None:
            closed.append("closed")

    monkeypatch.setattr("workbench.widgets.job.local_engine", Own)
    instances = ipywidgets.widgets.widget._instances
    counts, sizes = [], []
    for _ in range(6):
        panel = make_panel(engine=None)
        panel.run(wait=True, timeout_s=WAIT_S)
        gc.collect()
        counts.append(len(instances))
        sizes.append(psutil.Process().memory_info().rss)
    assert len(set(counts[1:])) == 1, counts
    assert sizes[-1] - sizes[1] < 24 * 2**20, sizes
    assert len(closed) == 5  # every panel but the live one has ended its worker
    panel.close()
    assert len(closed) == 6


def test_late_messages_of_a_closed_or_older_job_are_dropped(panel: SweepPanel, engine: Any, drawn: Drawn) -> None:
    import threading

    engine.hold = threading.Event()
    panel.bar.run.click()
    assert engine.reached.wait(WAIT_S)
    job, pump = panel.runs.job, panel.runs._pump
    assert job is not None
    assert pump is not None
    before = (panel.state, drawn(panel))
    panel.runs._generation += 1  # as a newer job would
    engine.hold.set()
    assert job.finished.wait(WAIT_S)
    pump.join(WAIT_S)
    assert (panel.state, drawn(panel)) == before
    assert panel.runs.last is None


def test_updates_are_coalesced(make_panel: Make, monkeypatch: pytest.MonkeyPatch, drawn: Drawn) -> None:
    calls: list[float] = []
    import time

    original = Runs._tell

    def count(self: Runs, *rest: Any) -> None:
        calls.append(time.monotonic())
        original(self, *rest)

    monkeypatch.setattr(Runs, "_tell", count)
    panel = make_panel(SweepSpec(axes={"num_tokens": tuple(range(1, 401))}, base=RunSpec(device="cpu")))
    began = time.monotonic()
    panel.run(wait=True, timeout_s=WAIT_S)
    assert len(calls) <= 10 * (time.monotonic() - began) + 2
    assert len([y for y in drawn(panel) if y]) == 400


def test_nothing_is_printed(make_panel: Make, capfd: pytest.CaptureFixture[str]) -> None:
    panel = make_panel()
    panel.run(wait=True, timeout_s=WAIT_S)
    panel.keep.freeze.click()
    panel.keep.export.click()
    panel.close()
    assert capfd.readouterr() == ("", "")


def test_no_torch_is_imported(tmp_path: Path) -> None:
    import subprocess
    import sys

    code = (
        "import sys\nfrom workbench.widgets import Workbench\np = Workbench(device='cpu', out=sys.argv[1])\n"
        "p.freeze()\nsys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=60)
