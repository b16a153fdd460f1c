"""What only a GPU can show: the timer, graphs and their memory, and a device error that costs one point."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_kernels import Routing, fused_experts
from moe_kernels.testing.oracle import random_problem

from workbench.devices import find_device
from workbench.engines.local import LocalEngine
from workbench.measure.floor import sample_work
from workbench.measure.roofs import measure_roofs
from workbench.measure.timer import SpinClock, Timer, middle
from workbench.models.shapes import model_shape
from workbench.modes import L2, Quant
from workbench.record import Record, Status
from workbench.runtime.graph import CaptureError, CudaRecorder, FullGraph
from workbench.runtime.inputs import Inputs, layer_function
from workbench.spec import RunSpec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
]
GPU = torch.device("cuda:0")


def series(call: Callable[[], object], l2: L2 = L2.COLD, samples: int = 31, **values: Any) -> Any:
    with torch.no_grad():
        return Timer(device=GPU, call=call, prepare=lambda index: None, l2=l2, **values).run(samples)


def layer_of(tokens: int, experts: int = 8, seed: int = 0) -> tuple[Any, Inputs, torch.Tensor, Routing]:
    x, weights, routing = random_problem(tokens, experts, 512, 256, 2, "bf16", "cuda", seed)
    return layer_function(weights, "triton"), Inputs(x, routing), x, routing


@pytest.mark.parametrize("reduction", ["deterministic", "atomic"])
def test_a_split_layer_is_right_in_a_graph_and_says_whether_it_repeats(reduction: str) -> None:
    with LocalEngine("cuda") as engine:
        for split, repeats in ((1, False), (4, True)):
            how = "deterministic" if split == 1 else reduction
            given = {"moe_backend": "triton", "graph": "full", "split_k": split, "reduction": how, "samples": 5}
            record = engine.run(
                RunSpec.from_flat({"model": "qwen3-30b-a3b", "device": "cuda", "num_tokens": 7, **given})
            )
            assert record.status is Status.OK, record.reason
            assert record.resolved["split_k"] == split
            assert record.resolved["reduction"] == how
            assert ("distinct_outputs" in record.resolved) == repeats
            assert record.correctness is not None
            assert record.correctness.bitwise is (None if how == "atomic" else True)
            if repeats and reduction == "deterministic":
                assert record.resolved["distinct_outputs"] == 1


@pytest.mark.parametrize("quant", [quant for quant in Quant if quant not in ("fp32", "bf16", "fp16")])
def test_quantised_layers_are_right_in_a_graph(quant: Quant) -> None:
    with LocalEngine("cuda") as engine:
        for tokens in (1, 77):
            given = {"moe_backend": "triton", "graph": "full", "quant": quant, "num_tokens": tokens, "samples": 5}
            record = engine.run(RunSpec.from_flat({"model": "qwen3-30b-a3b", "device": "cuda", **given}))
            assert record.status is Status.OK, record.reason
            assert record.resolved["arithmetic"]
            assert record.work is not None
            assert record.work.floor_share is not None


def test_a_no_op_takes_nearly_nothing_although_the_cache_is_emptied() -> None:
    timed = series(lambda: None)
    assert middle(timed.samples_us) < 8
    assert timed.evictor_bytes >= 4 * torch.cuda.get_device_properties(GPU).L2_cache_size


def test_a_spin_takes_its_time() -> None:
    clock = SpinClock(GPU)
    timed = series(lambda: clock.spin(500e-6))
    assert middle(timed.samples_us) == pytest.approx(500, rel=0.15)


def test_launch_cost_is_in_the_wall_time_and_not_in_the_latency() -> None:
    x = torch.zeros(64, device=GPU)

    def many() -> None:
        for _ in range(100):
            x.add_(1)

    timed = series(many)
    assert middle(timed.samples_us) < 0.8 * middle(timed.wall_us)
    assert "spin" in timed.method


def test_a_call_that_waits_for_the_device_is_said() -> None:
    x = torch.ones(64, device=GPU)
    timed = series(lambda: x.sum().item())
    assert any("waits for the device" in note for note in timed.notes)


def test_cold_is_slower_than_hot_where_the_weights_fit_the_cache() -> None:
    x = torch.ones(2**23, device=GPU)  # 32 MiB
    total = torch.zeros((), device=GPU)

    def read() -> None:
        torch.sum(x, dim=0, out=total)

    assert middle(series(read).samples_us) > 1.1 * middle(series(read, L2.HOT).samples_us)


def test_events_agree_with_the_wall_over_many_replays() -> None:
    layer, inputs, _, _ = layer_of(16)
    with torch.no_grad():
        graph = FullGraph(layer, inputs, CudaRecorder(GPU))
        timed = series(graph.replay, L2.HOT, samples=200, replay=True)
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(1000):
            graph.replay()
        torch.cuda.synchronize()
        each_us = (time.perf_counter() - start) * 1e3
        graph.close()
    assert middle(timed.samples_us) == pytest.approx(each_us, rel=0.5, abs=6)


def test_roofs_are_below_the_datasheet_and_near_it() -> None:
    start = time.perf_counter()
    roofs = measure_roofs(GPU)
    assert time.perf_counter() - start < 4
    if "H200" in torch.cuda.get_device_name():
        assert 3.0e12 < roofs["read"] < 4.8e12
        assert 400e12 < roofs["bf16"] < 989e12


@pytest.mark.parametrize("order", [(64, 1, 8), (1, 8, 64)])
def test_replays_equal_eager_bit_for_bit_on_different_inputs(order: tuple[int, ...]) -> None:
    with torch.no_grad():
        for tokens in order:
            layer, inputs, x, routing = layer_of(tokens)
            graph = FullGraph(layer, inputs, CudaRecorder(GPU))
            outs, wants = [], []
            for seed in (0, 1, 2):
                _, _, x, routing = layer_of(tokens, seed=seed)
                outs.append(graph.run(x, routing))
                wants.append(layer(x, *routing))
            for out, want in zip(outs, wants, strict=True):
                assert torch.equal(out, want)
            graph.close()


def test_a_failed_capture_then_a_good_one() -> None:
    layer, inputs, x, routing = layer_of(4)

    def reads(x: torch.Tensor, w: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return x * float(ids.sum().item())

    with torch.no_grad():
        with pytest.raises(CaptureError) as told:
            FullGraph(reads, inputs, CudaRecorder(GPU))
        assert "capture" in str(told.value)
        graph = FullGraph(layer, inputs, CudaRecorder(GPU))
        assert torch.equal(graph.run(x, routing), layer(x, *routing))
        graph.close()


def test_another_thread_does_not_break_a_capture() -> None:
    layer, inputs, x, routing = layer_of(4)
    done = threading.Event()

    def poll() -> None:
        while not done.is_set():
            torch.cuda.mem_get_info(GPU)
            torch.zeros(16).to(GPU)

    thread = threading.Thread(target=poll)
    thread.start()
    try:
        with torch.no_grad():
            for _ in range(5):
                graph = FullGraph(layer, inputs, CudaRecorder(GPU))
                assert torch.equal(graph.run(x, routing), layer(x, *routing))
                graph.close()
    finally:
        done.set()
        thread.join()


def test_memory_comes_back_after_close_five_times() -> None:
    layer, inputs, _, _ = layer_of(256)
    held = []
    with torch.no_grad():
        for _ in range(6):
            graph = FullGraph(layer, inputs, CudaRecorder(GPU))
            assert graph.held_bytes > 0
            graph.close()
            del graph
            gc.collect()
            torch.cuda.empty_cache()
            held.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    assert len(set(held[1:])) == 1


# Points in a worker.


@pytest.fixture(scope="module")
def gpu_engine(surroundings: Path) -> Iterator[LocalEngine]:
    with LocalEngine("cuda") as shared:
        yield shared


def spec(backend: str = "triton", **values: Any) -> RunSpec:
    given = {"model": "qwen3-30b-a3b", "device": "cuda", "num_tokens": 8, "samples": 20}
    return RunSpec.from_flat({**given, "moe_backend": backend, **values})


def good(record: Record) -> Record:
    assert record.status is Status.OK, f"{record.status}: {record.reason}\n{record.detail}"
    return record


@pytest.mark.parametrize(
    "modes",
    [
        {},
        {"graph": "full"},
        {"compile": "default", "dynamic": True},
        {"compile": "default", "graph": "full"},
        {"compile": "reduce-overhead"},
        {"moe_backend": "torch_grouped_mm", "graph": "full"},
        {"moe_backend": "reference"},
        {"graph": "full", "quant": "fp16", "routing": "zipf"},
        {"graph": "full", "routing": "single_expert", "l2": "hot"},
    ],
    ids=lambda modes: "-".join(map(str, modes.values())) or "eager",
)
def test_every_mode_is_right_and_measured(gpu_engine: LocalEngine, modes: dict[str, Any]) -> None:
    record = good(
        gpu_engine.run(
            spec(modes.get("moe_backend", "triton"), **{k: v for k, v in modes.items() if k != "moe_backend"})
        )
    )
    assert record.correctness is not None
    assert record.work is not None
    assert record.work.floor_share is not None
    assert 0.001 < record.work.floor_share < 1.3
    assert set(record.metrics) == {"latency", "wall"}
    if modes.get("graph") == "full":
        assert record.correctness.bitwise is True
        assert record.memory.graph_bytes is not None
    assert record.environment.clocks_mhz.get("sm", 0) > 0


def test_inductors_graphs_do_not_copy_the_weights(gpu_engine: LocalEngine) -> None:
    plain = good(gpu_engine.run(spec(graph="full")))
    own = good(gpu_engine.run(spec(compile="reduce-overhead")))
    assert plain.memory.weight_bytes is not None
    assert plain.latency_us is not None
    assert own.latency_us is not None
    # 1.2 GB of weights copied before each replay would take half a millisecond and as much memory again.
    assert own.latency_us < 3 * plain.latency_us
    assert own.memory.peak_bytes is not None
    assert own.memory.peak_bytes < 1.7 * plain.memory.weight_bytes


def test_distinct_experts_are_those_of_the_routing(gpu_engine: LocalEngine) -> None:
    record = good(gpu_engine.run(spec(num_tokens=1, routing="uniform")))
    assert record.work is not None
    assert record.work.distinct_experts == 8
    want = sample_work(model_shape(record.spec), Quant.BF16, 1, 8, 8)
    assert record.work.bytes == want.bytes


def test_a_device_error_costs_one_point(gpu_engine: LocalEngine) -> None:
    good(gpu_engine.run(spec()))
    pid = gpu_engine.pid
    record = gpu_engine.run(spec("gpu_backends:reads_past_the_end"))
    assert record.status is Status.RUNTIME_ERROR
    assert "device-side assert" in record.reason or "illegal" in record.reason
    assert any("started anew" in note for note in record.notes)
    good(gpu_engine.run(spec()))
    assert gpu_engine.pid != pid


def test_memory_that_runs_out_then_a_smaller_point(gpu_engine: LocalEngine) -> None:
    record = gpu_engine.run(spec("gpu_backends:hungry", num_tokens=64))
    assert record.status is Status.OUT_OF_MEMORY
    good(gpu_engine.run(spec("gpu_backends:hungry", num_tokens=4)))


def test_a_capture_that_cannot_be(gpu_engine: LocalEngine) -> None:
    record = gpu_engine.run(spec("gpu_backends:reads_on_the_host", graph="full"))
    assert record.status is Status.CAPTURE_ERROR
    good(gpu_engine.run(spec(graph="full")))


def test_the_memory_is_free_when_the_engine_is_closed(gpu_engine: LocalEngine) -> None:
    pynvml = pytest.importorskip("pynvml")
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(find_device("cuda").uuid)

    def used() -> int:
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)

    good(gpu_engine.run(spec()))
    before = used()
    gpu_engine.close()
    assert before - used() > 2**30  # 1.2 GB of weights and a context


def test_the_reference_agrees_on_the_device() -> None:
    x, weights, routing = random_problem(8, 8, 512, 256, 2, "bf16", "cuda")
    first, second = (fused_experts(x, weights, routing, impl=impl) for impl in ("triton", "reference"))
    torch.testing.assert_close(first, second, rtol=0.05, atol=0.05)
