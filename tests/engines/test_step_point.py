"""One whole step in this process, from spec to record, and its profile as a file."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "check"))
from step_cases import CONFIGS

from workbench.devices import Datasheet, find_device
from workbench.engines import run_profile, step_modes, step_point
from workbench.engines.environment import device_environment
from workbench.engines.faults import Cancelled
from workbench.engines.lock import DeviceLock
from workbench.engines.point import run_point
from workbench.engines.session import PointSession
from workbench.errors import DeviceBusy, InvalidInput
from workbench.measure.roofs import NAMES
from workbench.record import Record, Status
from workbench.spec import RunSpec
from workbench.step_record import STEP_METRICS

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
CPU = find_device("cpu")


class Bench:
    """A session, and what it told."""

    def __init__(self, folder: Path) -> None:
        environment = device_environment(CPU).model_copy(update={"roofs": dict.fromkeys(NAMES, 1e10)})
        self.session = PointSession(CPU, environment)
        self.folder = folder
        self.told: list[tuple[str, str]] = []

    def spec(self, case: str = "latent", **values: Any) -> RunSpec:
        path = self.folder / case / "config.json"
        if not path.exists():
            path.parent.mkdir(parents=True)
            path.write_text(json.dumps({**CONFIGS[case], "topk_group": 1, "n_group": 1}), encoding="utf-8")
        given = {"batch_size": 2, "input_len": 9, "output_len": 4, "page_size": 4, "samples": 3}
        return RunSpec.from_flat(
            {"subject": "step", "model": str(path), "device": "cpu", "quant": "fp32", **given, **values}
        )

    def run(self, spec: RunSpec, check: Callable[[], None] = lambda: None) -> Record:
        self.told.clear()
        return run_point(spec, CPU, self.session, lambda state, text: self.told.append((state, text)), check)


@pytest.fixture(scope="module")
def bench(surroundings: Path) -> Bench:
    return Bench(surroundings / "steps")


def test_a_whole_record(bench: Bench) -> None:
    record = bench.run(bench.spec())
    assert record.status is Status.OK, (record.reason, record.detail)
    states = [state for state, _ in bench.told]
    assert [s for i, s in enumerate(states) if i == 0 or states[i - 1] != s] == [
        *("starting", "warming", "checking", "measuring", "done")
    ]
    assert {name: metric.unit for name, metric in record.metrics.items()} == {
        name: unit for name, unit in STEP_METRICS.items() if name != "perplexity"
    }
    assert record.metrics["prefill"].n == record.metrics["total"].n == 3
    assert record.metrics["decode"].n == 9
    assert record.latency_us == record.metrics["decode"].median
    for name, tokens in (("prefill", 18), ("decode", 2), ("total", 2 * (9 + 4))):
        rates = record.metrics[f"{name}_throughput"].samples
        taken = record.metrics[name].samples
        assert rates == pytest.approx([tokens * 1e6 / one for one in taken])
    assert record.correctness is not None
    assert record.correctness.step is not None
    assert record.correctness.step.layers_checked == 3
    assert record.memory.kv_cache_bytes == 3 * 2 * 4 * 4 * 40 * 4  # layers, sequences, pages, slots, latent, float32
    assert record.memory.weight_bytes
    assert record.work is not None
    assert record.work.distinct_experts == pytest.approx(5, abs=2)
    assert record.resolved["weights"] == "random, seed 0"
    assert record.resolved["repeats"] == 3
    assert {row.phase for row in record.profile} == {"prefill", "decode"}
    assert Record.from_json(record.to_json()) == record


def test_a_session_keeps_the_network_while_weights_stay(bench: Bench) -> None:
    bench.run(bench.spec())
    loads = []
    for values in (
        {"attention_backend": "reference"},
        {"batch_size": 3},
        {"quant": "int8"},
        {"mla_decode": "expanded"},
    ):
        record = bench.run(bench.spec(**values))
        assert record.status is Status.OK, (record.reason, record.detail)
        loads.append(any("layers" in text for state, text in bench.told if state == "starting"))
        assert record.resolved["attention_backend"] == values.get("attention_backend", "sdpa")
    assert loads == [False, False, True, True]


def test_a_layer_and_a_step_take_turns(bench: Bench, model: str) -> None:
    layer = RunSpec.from_flat({"model": model, "device": "cpu", "quant": "fp32", "num_tokens": 4, "samples": 3})
    assert bench.run(bench.spec()).status is Status.OK
    assert bench.run(layer).status is Status.OK
    assert bench.run(bench.spec()).status is Status.OK


@pytest.mark.parametrize("routing", ["balanced", "zipf"])
def test_a_given_routing_is_said(bench: Bench, routing: str) -> None:
    record = bench.run(bench.spec(routing=routing))
    assert record.status is Status.OK, (record.reason, record.detail)
    assert f"Routing {routing} is given to every layer; the model's gates are not run." in record.notes
    assert not any(row.part == "gate" for row in record.profile)


def test_prefill_alone(bench: Bench) -> None:
    record = bench.run(bench.spec("dense", output_len=1))
    assert record.status is Status.OK, (record.reason, record.detail)
    assert set(record.metrics) == {"prefill", "prefill_throughput", "total", "total_throughput"}
    assert record.latency_us == record.metrics["prefill"].median


def test_what_is_wrong_is_not_timed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    from workbench.models.network.moe import MoE

    forward = MoE.forward
    monkeypatch.setattr(MoE, "forward", lambda self, x: forward(self, x) * (1 if self.exact else 1.5))
    monkeypatch.setattr("workbench.check.step.plain_backends", _exact)
    record = bench.run(bench.spec())
    assert record.status is Status.INCORRECT
    assert record.reason.startswith("layer 1 is off by")
    assert record.metrics == {}
    assert record.profile == ()
    assert record.correctness is not None
    assert record.correctness.step is not None
    assert record.correctness.step.first_bad_layer == 1


class _exact:  # noqa: N801 - stands for a context
    """Plain code without the break: the experts' exact path."""

    def __init__(self, layer: Any) -> None:
        self.moe = layer.mlp

    def __enter__(self) -> None:
        self.moe.exact = True

    def __exit__(self, *error: object) -> None:
        self.moe.exact = False


