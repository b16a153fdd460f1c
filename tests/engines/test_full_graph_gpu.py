"""Graphs of many sizes on a GPU: order and memory, failures, threads, copies, whole decode steps."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from workbench.devices import find_device
from workbench.engines.environment import device_environment
from workbench.engines.point import run_point
from workbench.engines.session import PointSession
from workbench.measure.graph_kernels import count_kernels
from workbench.record import Record, Status
from workbench.runtime.full_graph import FullGraphRunner
from workbench.runtime.graph import CaptureError, CudaRecorder
from workbench.spec import RunSpec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
]
GPU = torch.device("cuda:0")
WIDTH = 512


class Layer:
    """`tanh(x w)` of rows, with a large intermediate, so that a pool's size shows."""

    def __init__(self, largest: int, change: Callable[[torch.Tensor], torch.Tensor] = torch.tanh) -> None:
        source = torch.Generator(device=GPU).manual_seed(0)
        self.x = torch.zeros(largest, WIDTH, device=GPU)
        self.w = torch.randn(WIDTH, WIDTH, generator=source, device=GPU) / WIDTH**0.5
        self.change = change

    @property
    def largest(self) -> int:
        return self.x.shape[0]

    def load(self, rows: int, padded: int) -> None:
        if padded > rows:
            self.x[rows:padded] = self.x[:1]

    def call(self, size: int) -> torch.Tensor:
        wide = self.x[:size].repeat(1, 64)
        return self.change(wide.view(size, 64, WIDTH).mean(1) @ self.w)


@pytest.fixture
def reserved() -> Iterator[Callable[[], int]]:
    def measure() -> int:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return int(torch.cuda.memory_reserved())

    yield measure
    measure()


def graphs(layer: Layer, sizes: list[int], pool: Any = None) -> FullGraphRunner:
    pool = torch.cuda.graph_pool_handle() if pool is None else pool
    with torch.no_grad():
        return FullGraphRunner(layer, sizes, lambda: CudaRecorder(GPU, pool))


def filled(layer: Layer, rows: int, seed: int) -> torch.Tensor:
    source = torch.Generator(device=GPU).manual_seed(seed)
    layer.x.fill_(float("nan"))
    layer.x[:rows] = torch.randn(rows, WIDTH, generator=source, device=GPU)
    return torch.tanh(layer.x[:rows] @ layer.w)


def test_outputs_of_many_sizes_keep_their_values_until_the_end() -> None:
    layer = Layer(37)
    made = graphs(layer, [1, 2, 4, 8, 16])
    kept = []
    for seed, rows in enumerate((3, 37, 1, 16, 9, 2, 30)):
        want = filled(layer, rows, seed)
        kept.append((made.run(rows), want))
    for got, want in kept:
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    made.close()


def test_a_replay_at_the_padded_size_is_eager_bit_for_bit() -> None:
    layer = Layer(16)
    made = graphs(layer, [4, 8])
    for rows in range(1, 17):
        filled(layer, rows, rows)
        got = made.run(rows)
        size = made.padded(rows)
        assert size is not None
        layer.load(rows, size)
        assert torch.equal(got, layer.call(size)[:rows])
    made.close()


def test_many_sizes_take_about_what_the_largest_does_and_give_it_back(reserved: Callable[[], int]) -> None:
    sizes = [2**i for i in range(9)]
    layer = Layer(256)
    graphs(layer, sizes).close()  # cuBLAS keeps a workspace for the side stream
    before = reserved()
    alone = graphs(layer, [256])
    one = reserved() - before
    alone.close()
    for _ in range(5):
        made = graphs(layer, sizes)
        taken = reserved() - before
        assert taken <= 2 * one + 2**22, (taken, one)
        assert [row.size for row in made.captured] == sizes[::-1]
        made.close()
        assert reserved() == before


