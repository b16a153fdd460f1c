"""Whole-model steps as specs, sweeps, plans and tables; a layer's specs stay exactly as they were."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.devices import DeviceInfo, find_device
from workbench.engines.fake import FakeEngine
from workbench.errors import InvalidInput
from workbench.modes import Mla, RoutingKind, Subject
from workbench.record import Record, Status
from workbench.spec import DEFAULTS, FIELDS, LayerPoint, Modes, RunSpec, StepPoint, check_value
from workbench.sweeps.loader import load
from workbench.sweeps.planner import plan
from workbench.sweeps.presets import preset
from workbench.sweeps.results import Results
from workbench.sweeps.runner import sweep
from workbench.sweeps.spec import AXES, SweepSpec, parse_axes

CPU = find_device("cpu")
H200 = DeviceInfo(type="cuda", name="NVIDIA H200", torch_device="cuda:0", capability=(9, 0), memory_bytes=150 * 2**30)
STEP = RunSpec(subject="step", modes=Modes(quant="fp32"))
STEP_KEYS = ("2c84907f339def8a", "f2a964d9b0cfe68c")
"""Of a plain step and of one with latent attention expanded, as they were before steps had graphs."""
steps = st.fixed_dictionaries(
    {"subject": st.just("step")},
    optional={
        "model": st.sampled_from(["smollm2-135m", "deepseek-v2-lite"]),
        "num_layers": st.none() | st.integers(1, 9),
        "quant": st.sampled_from(["fp32", "int4"]),
        "attention_backend": st.sampled_from(["sdpa", "triton", "own"]),
        "mla_prefill": st.sampled_from([str(v) for v in Mla]),
        "mla_decode": st.sampled_from([str(v) for v in Mla]),
        "routing": st.sampled_from([str(v) for v in RoutingKind]),
        "fusion": st.sampled_from(["off", "on"]),
        "compile": st.sampled_from(["none", "default"]),
        "compile_scope": st.sampled_from(["all", "skip_moe"]),
        "max_compile_batch": st.none() | st.integers(1, 2**14),
        "max_capture_batch": st.none() | st.integers(1, 2**14),
        "batch_size": st.integers(1, 2**14),
        "input_len": st.integers(1, 2**20),
        "output_len": st.integers(1, 2**16),
        "page_size": st.integers(1, 2**12),
        "perplexity_tokens": st.none() | st.integers(2, 2**20),
    },
).map(RunSpec.from_flat)


@given(steps)
@settings(max_examples=60, deadline=None)
def test_a_step_goes_round_through_every_form(spec: RunSpec) -> None:
    assert RunSpec.from_json(spec.to_json()) == spec
    assert RunSpec.from_argv(spec.to_argv()) == spec
    assert RunSpec.from_flat(spec.flat()) == spec
    names = {"RunSpec": RunSpec, "Modes": Modes, "StepPoint": StepPoint, "LayerPoint": LayerPoint}
    assert eval(spec.to_code(), names) == spec
    assert RunSpec.from_json(spec.to_json()).key == spec.key


def test_a_layer_is_written_as_before_and_a_step_has_its_own_key() -> None:
    spec = RunSpec.from_flat({"model": "mixtral-8x7b", "quant": "fp16", "num_tokens": 7})
    assert RunSpec().key == "44136fa355b3678a"
    assert set(json.loads(spec.to_json())["modes"]) & {"attention_backend", "mla_prefill", "mla_decode"} == set()
    assert "num_layers" not in json.loads(spec.to_json())
    assert spec.to_code() == "RunSpec(model='mixtral-8x7b', modes=Modes(quant='fp16'), point=LayerPoint(num_tokens=7))"
    assert spec.to_argv()[2:] == ["--model", "mixtral-8x7b", "--quant", "fp16", "--num-tokens", "7"]
    assert RunSpec(subject="step").key == STEP_KEYS[0]
    other = {"subject": "step", "model": "deepseek-v2-lite", "mla_decode": "expanded"}
    assert RunSpec.from_flat(other).key == STEP_KEYS[1]
    assert RunSpec.from_flat({**other, "fusion": "on"}).key not in STEP_KEYS
    assert RunSpec(subject="step").to_code() == "RunSpec(subject='step')"
    assert RunSpec(subject="step").to_argv() == ["workbench", "run", "--subject", "step"]


def test_a_step_takes_the_models_routing_unless_told() -> None:
    assert RunSpec(subject="step").modes.routing is RoutingKind.MODEL
    assert RunSpec(subject="step", modes=Modes(routing="balanced")).modes.routing is RoutingKind.BALANCED
    assert RunSpec().replace(subject="step").modes.routing is RoutingKind.MODEL
    assert RunSpec(subject="step").replace(subject="moe_layer").modes.routing is RoutingKind.BALANCED
    assert RunSpec.from_flat({"routing": "zipf"}).replace(subject="step").modes.routing is RoutingKind.ZIPF


@pytest.mark.parametrize(
    ("flat", "sentence"),
    [
        (
            {"subject": "step", "num_tokens": 4},
            "num_tokens: is for subject moe_layer; a step is measured at batch_size",
        ),
        ({"batch_size": 4}, "batch_size: is for subject step; a moe_layer is measured at num_tokens"),
        ({"num_layers": 4}, "num_layers: is for subject step"),
        ({"attention_backend": "triton"}, "attention_backend: is for subject step"),
        ({"mla_decode": "expanded"}, "mla_decode: is for subject step"),
        ({"fusion": "on"}, "fusion: is for subject step; a moe_layer is measured at num_tokens"),
        ({"max_capture_batch": 8}, "max_capture_batch: is for subject step"),
        ({"subject": "step", "fusion": True}, "fusion: must be off or on, not True"),
        ({"subject": "step", "compile_scope": "moe"}, "compile_scope: must be all or skip_moe, not 'moe'"),
        ({"subject": "step", "max_compile_batch": 0}, "max_compile_batch: must be a whole number of at least 1, not 0"),
        ({"subject": "step", "mla_decode": "folded"}, "mla_decode: must be absorbed or expanded, not 'folded'"),
        ({"subject": "step", "output_len": 0}, "output_len: must be a whole number of at least 1, not 0"),
        ({"subject": "step", "perplexity_tokens": 1}, "perplexity_tokens: must be greater than or equal to 2, not 1"),
        ({"subject": "stride"}, "subject: must be moe_layer or step, not 'stride'"),
    ],
)
def test_what_means_nothing_is_one_sentence(flat: dict[str, object], sentence: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        RunSpec.from_flat(flat)
    assert str(raised.value).startswith(sentence)


def test_every_field_has_an_axis_or_is_said_once_for_a_sweep() -> None:
    assert set(AXES) == set(FIELDS) - {"subject", "device", "timeout_s"}
    assert AXES[-2:] == ("num_tokens", "batch_size")
    assert check_value("batch_size", 3) == 3
    with pytest.raises(InvalidInput, match="batch_size: must be a whole number"):
        check_value("batch_size", 0)


def test_a_sweep_of_steps_has_batches_along_x_and_none_of_a_layers_axes() -> None:
    axes = parse_axes(["batch_size=1,8", "attention_backend=reference,sdpa"])
    made = SweepSpec(axes=axes, base=RunSpec(subject="step"))
    assert list(made.axes) == ["attention_backend", "batch_size"]
    assert (made.size_field, made.varying, len(made)) == ("batch_size", ["attention_backend"], 4)
    assert [spec.size for spec in made.points()] == [1, 8, 1, 8]
    assert SweepSpec.from_json(made.to_json()) == made
    names = {"RunSpec": RunSpec, "Modes": Modes, "StepPoint": StepPoint, "SweepSpec": SweepSpec}
    assert eval(made.to_code(), names) == made
    with pytest.raises(InvalidInput, match="num_tokens: is for subject moe_layer"):
        SweepSpec(axes={"num_tokens": (1,)}, base=RunSpec(subject="step"))
    with pytest.raises(InvalidInput, match="batch_size: is for subject step"):
        SweepSpec(axes={"batch_size": (1,)})
    with pytest.raises(InvalidInput, match="batch_size: must be in ascending order, not 8, 1"):
        SweepSpec(axes={"batch_size": (8, 1)}, base=RunSpec(subject="step"))


def test_the_preset_of_steps_is_eager_and_leaves_out_what_a_model_does_not_have() -> None:
    made = preset("steps", H200)
    assert made.axes["model"] == ("llama-3-8b", "deepseek-v2-lite")
    assert made.axes["attention_backend"] == ("sdpa", "triton")
    assert made.axes["batch_size"] == (1, 8, 32)
    point = made.base.step_point
    assert (point.input_len, point.output_len) == (128, 8)
    assert (made.base.modes.compile, made.base.modes.graph) == ("none", "disabled")
    planned = plan(made, H200)
    why = "mla_decode expanded is for models with latent attention, which llama-3-8b does not have; only absorbed is "
    named = {(p.spec.model, str(p.spec.modes.mla_decode)) for p in planned.skipped if why in p.sentence}
    assert named == {("llama-3-8b", "expanded")}
    assert planned.why()[f"{why}allowed."] == 6
    small = plan(preset("steps", CPU), CPU)
    assert not small.skipped
    assert small.estimate_s > 0


def test_the_preset_on_compile_leaves_out_what_is_compiled_where_nothing_is() -> None:
    made = preset("moe-torch-compile", H200)
    assert made.base.model == "deepseek-v2-lite"
    assert made.base.modes.graph == "full"
    assert made.axes["quant"] == ("bf16", "fp8_block")
    assert made.axes["batch_size"] == (1, 8, 32)
    point = made.base.step_point
    assert (point.input_len, point.output_len) == (128, 8)
    planned = plan(made, H200)
    assert {(p.spec.modes.compile, p.spec.modes.compile_scope) for p in planned.runnable} == {
        ("none", "all"),
        ("default", "all"),
        ("default", "skip_moe"),
    }
    assert planned.why() == {"compile_scope skip_moe is for compiled steps; with compile none only all is allowed.": 12}
    assert len(planned.runnable) == 36
    small = plan(preset("moe-torch-compile", CPU), CPU)
    assert {(p.spec.modes.compile, p.spec.modes.compile_scope) for p in small.skipped} == {("none", "skip_moe")}


def test_the_preset_on_graphs_has_both_models_and_both_forms_of_latent_attention() -> None:
    made = preset("cuda-graph-attention", H200)
    assert made.axes["model"] == ("llama-3-8b", "deepseek-coder-v2-lite")
    assert made.axes["graph"] == ("disabled", "full")
    assert made.axes["attention_backend"][0] == "triton"
    runs = {(p.spec.model, str(p.spec.modes.mla_decode)) for p in plan(made, H200).runnable}
    assert runs == {("llama-3-8b", "absorbed"), *(("deepseek-coder-v2-lite", str(v)) for v in Mla)}
    small = plan(preset("cuda-graph-attention", CPU), CPU)
    assert {p.spec.modes.graph for p in small.runnable} == {"disabled"}
    assert "CUDA graphs need a GPU." in small.why()


def test_compiling_capturing_and_replaying_are_in_the_estimate() -> None:
    def total(**values: object) -> float:
        spec = RunSpec.from_flat({"subject": "step", "model": "deepseek-v2-lite", "moe_backend": "triton", **values})
        return plan(SweepSpec(base=spec, axes={"batch_size": (1,)}), H200).estimate_s

    eager, full, compiled = total(), total(graph="full"), total(graph="full", compile="default")
    assert compiled > full + 20
    assert total(graph="full", max_capture_batch=32) > full + 5
    assert total(graph="full", max_capture_batch=32, compile="default") > total(
        graph="full", max_capture_batch=32, compile="default", max_compile_batch=1
    )
    assert total(graph="full", samples=500) < total(samples=500) < eager * 100
    assert total(fusion="on", samples=500) < total(samples=500)


def test_what_was_in_force_stands_in_the_table() -> None:
    engine = FakeEngine(device=H200)
    base = STEP.replace(graph="full", max_capture_batch=8, samples=2)
    frame = Results(tuple(engine.run(base.replace(batch_size=n, compile="default")) for n in (3, 9))).frame()
    assert frame["graph_in_force"].tolist() == ["full", "eager"]
    assert frame["captured_size"].iloc[0] == 4
    assert frame["captured_size"].isna().tolist() == [False, True]
    assert frame["captures"].tolist() == [4, 4]
    assert frame["graph_kernels"].isna().tolist() == [False, True]
    assert frame["fusion"].tolist() == frame["fusion_in_force"].tolist() == ["off", "off"]
    assert frame["compile_cache"].tolist() == ["warm", "warm"]
    assert frame["max_capture_batch"].tolist() == [8, 8]
    assert frame["max_compile_batch"].isna().all()
    layer = Results((FakeEngine().run(RunSpec()),)).frame()
    assert layer[["fusion", "compile_scope", "max_capture_batch"]].isna().all(axis=None)
    assert layer["captures"].tolist() == [0]


def run_two() -> Results:
    axes = {"attention_backend": ("reference", "sdpa"), "batch_size": (1, 8)}
    engine = FakeEngine(latency=lambda spec: 1000.0 * spec.size / (2 if spec.modes.attention_backend == "sdpa" else 1))
    return sweep(SweepSpec(axes=axes, base=STEP.replace(samples=5)), engine=engine)


def test_the_table_of_steps_has_their_columns_and_no_tokens() -> None:
    frame = run_two().frame()
    frame = frame[~frame["anchor"]]
    assert frame["size"].tolist() == frame["batch_size"].tolist() == [1, 8, 1, 8]
    assert frame["num_tokens"].isna().all()
    assert frame["latency_us"].tolist() == pytest.approx([1000, 8000, 500, 4000])
    assert frame["decode_us"].tolist() == frame["latency_us"].tolist()
    assert frame["decode_throughput"].tolist() == pytest.approx([1000, 1000, 2000, 2000], rel=1e-2)
    assert frame["top1_agreement"].tolist() == [1.0] * 4
    assert frame["first_bad_layer"].isna().all()
    assert frame["total_us"].tolist() == pytest.approx((frame["prefill_us"] + 7 * frame["decode_us"]).tolist())
    assert (frame["kv_cache_bytes"] > 0).all()


def test_layers_and_steps_stand_in_one_table() -> None:
    both = Results((FakeEngine().run(RunSpec()), FakeEngine().run(STEP)))
    frame = both.frame()
    assert frame["subject"].tolist() == ["moe_layer", "step"]
    assert frame["size"].tolist() == [16, 1]
    assert frame["attention_backend"].isna().tolist() == [True, False]
    assert math.isnan(frame["prefill_us"].iloc[0])
    assert len(both.filter(subject="step")) == 1
    assert len(both.filter(attention_backend="sdpa", batch_size=[1])) == 1


def test_records_of_steps_are_read_back_whole(tmp_path: object) -> None:
    results = run_two()
    path = f"{tmp_path}/steps"
    for kind in ("jsonl", "parquet"):
        results.write(f"{path}.{kind}", kind)
        assert load(f"{path}.{kind}").records == results.records
    record = results.records[0]
    assert Record.from_json(record.to_json()) == record
    assert record.profile


def test_a_batch_that_ran_out_of_memory_skips_the_larger_ones() -> None:
    engine = FakeEngine(fail=lambda spec: Status.OUT_OF_MEMORY if spec.size >= 4 else None)
    made = SweepSpec(axes={"batch_size": (1, 4, 16)}, base=STEP)
    results = sweep(made, engine=engine)
    found = [(r.spec.size, str(r.status)) for r in results.points]
    assert found == [(1, "ok"), (4, "out_of_memory"), (16, "skipped")]
    assert results.points[2].reason == "batch 4 already ran out of memory with the same modes"


def test_defaults_of_a_layer_hold_nothing_of_a_step() -> None:
    assert set(DEFAULTS[Subject.MOE_LAYER]) & {"batch_size", "num_layers", "mla_prefill"} == set()
    assert "num_tokens" not in DEFAULTS[Subject.STEP]
