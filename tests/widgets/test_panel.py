"""The sweep panel without a page: buttons are clicked, values are read, a stand-in takes the place of the worker."""

from __future__ import annotations

import base64
import gc
import io
import json
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ipywidgets
import pytest

import workbench
from workbench.errors import InvalidInput
from workbench.spec import RunSpec
from workbench.sweeps.loader import recordings
from workbench.sweeps.spec import SweepSpec
from workbench.widgets import Frozen, SweepPanel, Workbench
from workbench.widgets.runs import Runs

Make = Callable[..., SweepPanel]
WAIT_S = 30


def drawn(panel: SweepPanel) -> list[float | None]:
    """The points in the lines of the latency figure."""
    figure = panel.figures.figures[0]
    return [y for t in figure.data if t.visible is True and t.mode == "lines+markers" for y in t.y]


def test_run_draws_every_point_and_ends_as_done(panel: SweepPanel, engine: Any, tmp_path: Path) -> None:
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


def test_a_failed_point_is_a_gap_and_the_sweep_goes_on(make_panel: Make, engine: Any) -> None:
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


def test_changed_settings_mark_the_results_stale(panel: SweepPanel) -> None:
    panel.run(wait=True, timeout_s=WAIT_S)
    assert panel.bar._stale.layout.display == "none"
    panel.modes.axes["quant"].button("fp16").value = True
    assert panel.bar._stale.value.startswith("stale")
    assert panel.bar._stale.layout.display is None
    panel.modes.axes["quant"].button("fp16").value = False
    assert panel.bar._stale.layout.display == "none"


def test_the_strip_holds_code_and_command_of_what_is_set(panel: SweepPanel) -> None:
    panel.sweep_spec = SweepSpec(
        name="mine", axes={"quant": ("fp32", "bf16"), "num_tokens": (1,)}, base=RunSpec(seed=3)
    )
    names: dict[str, Any] = {}
    source = panel.code.replace("results = workbench.sweep(sweep)", "")
    exec(source, names)
    assert names["sweep"] == panel.sweep_spec
    assert SweepSpec.from_argv(panel.sweep_spec.to_argv()) == panel.sweep_spec
    assert panel.cli.startswith("workbench sweep --name mine --seed 3")
    assert "--axis quant=fp32,bf16" in panel._strip.value
    panel.spec = panel.spec.replace(quant="fp16")
    assert "fp16" in panel._strip.value


def test_freeze_keeps_figures_tables_and_code_without_scripts(panel: SweepPanel, tmp_path: Path) -> None:
    panel.keep.freeze.click()
    assert "freeze: there are no results yet" in panel.bar.error_view.value
    panel.run(wait=True, timeout_s=WAIT_S)
    panel.keep.freeze.click()
    assert panel.bar.error_view.value == ""
    page = (tmp_path / "results" / "quick" / "freeze.html").read_text()
    assert "<svg" in page
    assert "116 µs" in page
    assert "SweepSpec(" in page
    assert "<script" not in page
    frozen = panel.freeze()
    assert isinstance(frozen, Frozen)
    bundles = frozen.bundles()
    assert [next(iter(one)) for one in bundles] == ["application/vnd.plotly.v1+json"] * 3 + ["text/html"]
    json.dumps(bundles, allow_nan=False)
    ys = [y for t in bundles[0]["application/vnd.plotly.v1+json"]["data"] for y in t.get("y") or [] if t.get("meta")]
    assert sorted(ys) == sorted([101.0, 116.0, 228.0] * 4)
    panel.run(wait=True, timeout_s=WAIT_S)
    assert len(frozen.frame) >= 12  # frozen: another run does not change it


def test_export_writes_every_format_and_offers_them(panel: SweepPanel, tmp_path: Path) -> None:
    panel.keep.export.click()
    assert "export: there are no results yet" in panel.bar.error_view.value
    panel.run(wait=True, timeout_s=WAIT_S)
    panel.keep.export.click()
    assert panel.bar.error_view.value == ""
    folder = tmp_path / "results" / "quick"
    link = re.search(r'download="quick.zip" href="data:application/zip;base64,([^"]+)"', panel.keep.files.value)
    assert link is not None
    archive = zipfile.ZipFile(io.BytesIO(base64.b64decode(link.group(1))))
    names = {"records.jsonl", "records.parquet", "records.csv", "summary.md", "report.html"}
    assert {Path(name).name for name in archive.namelist()} == names
    for name in ("records.jsonl", "records.parquet"):
        again = workbench.load(folder / name)
        assert [r.key for r in again.records] == [r.key for r in panel.results.records]  # type: ignore[union-attr]
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(InvalidInput, match=r"out: .* cannot be made"):
        panel.export(blocked / "folder")


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


def test_late_messages_of_a_closed_or_older_job_are_dropped(panel: SweepPanel, engine: Any) -> None:
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


