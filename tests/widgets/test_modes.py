"""The mode panel: controls are views of one frozen spec, and what cannot be honoured is disabled with its reason."""

from __future__ import annotations

import pandas as pd
import pytest

import workbench
from workbench.devices import DeviceInfo, find_device
from workbench.errors import InvalidInput
from workbench.plots import choose
from workbench.spec import Modes, RunSpec
from workbench.sweeps.spec import SweepSpec
from workbench.widgets import ModePanel

CPU = find_device("cpu")
GPU = DeviceInfo(type="cuda", name="NVIDIA H200", torch_device="cuda:0", capability=(9, 0), memory_bytes=150 * 2**30)


@pytest.fixture
def modes() -> ModePanel:
    return ModePanel(device=CPU)


def test_setting_the_spec_moves_every_control(modes: ModePanel) -> None:
    spec = RunSpec(
        model="mixtral-8x7b", top_k=1, tp_size=2, samples=7, modes=Modes(compile="default", dynamic=True, quant="fp16")
    ).replace(num_tokens=48)
    modes.spec = spec
    chosen = modes.selection()
    assert chosen["model"] == ("mixtral-8x7b",)
    assert (chosen["compile"], chosen["dynamic"], chosen["quant"]) == (("default",), (True,), ("fp16",))
    assert chosen["num_tokens"] == (48,)
    assert 48 in modes.axes["num_tokens"].values
    assert [modes.fields[name].text.value for name in ("experts", "top_k", "tp_size", "samples")] == ["", "1", "2", "7"]
    assert modes.sweep_spec == SweepSpec(base=spec, axes={"num_tokens": (48,)})


def test_pressing_toggles_makes_a_sweep_and_the_code_rebuilds_it(modes: ModePanel) -> None:
    modes.axes["quant"].button("fp32").value = True
    modes.axes["num_tokens"].button(128).value = True
    modes.fields["top_k"].text.value = "2, 8"
    assert modes.sweep_spec.axes == {"top_k": (2, 8), "quant": ("fp32", "bf16"), "num_tokens": (16, 128)}
    assert modes.spec.point.num_tokens == 16
    names = {name: getattr(workbench, name) for name in ("LayerPoint", "Modes", "RunSpec", "SweepSpec")}
    assert eval(modes.code, names) == modes.sweep_spec
    assert "--axis quant=fp32,bf16" in modes.cli


def test_the_last_value_of_an_axis_stays_on(modes: ModePanel) -> None:
    button = modes.axes["quant"].button("bf16")
    button.value = False
    assert button.value is True
    assert modes.selection()["quant"] == ("bf16",)


def test_what_a_cpu_cannot_honour_is_disabled_and_says_why(modes: ModePanel) -> None:
    for axis, value in (("moe_backend", "triton"), ("graph", "full"), ("compile", "reduce-overhead")):
        row = modes.axes[axis]
        assert row.button(value).disabled, value
        reason = row.reason(value)
        assert reason
        assert row.button(value).tooltip == reason
        why = row.view.children[1].children[1]
        assert value in why.value
        assert why.layout.display is None
    assert not modes.axes["compile"].button("default").disabled
    assert not modes.axes["quant"].button("fp32").disabled  # with grouped_mm compiled it cannot run, otherwise it can


def test_a_gpu_can_honour_them() -> None:
    modes = ModePanel(device=GPU)
    for axis, value in (("graph", "full"), ("compile", "reduce-overhead")):
        assert not modes.axes[axis].button(value).disabled


def shown(modes: ModePanel, axis: str) -> bool:
    return modes.axes[axis].view.layout.display != "none"


def test_rows_that_mean_nothing_beside_the_others_are_not_there() -> None:
    modes = ModePanel(device=GPU)
    dependent = ("group_size", "zero_points", "activation_scale", "split_k", "reduction")
    assert [shown(modes, axis) for axis in dependent] == [False] * 5
    modes.axes["quant"].button("int4").value = True
    assert [shown(modes, axis) for axis in dependent] == [True, True, False, False, False]
    assert not modes.axes["group_size"].button(32).disabled
    modes.axes["quant"].button("fp8_tensor").value = True
    assert shown(modes, "activation_scale")
    modes.axes["moe_backend"].button("triton").value = True
    modes.axes["moe_backend"].button("reference").value = False
    assert [shown(modes, axis) for axis in dependent] == [True] * 5
    assert modes.axes["split_k"].button(None).description == "as tuned"
    atomic = modes.axes["reduction"].button("atomic")
    assert not atomic.disabled
    modes.axes["split_k"].button(1).value = True
    modes.axes["split_k"].button(None).value = False
    assert atomic.disabled
    assert atomic.tooltip == modes.axes["reduction"].reason("atomic")
    assert "split_k 1 leaves one part" in atomic.tooltip
    modes.axes["split_k"].button(4).value = True
    assert not atomic.disabled
    atomic.value = True
    assert modes.sweep_spec.axes["split_k"] == (1, 4)
    assert modes.sweep_spec.axes["reduction"] == ("deterministic", "atomic")
    names = {name: getattr(workbench, name) for name in ("LayerPoint", "Modes", "RunSpec", "SweepSpec")}
    assert eval(modes.code, names) == modes.sweep_spec