@pytest.mark.parametrize("wrong", ["item", "nonzero", "error"])
def test_a_failed_capture_names_its_size_and_the_next_one_works(wrong: str, reserved: Callable[[], int]) -> None:
    def change(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 4 and torch.cuda.is_current_stream_capturing():
            if wrong == "item":
                x.sum().item()
            elif wrong == "nonzero":
                x.nonzero()
            else:
                raise ValueError("a fault of the layer")
        return torch.tanh(x)

    layer = Layer(16, change)
    graphs(Layer(16), [4]).close()
    before = reserved()
    with pytest.raises(CaptureError, match="the capture of size 4 failed"):
        graphs(layer, [4, 8])
    assert reserved() <= before + 2**21
    good = Layer(16)
    made = graphs(good, [4, 8])
    want = filled(good, 5, 1)
    torch.testing.assert_close(made.run(5), want, rtol=1e-4, atol=1e-4)
    made.close()


def test_threads_and_garbage_do_not_break_a_capture() -> None:
    ending = threading.Event()

    def poll() -> None:
        other = torch.cuda.Stream()
        with torch.cuda.stream(other):
            while not ending.is_set():
                torch.cuda.mem_get_info()
                torch.zeros(1000, device=GPU).cpu()

    thread = threading.Thread(target=poll)
    thread.start()
    try:
        for _ in range(3):
            layer = Layer(16)
            made = graphs(layer, [1, 2, 4, 8])
            cycle: list[Any] = [made]
            cycle.append(cycle)
            del made, cycle  # a graph in a cycle, collected some time later
        layer = Layer(16)
        made = graphs(layer, [4])
        want = filled(layer, 3, 1)
        torch.testing.assert_close(made.run(3), want, rtol=1e-4, atol=1e-4)
    finally:
        ending.set()
        thread.join()
    made.close()


def test_two_runners_share_a_pool_and_keep_their_results() -> None:
    pool = torch.cuda.graph_pool_handle()
    first, second = Layer(8), Layer(8)
    made = [graphs(layer, [4], pool) for layer in (first, second)]
    wants = [filled(layer, 6, seed) for seed, layer in enumerate((first, second))]
    outs = [runner.run(6) for runner in made]
    for out, want in zip(outs, wants, strict=True):
        torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-4)
    for runner in made:
        runner.close()


def test_kernels_of_a_graph_are_counted() -> None:
    layer = Layer(8)
    made = graphs(layer, [2])
    counts = count_kernels(made.replay, made.sizes, GPU)
    assert set(counts) == {2, 8}
    assert all(3 <= count <= 12 for count in counts.values()), counts
    made.close()


@pytest.fixture(scope="module")
def run() -> Callable[..., Record]:
    device = find_device("cuda")
    session = PointSession(device, device_environment(device))

    def one(model: str, **values: Any) -> Record:
        given = {"subject": "step", "device": "cuda", "num_layers": 2, "samples": 6, "attention_backend": "triton"}
        moe = {} if model == "llama-3-8b" else {"moe_backend": "triton"}
        return run_point(
            RunSpec.from_flat({**given, **moe, "model": model, **values}), device, session, lambda *_: None
        )

    return one


@pytest.mark.parametrize("fusion", ["off", "on"])
@pytest.mark.parametrize("model", ["llama-3-8b", "deepseek-v2-lite", "qwen3-30b-a3b"])
def test_captured_steps(run: Callable[..., Record], model: str, fusion: str) -> None:
    record = run(model, graph="full", fusion=fusion, batch_size=3, input_len=37, output_len=6, max_capture_batch=4)
    assert record.status is Status.OK, (record.reason, record.detail)
    assert record.resolved["captured_size"] == 4
    assert [row.size for row in record.captures] == [4, 2, 1]
    assert all(row.kernels for row in record.captures)
    assert record.correctness is not None
    assert record.correctness.bitwise is True


def test_fusion_makes_fewer_kernels(run: Callable[..., Record]) -> None:
    counts = []
    for fusion in ("off", "on"):
        record = run("deepseek-v2-lite", graph="full", fusion=fusion, input_len=37, output_len=6)
        assert record.status is Status.OK, (record.reason, record.detail)
        counts.append(record.captures[0].kernels)
    assert counts[1] is not None
    assert counts[0] is not None
    assert counts[1] < 0.7 * counts[0], counts


@pytest.mark.parametrize("scope", ["all", "skip_moe"])
@pytest.mark.parametrize("quant", ["bf16", "fp8_block"])
def test_compiled_steps_in_a_graph(run: Callable[..., Record], quant: str, scope: str) -> None:
    values = {"graph": "full", "compile": "default", "compile_scope": scope, "quant": quant}
    record = run("deepseek-v2-lite", batch_size=2, input_len=37, output_len=6, **values)
    assert record.status is Status.OK, (record.reason, record.detail)
    assert record.resolved["graph_breaks"] == 0
    assert record.resolved["recompiles"] == 0
