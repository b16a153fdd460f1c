"""One point in this process, from spec to record."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_kernels import Quant, Routing
from moe_kernels.formats import FORMATS, expert_bytes
from moe_kernels.testing.oracle import tag_expected, tag_problem

from workbench.devices import Datasheet, find_device
from workbench.engines import point as point_module
from workbench.engines.environment import device_environment
from workbench.engines.faults import Cancelled
from workbench.engines.point import run_point
from workbench.engines.session import PointSession
from workbench.measure.roofs import NAMES
from workbench.record import Record, Status
from workbench.spec import RunSpec

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
CPU = find_device("cpu")


class Bench:
    """A session, and what it told."""

    def __init__(self, model: str) -> None:
        environment = device_environment(CPU).model_copy(update={"roofs": dict.fromkeys(NAMES, 1e10)})
        self.session = PointSession(CPU, environment)
        self.model = model
        self.told: list[tuple[str, str]] = []

    def spec(self, backend: str = "reference", **values: Any) -> RunSpec:
        given = {"model": self.model, "device": "cpu", "quant": "fp32", "num_tokens": 4, "samples": 3}
        return RunSpec.from_flat({**given, "moe_backend": backend, **values})

    def run(self, spec: RunSpec, check: Callable[[], None] = lambda: None) -> Record:
        self.told.clear()
        return run_point(spec, CPU, self.session, lambda state, text: self.told.append((state, text)), check)


@pytest.fixture(scope="module")
def bench(surroundings: Path, model: str) -> Bench:
    return Bench(model)


def test_a_whole_record(bench: Bench) -> None:
    record = bench.run(bench.spec())
    assert record.status is Status.OK, record.detail
    assert [state for state, _ in bench.told] == ["starting", "warming", "warming", "checking", "measuring", "done"]
    assert record.metrics["latency"].n == 3
    assert record.latency_us is not None
    assert record.latency_us > 0
    assert record.correctness is not None
    assert record.correctness.passed
    assert record.correctness.rows == 4
    assert record.work is not None
    # Balanced: 4 tokens * 2 slots over 4 experts, each of 3 * 32 * 64 float32 weights; 4 rows in, 4 out.
    assert record.work.distinct_experts == 4
    assert record.work.bytes == 4 * (4 * 3 * 32 * 64) + 2 * 4 * 32 * 4
    assert record.work.operations == 2 * 8 * 3 * 32 * 64
    assert record.work.floor_us == pytest.approx(1e6 * record.work.bytes / 1e10)
    assert record.memory.weight_bytes == 4 * 4 * 3 * 32 * 64
    assert record.memory.peak_bytes is None or record.memory.peak_bytes > 2**20
    assert record.startup.load_s is not None
    assert record.startup.compile_s is None
    assert record.startup.compile_cache == "none"
    assert record.resolved["moe_backend"] == "reference"
    assert record.resolved["device"] == "cpu"
    assert record.resolved["l2"] == "cold"
    assert "reading" in str(record.resolved["cold_method"])
    assert record.command == bench.spec().command
    assert Record.from_json(record.to_json()) == record


@pytest.mark.parametrize("quant", [quant for quant in Quant if quant not in ("fp32", "bf16", "fp16")])
def test_quantised_formats_are_checked_and_say_how_they_multiply(bench: Bench, quant: Quant) -> None:
    record = bench.run(bench.spec(quant=quant, num_tokens=5))
    assert record.status is Status.OK, record.detail
    assert record.correctness is not None
    assert record.correctness.kernel.relative_l2 is not None
    assert record.correctness.total.relative_l2 is not None
    assert record.correctness.kernel.relative_l2 < record.correctness.total.relative_l2 < 0.3
    assert record.resolved["arithmetic"]
    assert record.memory.weight_bytes == 4 * expert_bytes(quant, 32, 64)
    assert record.work is not None
    assert record.work.bytes == record.memory.weight_bytes + 2 * 5 * 32 * 2
    with_roof = FORMATS[quant].weight_only  # fp8 and int8 have no measured rate on a CPU
    assert (record.work.floor_us is not None) == with_roof


@pytest.mark.parametrize("quant", ["fp8_tensor", "nvfp4"])
def test_quantised_layers_compile(bench: Bench, quant: str) -> None:
    record = bench.run(bench.spec(quant=quant, compile="default", dynamic=True, num_tokens=5))
    assert record.status is Status.OK, record.detail
    assert (record.resolved["graphs_compiled"], record.resolved["graph_breaks"]) == (1, 0)
    assert record.correctness is not None
    assert record.correctness.mode is not None


def test_weights_are_built_anew_where_their_options_change(bench: Bench) -> None:
    def errors(**values: Any) -> tuple[float | None, int | None]:
        record = bench.run(bench.spec(quant="int4", **values))
        assert record.status is Status.OK, record.detail
        assert record.correctness is not None
        return record.correctness.total.relative_l2, record.memory.weight_bytes

    plain, finer, zeros = errors(), errors(group_size=32), errors(group_size=32, zero_points=True)
    assert plain[0] is not None
    assert finer[0] is not None
    assert finer[0] < plain[0]
    assert [size for _, size in (plain, finer, zeros)] == [
        4 * expert_bytes(Quant.INT4, 32, 64, group_size=group, zero_points=zero)
        for group, zero in ((128, False), (32, False), (32, True))
    ]
    assert errors() == plain


def test_a_static_activation_scale_is_calibrated_and_said(bench: Bench) -> None:
    dynamic = bench.run(bench.spec(quant="fp8_tensor"))
    static = bench.run(bench.spec(quant="fp8_tensor", activation_scale="static"))
    again = bench.run(bench.spec(quant="fp8_tensor", activation_scale="static"))
    assert static.status is Status.OK, static.detail
    assert static.correctness == again.correctness
    assert dynamic.correctness != static.correctness
    assert "one fixed activation scale" in str(static.resolved["arithmetic"])
    assert any("fixed by the first 128 rows" in note for note in static.notes)
    assert not any("fixed by" in note for note in dynamic.notes)


def test_a_field_that_means_nothing_is_unsupported(bench: Bench) -> None:
    record = bench.run(bench.spec(split_k=2))
    assert record.status is Status.UNSUPPORTED
    assert record.reason.startswith("split_k is for moe_backend triton")
    record = bench.run(bench.spec("deep_gemm", quant="fp8_block"))
    assert record.status is Status.UNSUPPORTED
    assert "deep_gemm" in record.reason


def test_the_same_spec_gives_the_same_work_and_errors(bench: Bench) -> None:
    first, second = bench.run(bench.spec(seed=3)), bench.run(bench.spec(seed=3))
    assert first.correctness == second.correctness
    other = bench.run(bench.spec(seed=4))
    assert first.correctness is not None
    assert other.correctness is not None
    assert first.correctness.total != other.correctness.total


@pytest.mark.parametrize(
    ("backend", "words"),
    [
        ("zeros", "above the budget"),
        ("unscaled", "above the budget"),
        ("in_place", "wrote to its inputs"),
        ("short", "[3, 32], not [4, 32]"),
    ],
)
def test_wrong_is_incorrect_and_has_no_speed(bench: Bench, backend: str, words: str) -> None:
    record = bench.run(bench.spec(f"point_backends:{backend}"))
    assert record.status is Status.INCORRECT
    assert words in record.reason
    assert record.metrics == {}
    assert record.correctness is not None
    assert not record.correctness.passed
    assert bench.told[-1][0] == "failed"


@pytest.mark.parametrize(
    ("backend", "values", "status", "words"),
    [
        ("raises", {}, Status.RUNTIME_ERROR, "ZeroDivisionError: by nought"),
        ("hungry", {"num_tokens": 9}, Status.OUT_OF_MEMORY, "Tried to allocate 9 GiB"),
        ("breaks_graph", {"compile": "default"}, Status.COMPILE_ERROR, "Unsupported"),
        ("picky", {}, Status.UNSUPPORTED, "picky runs nowhere, so not with top_k 2."),
        ("missing", {}, Status.UNSUPPORTED, "cannot be imported"),
        ("number", {}, Status.UNSUPPORTED, "no function but int"),
    ],
)
def test_what_goes_wrong_has_a_name_and_the_next_point_runs(
    bench: Bench, backend: str, values: dict[str, Any], status: Status, words: str
) -> None:
    record = bench.run(bench.spec(f"point_backends:{backend}", **values))
    assert record.status is status, record.detail
    assert words in record.reason
    assert "\n" not in record.reason
    assert record.metrics == {}
    assert ("Traceback" in record.detail) == (status is not Status.UNSUPPORTED)
    assert status is Status.UNSUPPORTED or record.resolved["num_experts"] == 4
    assert bench.session.poisoned == ""
    assert bench.run(bench.spec()).status is Status.OK


def test_memory_of_a_failed_point_is_let_go(bench: Bench) -> None:
    bench.run(bench.spec("point_backends:hungry", num_tokens=9))
    gc.collect()
    blocks = [t for t in gc.get_objects() if type(t) is torch.Tensor and t.dtype == torch.uint8 and t.numel() == 2**25]
    assert blocks == []
    assert bench.run(bench.spec("point_backends:hungry", num_tokens=8)).status is Status.OK


def test_what_cannot_run_is_said(bench: Bench) -> None:
    record = bench.run(bench.spec(graph="full", compile="reduce-overhead"))
    assert record.status is Status.UNSUPPORTED
    assert "CUDA graphs need a GPU." in record.reason
    assert bench.told == [("failed", record.reason)]


@pytest.mark.parametrize("after", ["starting", "checking", "measuring"])
def test_stop_between_phases(bench: Bench, after: str) -> None:
    def check() -> None:
        if any(state == after for state, _ in bench.told):
            raise Cancelled

    record = bench.run(bench.spec(), check)
    assert record.status is Status.CANCELLED
    assert record.metrics == {}
    assert bench.told[-1][0] == "cancelled"
    assert after in [state for state, _ in bench.told]


def test_compiled_points_say_what_was_compiled(bench: Bench) -> None:
    first = bench.run(bench.spec(compile="default", dynamic=True, quant="bf16"))
    assert first.status is Status.OK, first.detail
    assert first.startup.compile_s is not None
    assert first.startup.compile_cache == "warm"
    assert (first.resolved["graphs_compiled"], first.resolved["recompiles"], first.resolved["graph_breaks"]) == (
        1,
        0,
        0,
    )
    assert first.correctness is not None
    assert first.correctness.mode is not None
    second = bench.run(bench.spec(compile="default", dynamic=True, quant="bf16", num_tokens=7))
    assert second.status is Status.OK, second.detail
    assert second.startup.compile_s is None
    assert second.resolved["graphs_compiled"] == 0
    assert any("nothing was compiled for this point" in note for note in second.notes)


def test_a_cold_compile_cache_is_a_fresh_folder_for_that_point(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    record = bench.run(bench.spec(compile="default", cache="cold", num_tokens=3))
    assert record.status is Status.OK, record.detail
    assert record.startup.compile_cache == "cold"
    assert record.startup.compile_s is not None
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path)
    assert not any(tmp_path.rglob("*.cpp"))


def test_faster_than_the_datasheet_is_implausible(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Datasheet(read=1.0, rates={"fp32": 1.0})
    monkeypatch.setattr(point_module, "peak_rates", lambda device: slow)
    record = bench.run(bench.spec())
    assert record.status is Status.IMPLAUSIBLE
    assert record.metrics == {}
    assert "datasheet" in record.reason
    assert record.work is not None
    assert not record.work.at_roof


@pytest.mark.parametrize("quant", ["fp32", "bf16"])
def test_the_closed_form_through_a_point(
    bench: Bench, surroundings: Path, monkeypatch: pytest.MonkeyPatch, quant: str
) -> None:
    _, weights = tag_problem(5, 4, 32, 64, quant)
    outputs: list[tuple[torch.Tensor, Routing]] = []
    from workbench.engines import session as session_module
    from workbench.models.random_layer import RandomLayer

    class Tagged(RandomLayer):
        def expert(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            return weights.w1[index].float(), weights.w2[index].float()

        def hidden_states(self, num_tokens: int) -> torch.Tensor:
            return torch.ones(num_tokens, 32)

    from workbench.models.shapes import model_shape

    def load(spec: RunSpec, device: Any) -> Tagged:
        return Tagged(model_shape(spec), torch.device("cpu"), spec.seed)

    real = point_module.check_layer

    def spy(variant: Any, inputs: Any, *rest: Any) -> Any:
        found = real(variant, inputs, *rest)
        outputs.append((found[1], rest[0][0].routing))
        return found

    monkeypatch.setattr(session_module, "load_layer_source", load)
    monkeypatch.setattr(point_module, "check_layer", spy)
    own = Bench(bench.model)
    record = own.run(own.spec(num_tokens=5, quant=quant))
    assert record.status is Status.OK, record.detail
    got, routing = outputs[0]
    torch.testing.assert_close(got, tag_expected(routing, 4)[:, None].expand(5, 32), rtol=0.01, atol=0)


def test_experts_that_are_all_chosen_give_the_trained_mlp(surroundings: Path, tmp_path: Path) -> None:
    config = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    own = Bench(str(tmp_path / "config.json"))
    whole = own.run(own.spec(experts=4, top_k=4, quant="bf16"))
    assert whole.status is Status.OK, whole.detail
    error = whole.resolved["trained_mlp_error"]
    assert isinstance(error, float)
    assert 1e-4 < error < 0.02
    sparse = own.run(own.spec(experts=4, top_k=2, routing="model"))
    assert sparse.status is Status.OK, sparse.detail
    lost = sparse.resolved["sparsity_error"]
    assert isinstance(lost, float)
    assert 0.1 < lost < 1
    assert "trained_mlp_error" not in sparse.resolved


def test_the_models_router_counts_flips(bench: Bench) -> None:
    record = bench.run(bench.spec(routing="model", quant="bf16", num_tokens=64))
    assert record.status is Status.OK, record.detail
    assert record.correctness is not None
    assert record.correctness.routing_flips is not None
    assert 0 <= record.correctness.routing_flips < 16
    given = bench.run(bench.spec(routing="zipf"))
    assert given.correctness is not None
    assert given.correctness.routing_flips is None