def test_what_was_set_stays_in_sight_and_locks_nothing_else() -> None:
    modes = ModePanel(device=GPU)
    modes.spec = RunSpec(modes=Modes(quant="int4", zero_points=True, group_size=32))
    for quant in ("bf16", "fp8_block", "mxfp4"):
        assert not modes.axes["quant"].button(quant).disabled, quant
    modes.axes["quant"].button("bf16").value = True
    modes.axes["quant"].button("int4").value = False
    assert modes.spec.modes.zero_points
    assert shown(modes, "zero_points")
    assert "for quant int4" in modes.axes["zero_points"].reason(True)


def test_deep_gemm_is_offered_and_says_why_not(modes: ModePanel) -> None:
    assert modes.axes["moe_backend"].button("deep_gemm").disabled
    assert "deep_gemm" in modes.axes["moe_backend"].reason("deep_gemm")


def test_recorded_splits_are_chosen_among_and_as_tuned_is_one_of_them() -> None:
    modes = ModePanel(device=CPU)
    rows = [
        RunSpec(modes=Modes(moe_backend="triton", split_k=split)).replace(num_tokens=tokens).flat()
        | {"latency_us": 1.0}
        for split in (None, 2, 4)
        for tokens in (1, 16)
    ]
    frame = pd.DataFrame(rows)
    frame["split_k"] = pd.array(frame["split_k"].tolist(), dtype="Int64")
    modes.offer(frame)
    assert shown(modes, "split_k")
    assert not shown(modes, "group_size")
    assert modes.selection()["split_k"] == (None, 2, 4)
    modes.axes["split_k"].button(2).value = False
    kept = choose(frame, {name: on for name, on in modes.selection().items() if name in frame})
    assert len(kept) == 4
    assert modes.described().axes["split_k"] == (None, 4)
    modes.offer(None)
    assert not shown(modes, "split_k")


def test_a_value_that_is_on_can_always_be_turned_off(modes: ModePanel) -> None:
    modes.spec = RunSpec(modes=Modes(graph="full"))
    button = modes.axes["graph"].button("full")
    assert not button.disabled
    modes.axes["graph"].button("disabled").value = True
    button.value = False
    assert button.disabled


def test_wrong_text_is_one_sentence_and_the_spec_keeps_its_last_right_value(modes: ModePanel) -> None:
    before = modes.sweep_spec
    modes.fields["samples"].text.value = "many"
    assert modes.problem == "samples: must be a whole number, not 'many'"
    assert modes.sweep_spec == before
    with pytest.raises(InvalidInput, match="samples: must be a whole number"):
        modes.check()
    modes.fields["samples"].text.value = "0"
    assert "samples: must be a whole number of at least 1" in modes.problem
    modes.fields["samples"].text.value = "9"
    assert modes.problem == ""
    assert modes.spec.samples == 9


def test_a_path_and_another_token_count_get_a_toggle(modes: ModePanel) -> None:
    modes._path.value = "org/some-model"
    assert modes.selection()["model"] == ("org/some-model",)
    assert modes._path.value == ""
    modes._more["num_tokens"].value = "33"
    assert modes.selection()["num_tokens"] == (16, 33)
    modes._more["num_tokens"].value = "-3"
    assert "num_tokens: must be a whole number of at least 1" in modes.problem


def test_an_axis_without_a_control_is_kept(modes: ModePanel) -> None:
    modes.sweep_spec = SweepSpec(name="mine", axes={"num_tokens": (1, 2)}, base=RunSpec(timeout_s=7.0, device="cpu"))
    modes.axes["quant"].button("fp16").value = True
    assert (modes.sweep_spec.name, modes.sweep_spec.base.timeout_s, modes.sweep_spec.base.device) == (
        "mine",
        7.0,
        "cpu",
    )


def test_an_unknown_keyword_is_refused() -> None:
    with pytest.raises(TypeError, match="colour"):
        ModePanel(colour="red")  # type: ignore[call-arg]
