"""The fake engine's steps: numbers that agree with each other, the same for the same spec."""

from __future__ import annotations

import pytest

from workbench.devices import DeviceInfo
from workbench.engines.fake import NOTE, FakeEngine
from workbench.errors import InvalidInput
from workbench.models.network.choose import choose_network
from workbench.models.network.memory import spec_memory
from workbench.record import STEP_METRICS, Record, Status
from workbench.spec import RunSpec

H200 = DeviceInfo(type="cuda", name="NVIDIA H200", torch_device="cuda:0", capability=(9, 0), memory_bytes=150 * 2**30)
STEP = RunSpec.from_flat({"subject": "step", "quant": "fp32", "batch_size": 4, "input_len": 100, "output_len": 5})


def test_its_numbers_agree_with_each_other() -> None:
    record = FakeEngine(latency=lambda spec: 2000.0).run(STEP)
    assert record.status is Status.OK
    assert record.latency_us == record.median("decode") == pytest.approx(2000.0)
    assert set(record.metrics) == set(STEP_METRICS) - {"perplexity"}
    assert all(metric.unit == STEP_METRICS[name] for name, metric in record.metrics.items())
    prefill, total = record.median("prefill"), record.median("total")
    assert prefill is not None
    assert total == pytest.approx(prefill + 4 * 2000.0)
    assert record.median("prefill_throughput") == pytest.approx(400 / prefill * 1e6)
    assert record.median("total_throughput") == pytest.approx(4 * 105 / total * 1e6)
    for phase, whole in (("prefill", prefill), ("decode", 2000.0)):
        assert sum(row.time_us for row in record.profile if row.phase == phase) == pytest.approx(whole)
    need = spec_memory(choose_network(STEP).config, STEP.modes, STEP.step_point)
    assert record.memory.weight_bytes == need.weight_bytes
    assert record.memory.kv_cache_bytes == need.kv_cache_bytes
    assert NOTE in record.notes
    assert Record.from_json(record.to_json()) == record


def test_its_check_and_profile_are_of_the_networks_layers() -> None:
    spec = STEP.replace(model="deepseek-v2-lite", num_layers=3, quant="bf16")
    record = FakeEngine().run(spec)
    assert record.correctness is not None
    check = record.correctness.step
    assert check is not None
    assert check.layers_checked == len(check.layer_errors) == 4  # one of them is dense
    assert check.worst_error == max(error for error in check.layer_errors if error is not None)
    assert record.correctness.passed
    assert {(row.layer, row.part) for row in record.profile if row.kind == "moe"} == {
        (1, "moe"),
        (2, "moe"),
        (3, "moe"),
    }
    assert FakeEngine().run(spec).model_copy(update={"created": record.created}) == record


def test_without_decode_steps_and_with_perplexity() -> None:
    record = FakeEngine().run(STEP.replace(output_len=1, perplexity_tokens=64))
    assert "decode" not in record.metrics
    assert record.latency_us == record.median("prefill") == record.median("total")
    assert {row.phase for row in record.profile} == {"prefill"}
    assert record.median("perplexity") == 12.5


def test_a_graph_has_a_row_a_size_and_says_what_was_in_force() -> None:
    engine = FakeEngine(device=H200)
    spec = STEP.replace(graph="full", max_capture_batch=20, compile="default", max_compile_batch=2, batch_size=9)
    record = engine.run(spec)
    assert [one.size for one in record.captures] == [20, 16, 8, 4, 2, 1]
    assert (record.resolved["graph"], record.resolved["captured_size"]) == ("full", 16)
    assert record.resolved["compile"] == "none"
    assert record.memory.graph_bytes == sum(one.held_bytes for one in record.captures)
    assert record.startup.capture_s == pytest.approx(sum(one.capture_s for one in record.captures))
    assert Record.from_json(record.to_json()) == record
    eager = engine.run(spec.replace(batch_size=21))
    assert (eager.resolved["graph"], eager.resolved["captured_size"]) == ("eager", None)
    own = engine.run(spec.replace(max_capture_batch=None, batch_size=2))
    assert [one.size for one in own.captures] == [2]
    assert own.resolved["compile"] == "default"
    assert own.startup.compile_cache == "warm"
    assert own.environment.device_type == "cuda"


def test_what_a_step_cannot_run_is_unsupported_or_refused() -> None:
    record = FakeEngine().run(STEP.replace(graph="full"))
    assert record.status is Status.UNSUPPORTED
    assert record.reason == "CUDA graphs need a GPU."
    with pytest.raises(InvalidInput, match="top_k: smollm2-135m has no experts"):
        FakeEngine().run(STEP.replace(top_k=2))
