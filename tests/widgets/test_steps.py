"""Whole-model steps in the panel: the subject's own controls, both times against the batch, profile bars."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import workbench
from workbench.devices import DeviceInfo, find_device
from workbench.engines.fake import FakeEngine
from workbench.modes import RoutingKind, Subject
from workbench.plots import choose
from workbench.report.one_batch import read_one_batch
from workbench.spec import Modes, RunSpec
from workbench.sweeps.results import Results
from workbench.sweeps.spec import SweepSpec
from workbench.widgets import Frozen, ModePanel, SweepPanel

CPU = find_device("cpu")
GPU = DeviceInfo(type="cuda", name="NVIDIA H200", torch_device="cuda:0", capability=(9, 0), memory_bytes=150 * 2**30)
STEP = RunSpec(subject="step", modes=Modes(quant="fp32"), samples=5)
SWEEP = SweepSpec(name="steps", axes={"attention_backend": ("reference", "sdpa"), "batch_size": (1, 8)}, base=STEP)
NAMES = {name: getattr(workbench, name) for name in ("LayerPoint", "Modes", "RunSpec", "StepPoint", "SweepSpec")}


def shown(modes: ModePanel, axis: str) -> bool:
    control = modes.axes[axis] if axis in modes.axes else modes.fields[axis]
    return bool(control.view.layout.display != "none")


def decode_us(spec: RunSpec) -> float:
    fast = spec.subject is Subject.STEP and spec.modes.attention_backend == "sdpa"
    return 1000.0 * spec.size / (2 if fast else 1)


def drawn(panel: SweepPanel) -> dict[str, list[float]]:
    figure = panel.figures.figures[0]
    return {t.name: list(t.y) for t in figure.data if t.visible is True and t.mode == "lines+markers"}


def test_the_subject_changes_the_controls_and_keeps_what_both_have() -> None:
    modes = ModePanel(RunSpec(modes=Modes(quant="fp16", compile="default"), top_k=1, seed=3), device=CPU)
    assert modes.selection()["subject"] == ("moe_layer",)
    assert [shown(modes, name) for name in ("num_tokens", "batch_size", "attention_backend", "input_len")] == [
        True,
        False,
        False,
        False,
    ]
    modes.subject.value = "step"
    spec = modes.spec
    assert (spec.subject, spec.modes.quant, spec.seed) == (Subject.STEP, "fp16", 3)
    assert (spec.top_k, spec.modes.compile, spec.modes.routing) == (None, "default", RoutingKind.MODEL)
    assert [shown(modes, name) for name in ("num_tokens", "batch_size", "attention_backend", "input_len")] == [
        False,
        True,
        True,
        True,
    ]
    assert modes.sweep_spec.axes == {"batch_size": (1,)}
    assert eval(modes.code, NAMES) == modes.sweep_spec
    modes.axes["batch_size"].button(8).value = True
    modes.fields["output_len"].text.value = "4, 16"
    modes._more["batch_size"].value = "6"
    assert modes.sweep_spec.axes == {"output_len": (4, 16), "batch_size": (1, 6, 8)}
    assert "--subject step" in modes.cli
    assert eval(modes.code, NAMES) == modes.sweep_spec
    modes.subject.value = "moe_layer"
    assert modes.spec.subject is Subject.MOE_LAYER
    assert modes.spec.modes.routing is RoutingKind.BALANCED
    assert modes.sweep_spec.axes == {"num_tokens": (16,)}


def test_setting_a_step_moves_the_controls_and_the_subject() -> None:
    modes = ModePanel(device=CPU)
    modes.sweep_spec = SWEEP
    assert modes.subject.value == "step"
    assert modes.selection()["attention_backend"] == ("reference", "sdpa")
    assert modes.selection()["batch_size"] == (1, 8)
    assert modes.spec == next(iter(SWEEP.points()))


def test_a_model_that_only_one_subject_has_is_offered_there_alone() -> None:
    modes = ModePanel(device=GPU)
    row = modes.axes["model"]
    assert row.button("llama-3-8b").layout.display == "none"
    modes.subject.value = "step"
    assert row.button("llama-3-8b").layout.display is None
    row.button("llama-3-8b").value = True
    row.button("smollm2-135m").value = False
    modes.subject.value = "moe_layer"
    assert modes.spec.model == "smollm2-135m"


def test_latent_attention_is_asked_about_where_a_model_has_it() -> None:
    modes = ModePanel(STEP.replace(model="llama-3-8b", quant="bf16"), device=GPU)
    assert not shown(modes, "mla_decode")
    modes.axes["model"].button("deepseek-v2-lite").value = True
    assert shown(modes, "mla_decode")
    assert not modes.axes["mla_decode"].button("expanded").disabled
    for axis, value in (("dynamic", True), ("l2", "hot")):
        assert modes.axes[axis].button(value).disabled
        assert "subject moe_layer" in modes.axes[axis].reason(value)


def test_graphs_compile_and_fusion_of_a_step_are_asked_about_where_they_mean_something() -> None:
    modes = ModePanel(STEP.replace(model="deepseek-v2-lite", quant="bf16", moe_backend="triton"), device=GPU)
    for axis, value in (("compile", "default"), ("graph", "full"), ("fusion", "on")):
        assert not modes.axes[axis].button(value).disabled, modes.axes[axis].reason(value)
    assert not shown(modes, "compile_scope")
    modes.axes["compile"].button("default").value = True
    assert shown(modes, "compile_scope")
    modes.axes["compile_scope"].button("skip_moe").value = True
    modes.axes["graph"].button("full").value = True
    modes.axes["graph"].button("disabled").value = False
    modes.fields["max_capture_batch"].text.value = "32"
    modes.fields["max_compile_batch"].text.value = "8"
    made = modes.sweep_spec
    assert made.axes["compile_scope"] == ("all", "skip_moe")
    base = made.base.modes
    assert (base.graph, base.max_capture_batch, base.max_compile_batch) == ("full", 32, 8)
    assert eval(modes.code, NAMES) == made
    modes.subject.value = "moe_layer"
    assert (modes.spec.modes.graph, modes.spec.modes.max_capture_batch) == ("full", None)
    assert not shown(modes, "fusion")
    assert not shown(modes, "max_capture_batch")


def test_what_a_cpu_cannot_do_of_it_is_disabled_with_the_reason() -> None:
    modes = ModePanel(STEP, device=CPU)
    assert modes.axes["graph"].reason("full") == "CUDA graphs need a GPU."
    assert modes.axes["fusion"].reason("on").startswith("Fused kernels need Triton: ")


def test_triton_attention_is_disabled_without_a_gpu() -> None:
    modes = ModePanel(STEP, device=CPU)
    button = modes.axes["attention_backend"].button("triton")
    assert button.disabled
    assert button.tooltip == modes.axes["attention_backend"].reason("triton") != ""
    assert not modes.axes["attention_backend"].button("reference").disabled


@pytest.fixture
def panel(make_panel: Callable[..., SweepPanel]) -> SweepPanel:
    return make_panel(SWEEP, engine=FakeEngine(latency=decode_us))


def test_decode_and_prefill_are_drawn_against_the_batch(panel: SweepPanel) -> None:
    panel.run(wait=True, timeout_s=60)
    assert panel.state == "done"
    assert [value for _, value in panel.figures.time.options] == ["decode", "prefill", "total"]
    assert not panel.figures.time.disabled
    assert drawn(panel)["sdpa attention"] == pytest.approx([500, 4000])
    panel.figures.time.value = "prefill"
    assert drawn(panel)["sdpa attention"] == pytest.approx([500 * 4.125, 4000 * 4.125])
    assert "prefill" in panel.figures.figures[0].layout.yaxis.title.text
    assert panel.figures.figures[1].layout.xaxis.title.text == "sequences in a batch"


def test_the_profile_of_a_point_is_chosen_and_shown(panel: SweepPanel) -> None:
    assert panel.profile.view.layout.display == "none"
    panel.run(wait=True, timeout_s=60)
    area = panel.profile
    assert area.view.layout.display is None
    assert len(area.point.options) == 4
    assert area.record is not None
    assert area.record.spec.size == 8
    assert "time of the decode by part of the model" in area.bars.value
    area.phase.value = "prefill"
    assert "time of the prefill by part of the model" in area.bars.value
    area.point.value = area.point.options[0][1]
    assert area.record.spec.size == 1


def test_frozen_steps_hold_both_times_the_bars_and_the_file(panel: SweepPanel) -> None:
    panel.run(wait=True, timeout_s=60)
    frozen = panel.freeze()
    titles = [figure.layout.yaxis.title.text or "" for figure in frozen.figures()]
    assert "decode step" in titles[0]
    assert "prefill" in titles[1]
    assert len(titles) == 4
    page = frozen.html()
    assert "time of the prefill by part of the model" in page
    assert "time of the decode by part of the model" in page
    files = panel.export()
    rows = read_one_batch(files["bench_one_batch.jsonl"].read_text(encoding="utf-8"))
    assert [row.batch_size for row in rows] == [1, 8, 1, 8]


def test_recorded_layers_and_steps_are_looked_at_one_subject_at_a_time(make_panel: Callable[..., Any]) -> None:
    engine = FakeEngine(latency=decode_us)
    layers = [engine.run(RunSpec().replace(num_tokens=n, quant="fp32")) for n in (1, 16)]
    results = Results((*layers, *(engine.run(spec) for spec in SWEEP.points())))
    panel = make_panel(results=results)
    assert panel.modes.subject.value == "moe_layer"
    assert list(drawn(panel).values()) == [pytest.approx([1000.0, 16000.0])]
    panel.modes.subject.value = "step"
    assert drawn(panel)["sdpa attention"] == pytest.approx([500, 4000])
    panel.modes.axes["attention_backend"].button("reference").value = False
    assert len(drawn(panel)) == 1
    assert panel.modes.described().base.subject is Subject.STEP
    assert panel.modes.described().axes == {"batch_size": (1, 8)}
    kept = choose(results.frame(), {n: on for n, on in panel.modes.selection().items() if n in results.frame()})
    assert len(kept) == 2
    panel.modes.subject.value = "moe_layer"
    assert list(drawn(panel).values()) == [pytest.approx([1000.0, 16000.0])]


def test_a_frozen_frame_of_layers_has_no_profile() -> None:
    frame = Results((FakeEngine().run(RunSpec()),)).frame()
    assert "by part of the model" not in Frozen(frame, code="", command="").html()
