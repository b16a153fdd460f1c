"""SweepSpec: round trips, the order of points, and one sentence for what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from stand_in import axes, specs

from workbench.devices import DeviceInfo
from workbench.errors import InvalidInput
from workbench.spec import FIELDS, LayerPoint, Modes, RunSpec
from workbench.sweeps.presets import PRESETS, preset
from workbench.sweeps.spec import AXES, SweepSpec, parse_axes

CPU = DeviceInfo(type="cpu", name="some CPU", torch_device="cpu")
H200 = DeviceInfo(type="cuda", name="NVIDIA H200", torch_device="cuda:0", capability=(9, 0))


@given(axes(), specs)
@settings(max_examples=150, deadline=None)
def test_round_trips_through_json_code_and_argv(some_axes: dict[str, list[Any]], base: RunSpec) -> None:
    sweep = SweepSpec(name="a-1", axes=some_axes, base=base)
    assert SweepSpec.from_json(sweep.to_json()) == sweep
    assert SweepSpec.from_argv(sweep.to_argv()) == sweep
    scope = {"SweepSpec": SweepSpec, "RunSpec": RunSpec, "Modes": Modes, "LayerPoint": LayerPoint}
    assert eval(sweep.to_code(), scope) == sweep


@given(axes())
@settings(max_examples=60, deadline=None)
def test_the_order_typed_does_not_matter(some_axes: dict[str, list[Any]]) -> None:
    turned = dict(reversed(some_axes.items()))
    assert SweepSpec(axes=turned) == SweepSpec(axes=some_axes)
    points = list(SweepSpec(axes=some_axes).points())
    assert points == list(SweepSpec(axes=turned).points())
    assert len(points) == len(SweepSpec(axes=some_axes)) == len({point.key for point in points})


def test_subjects_change_slowest_and_tokens_fastest() -> None:
    sweep = SweepSpec(
        axes={"num_tokens": [1, 16], "compile": ["none", "default"], "quant": ["fp32", "bf16"], "top_k": [8, 2]}
    )
    flat = [point.flat() for point in sweep.points()]
    order = [(f["top_k"], f["quant"], f["compile"], f["num_tokens"]) for f in flat]
    assert order[:5] == [
        (8, "fp32", "none", 1),
        (8, "fp32", "none", 16),
        (8, "fp32", "default", 1),
        (8, "fp32", "default", 16),
        (8, "bf16", "none", 1),
    ]
    assert order[8][0] == 2
    assert set(AXES) == set(FIELDS) - {"subject", "device", "timeout_s"}


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({"version": 2}, "version: must be 1, not 2"),
        ({"axes": {"num_tokens": [16, 1]}}, "num_tokens: must be in ascending order, not 16, 1"),
        ({"axes": {"num_tokens": [0, 1]}}, "num_tokens: must be a whole number of at least 1, not 0"),
        ({"axes": {"num_tokens": [-4]}}, "num_tokens: must be a whole number of at least 1, not -4"),
        ({"axes": {"quant": ["bf16", "fp9"]}}, "quant: must be fp32, bf16, fp16, fp8_tensor, "),
        ({"axes": {"quant": ["bf16", "bf16"]}}, "quant: bf16 is given twice"),
        ({"axes": {"quant": []}}, "quant: must have at least one value"),
        ({"axes": {"quant": "bf16"}}, "quant: must be a list of values, not 'bf16'"),
        ({"axes": {"colour": ["red"]}}, "colour: no such axis; axes are model, "),
        ({"axes": {"device": ["cpu"]}}, "device: is set once for a whole sweep, in base; axes are model, "),
        ({"axes": {"seed": list(range(400)), "samples": list(range(1, 400))}}, "axes: 159,600 points are too many"),
        ({"base": {"top_k": 0}}, "top_k: must be a whole number of at least 1, not 0"),
        ({"name": "../up"}, "name: must be 1 to 80 letters"),
        ({"speed": 9}, "speed: no such field; there are version, name, axes or base"),
    ],
)
def test_what_is_wrong_is_one_sentence(data: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput) as caught:
        SweepSpec(**data)
    assert str(caught.value).startswith(sentence)
    assert "\n" not in str(caught.value)
    path = tmp_path / "sweep.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(InvalidInput) as again:
        SweepSpec.from_file(path)
    assert str(again.value) == f"{path}: {caught.value}"


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"file: .*none\.json cannot be read \(No such file or directory\)"):
        SweepSpec.from_file(tmp_path / "none.json")
    (tmp_path / "list.json").write_text("[1]", encoding="utf-8")
    with pytest.raises(InvalidInput, match=r"SweepSpec: must be a JSON object, not list"):
        SweepSpec.from_file(tmp_path / "list.json")


def test_axis_words() -> None:
    assert parse_axes(["top-k=none,2", "dynamic=true", "top_k=4"]) == {"top_k": (None, 2, 4), "dynamic": (True,)}
    assert parse_axes(["split-k=none,1,4", "zero_points=false"]) == {"split_k": (None, 1, 4), "zero_points": (False,)}
    assert parse_axes(['model=["a,b","c"]']) == {"model": ("a,b", "c")}
    with pytest.raises(InvalidInput, match="axis: must be NAME=VALUE"):
        parse_axes(["num_tokens"])
    with pytest.raises(InvalidInput, match="num_tokens: must be a whole number, not 'many'"):
        parse_axes(["num_tokens=1,many"])


def test_presets_follow_the_device() -> None:
    cpu = preset("main", CPU)
    assert len(cpu) == 96
    assert cpu.base.modes.dynamic
    assert cpu.axes["num_tokens"] == (1, 16, 128, 1024)
    assert set(cpu.axes["moe_backend"]) == {"reference", "torch_grouped_mm"}
    gpu = preset("main", H200)
    assert {"triton"} < set(gpu.axes["moe_backend"])
    assert {"reduce-overhead", "max-autotune-no-cudagraphs"} < set(gpu.axes["compile"])
    assert gpu.axes["graph"] == ("disabled", "full")
    assert {"mixtral-8x7b", "qwen2-57b-a14b", "qwen3-30b-a3b", "deepseek-v2-lite", "deepseek-v3"} < set(
        gpu.axes["model"]
    )
    assert gpu.axes["routing"] == ("model", "balanced", "uniform", "zipf", "single_expert")
    for name in PRESETS:
        assert preset(name, H200).name == name
    with pytest.raises(
        InvalidInput,
        match="preset: must be main, quick, shapes, fused-moe-splitk, steps, "
        "moe-torch-compile or cuda-graph-attention, not 'all'",
    ):
        preset("all", CPU)


def test_an_axis_is_replaced_or_taken_away() -> None:
    sweep = preset("quick", CPU).with_axes(num_tokens=[4], quant=[])
    assert dict(sweep.axes) == {"moe_backend": ("reference", "torch_grouped_mm"), "num_tokens": (4,)}