def test_updates_are_coalesced(make_panel: Make, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_recorded_results_open_in_the_same_panel_and_toggles_filter(make_panel: Make) -> None:
    recorded = make_panel().run(wait=True, timeout_s=WAIT_S)
    panel = make_panel(results=recorded)
    assert panel.source.value.startswith("given results")
    assert panel.bar.run.disabled
    assert len([y for y in drawn(panel) if y]) == 12
    panel.modes.axes["quant"].button("fp32").value = False
    assert len([y for y in drawn(panel) if y]) == 6
    assert panel.modes.axes["quant"].button("fp16").layout.display == "none"
    assert "--quant" not in panel.cli  # bf16, the default, is what is left on
    assert "--axis moe_backend=reference,torch_grouped_mm" in panel.cli
    with pytest.raises(InvalidInput, match="recorded results are shown"):
        panel.run()
    assert len(panel.freeze().frame) == 6
    panel.source.value = "live"
    assert not panel.bar.run.disabled
    assert panel.modes.selection()["quant"] == ("fp32", "bf16")
    assert panel.modes.axes["quant"].button("fp16").layout.display is None


def test_the_second_figure_shows_speed_up_or_correctness(panel: SweepPanel) -> None:
    panel.run(wait=True, timeout_s=WAIT_S)
    figure = panel.figures.figures[1]
    assert [t.visible for t in figure.data if t.type == "heatmap"] == [True, True]
    panel.figures.baseline.value = "reference · fp32"
    assert figure.layout.title.text.startswith("speed-up against reference · fp32")
    panel.figures.which.value = "correctness"
    ratios = [y for t in figure.data if t.type == "scatter" and t.visible is True and t.meta for y in t.y]
    assert ratios == [0.5] * 12
    assert panel.figures.baseline.layout.display == "none"


def test_the_time_can_be_that_with_host_launches_where_it_was_recorded(make_panel: Make, engine: Any) -> None:
    engine.wall = lambda spec: 400.0 if spec.modes.quant == "fp32" else 200.0
    panel = make_panel()
    assert panel.figures.time.disabled
    panel.run(wait=True, timeout_s=WAIT_S)
    latency, detail = panel.figures.figures
    assert (panel.figures.time.disabled, panel.figures.timing) == (False, "device")
    assert panel.figures._no_wall.layout.display == "none"
    panel.figures.baseline.value = "reference · fp32"
    texts = [text for line in detail.data[1].text for text in line]
    assert set(texts) == {"base", "tie"}
    strip = panel._strip.value
    panel.figures.time.value = "wall"
    assert sorted(drawn(panel)) == [200.0] * 6 + [400.0] * 6
    assert "host launches included" in latency.layout.yaxis.title.text
    texts = [text for line in detail.data[1].text for text in line]
    assert {text: texts.count(text) for text in texts} == {"base": 3, "tie": 3, "2.00x": 6}
    assert panel.figures.baseline.value == "reference · fp32"
    assert panel._strip.value == strip
    frozen = panel.freeze()
    assert "host launches included" in frozen.html()
    assert frozen.frame["latency_us"].max() == 400.0
    panel.run(wait=True, timeout_s=WAIT_S)
    assert panel.figures.timing == "wall"  # what was chosen stays chosen
    panel.figures.time.value = "device"
    assert sorted(drawn(panel)) == sorted([101.0, 116.0, 228.0] * 4)
    assert latency.layout.yaxis.title.text == "median latency (µs)"


def test_without_a_time_with_host_launches_the_choice_is_disabled_with_its_reason(
    make_panel: Make, engine: Any
) -> None:
    engine.wall = lambda spec: 300.0
    with_wall = make_panel().run(wait=True, timeout_s=WAIT_S)
    assert with_wall is not None
    engine.wall = None
    panel = make_panel(results=with_wall)
    panel.figures.time.value = "wall"
    panel.source.value = "live"
    panel.run(wait=True, timeout_s=WAIT_S)
    assert (panel.figures.time.disabled, panel.figures.time.value) == (True, "device")
    assert "recorded on a GPU" in panel.figures._no_wall.value
    assert panel.figures._no_wall.layout.display is None
    assert sorted(drawn(panel)) == sorted([101.0, 116.0, 228.0] * 4)
    panel.source.value = next(value for _, value in panel.source.options if value != "live")
    assert (panel.figures.time.disabled, panel.figures.timing) == (False, "wall")
    assert set(drawn(panel)) == {300.0}


def test_without_anywidget_the_figures_are_static_with_a_hint(
    make_panel: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    from workbench.widgets import figures

    monkeypatch.setattr(figures, "live", lambda: False)
    monkeypatch.setattr(figures, "_POOL", {"latency": [], "detail": []})
    panel = make_panel()
    panel.run(wait=True, timeout_s=WAIT_S)
    assert "pip install anywidget" in panel.figures.hint.value
    assert panel.figures.hint.layout.display is None
    assert "<svg" in panel.figures._latency.view.value


def test_presets_start_a_sweep_and_unknown_ones_are_named(make_panel: Make) -> None:
    panel = make_panel("main")
    assert panel.sweep_spec.name == "main"
    panel.preset.value = "quick"
    assert panel.sweep_spec.name == "quick"
    with pytest.raises(InvalidInput, match="preset: must be main"):
        make_panel("nosuch")
    with pytest.raises(InvalidInput, match="spec: must be a RunSpec"):
        make_panel(7)
    with pytest.raises(TypeError, match="colour"):
        Workbench(colour="red")


def test_no_torch_is_imported(tmp_path: Path) -> None:
    import subprocess
    import sys

    code = (
        "import sys\nfrom workbench.widgets import Workbench\np = Workbench(device='cpu', out=sys.argv[1])\n"
        "p.freeze()\nsys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=60)


def test_the_shipped_recordings_open_on_one_model_with_a_legible_number_of_lines(make_panel: Make) -> None:
    shipped = recordings()
    assert len(shipped.records) > 500
    panel = make_panel(results=shipped)
    chosen = panel.modes.selection()
    assert len(chosen["model"]) == len(chosen["routing"]) == len(chosen["quant"]) == 1
    assert chosen["quant"] == ("bf16",)
    traces = panel.figures.figures[0].data
    lines = [trace for trace in traces if trace.visible is True and trace.mode == "lines+markers"]
    assert 4 <= len(lines) <= 12
    assert all(any(y is not None for y in line.y) for line in lines)
