"""What the sweep panel shows and keeps, without a page: figures, code, frozen and exported results, recordings."""

from __future__ import annotations

import base64
import io
import json
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import workbench
from workbench.errors import InvalidInput
from workbench.spec import RunSpec
from workbench.sweeps.loader import recordings
from workbench.sweeps.spec import SweepSpec
from workbench.widgets import Frozen, SweepPanel, Workbench

Make = Callable[..., SweepPanel]
Drawn = Callable[[SweepPanel], list[float | None]]
WAIT_S = 30


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


def test_recorded_results_open_in_the_same_panel_and_toggles_filter(make_panel: Make, drawn: Drawn) -> None:
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


def test_the_time_can_be_that_with_host_launches_where_it_was_recorded(
    make_panel: Make, engine: Any, drawn: Drawn
) -> None:
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
    make_panel: Make, engine: Any, drawn: Drawn
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