def test_too_fast_to_be_true(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_point, "peak_rates", lambda device: Datasheet(read=1.0, rates={"fp32": 1.0}))
    record = bench.run(bench.spec())
    assert record.status is Status.IMPLAUSIBLE
    assert record.reason.startswith("prefill: the median of")
    assert record.metrics == {}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"graph": "full"}, "CUDA graphs need a GPU"),
        ({"moe_backend": "none_such"}, "moe_backend"),
        ({"attention_backend": "none_such"}, "attention_backend: must be"),
        ({"num_layers": 9}, "num_layers"),
        ({"perplexity_tokens": 10}, "Perplexity needs trained weights"),
    ],
)
def test_what_a_step_cannot_do_is_one_sentence(bench: Bench, values: dict[str, Any], words: str) -> None:
    record = bench.run(bench.spec(**values))
    assert record.status is Status.UNSUPPORTED
    assert words in record.reason
    assert "\n" not in record.reason


def test_a_step_can_be_stopped_in_every_phase(bench: Bench) -> None:
    calls = [0]
    bench.run(bench.spec(), lambda: calls.__setitem__(0, calls[0] + 1))
    assert calls[0] > 15
    for stop_at in (1, calls[0] // 3, calls[0] // 2, calls[0] - 1):
        left = [stop_at]

        def check(left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] <= 0:
                raise Cancelled

        record = bench.run(bench.spec(), check)
        assert record.status is Status.CANCELLED
        assert record.metrics == {}
    assert bench.run(bench.spec()).status is Status.OK


def test_a_trace_is_written(bench: Bench, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "trace.json"
    rows = run_profile(bench.spec(), path)
    assert {row.phase for row in rows} == {"prefill", "decode"}
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    assert any(event.get("name") == "step|decode|2|attention" for event in events)


def test_a_trace_of_nothing_that_runs_is_refused(bench: Bench, tmp_path: Path, model: str) -> None:
    with pytest.raises(InvalidInput, match="subject: a profile is of a step, not of a moe_layer"):
        run_profile(RunSpec.from_flat({"model": model, "device": "cpu"}), tmp_path / "a.json")
    with pytest.raises(InvalidInput, match="out: must be a file"):
        run_profile(bench.spec(), tmp_path)
    with pytest.raises(InvalidInput, match="CUDA graphs need a GPU"):
        run_profile(bench.spec(graph="full"), tmp_path / "a.json")
    lock = DeviceLock(CPU)
    lock.acquire(owner_pid=1, owner="another")
    try:
        with pytest.raises(DeviceBusy):
            run_profile(bench.spec(), tmp_path / "b.json")
    finally:
        lock.release()


class Playback:
    """Stands for a CUDA graph: runs the call again."""

    def __init__(self) -> None:
        self.held = 0

    def warm(self, call: Callable[[], Any], times: int) -> None:
        for _ in range(times):
            call()

    def capture(self, call: Callable[[], Any]) -> Any:
        self.call, self.output, self.held = call, call(), 4096
        return self.output

    def replay(self) -> None:
        self.output.copy_(self.call())

    def release(self) -> None:
        self.held = 0

    def held_bytes(self) -> int:
        return self.held


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_point, "find_reasons", lambda spec, device: [])
    monkeypatch.setattr(step_modes.StepModes, "recorder", lambda self, pool: Playback())
    monkeypatch.setattr(step_modes.StepModes, "kernels", lambda self, graphs: dict.fromkeys(graphs.sizes, 7))


@pytest.mark.parametrize("case", ["dense", "latent"])
@pytest.mark.parametrize(
    ("most", "sizes", "used"),
    [(None, [2], 2), (1, [1], None), (4, [4, 2, 1], 2), (2, [2, 1], 2), (9, [9, 8, 4, 2, 1], 2)],
)
def test_a_captured_step(
    bench: Bench, graphs: None, case: str, most: int | None, sizes: list[int], used: int | None
) -> None:
    record = bench.run(bench.spec(case, graph="full", max_capture_batch=most))
    assert record.status is Status.OK, (record.reason, record.detail)
    assert [row.size for row in record.captures] == sizes
    assert all(row.kernels == 7 and row.held_bytes == 4096 and row.capture_s > 0 for row in record.captures)
    assert record.memory.graph_bytes == 4096 * len(sizes)
    assert record.startup.capture_s
    assert record.resolved.get("captured_size") == used
    assert record.resolved["graph"] == ("eager" if used is None else "full")
    assert any("above the largest graph" in note for note in record.notes) == (used is None)
    assert record.correctness is not None
    assert record.correctness.mode is not None
    assert record.correctness.bitwise is True
    assert "The profile is of the eager step." in record.notes
    assert Record.from_json(record.to_json()) == record


def test_a_stale_graph_is_not_timed(bench: Bench, graphs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Playback, "replay", lambda self: None)
    record = bench.run(bench.spec("dense", graph="full"))
    assert record.status is Status.INCORRECT
    assert "differs from the run without the graph" in record.reason
    assert record.metrics == {}


@pytest.mark.slow
@pytest.mark.parametrize(("scope", "most"), [("all", None), ("skip_moe", None), ("all", 1)])
def test_a_compiled_step(bench: Bench, scope: str, most: int | None) -> None:
    spec = bench.spec("latent", compile="default", compile_scope=scope, max_compile_batch=most, num_layers=1)
    record = bench.run(spec)
    assert record.status is Status.OK, (record.reason, record.detail)
    assert record.resolved["compile"] == ("none" if most else "default")
    assert record.resolved["compile_scope"] == scope
    assert record.resolved["graph_breaks"] == 0
    assert record.resolved["recompiles"] == 0
    assert record.resolved["graphs_compiled"] == (0 if most else 1)
    assert (record.startup.compile_s is not None) == (most is None)
    assert any("above max_compile_batch 1" in note for note in record.notes) == (most is not None)
    assert record.correctness is not None
    assert record.correctness.mode is not None
    assert record.correctness.bitwise is None
