"""What a configuration's result is held against, on the CPU with stand-ins for the graph and the kernels."""

from dataclasses import replace

import pytest
import torch
from moe_kernels import fused_experts

from workbench.devices import DeviceInfo
from workbench.models.layer import load_layer_source
from workbench.modes import Quant
from workbench.spec import RunSpec
from workbench.tune import bench as module
from workbench.tune.bench import LayerBench
from workbench.tune.search import DeviceLost, Wrong

CPU = DeviceInfo(type="cpu", name="some CPU", torch_device="cpu", memory_bytes=2**36)


class Recorder:
    """Runs the call again where a graph would replay it, into the output it had."""

    released = 0

    def __init__(self, device):
        pass

    def warm(self, call, times):
        for _ in range(times):
            call()

    def capture(self, call):
        self._call, self._output = call, call()
        return self._output

    def replay(self):
        self._output.copy_(self._call())

    def release(self):
        type(self).released += 1


class Clock:
    """No device to hold busy."""

    def __init__(self, device):
        pass


@pytest.fixture(scope="module")
def layer():
    spec = RunSpec.from_flat({"model": "qwen3-30b-a3b", "tp_size": 16, "top_k": 2})
    source = load_layer_source(spec, CPU)
    source.shape = replace(source.shape, num_experts=4, hidden_size=64)
    return source, {quant: source.build_weights(quant) for quant in (Quant.BF16, Quant.FP8_BLOCK, Quant.INT4)}


@pytest.fixture
def make(layer, monkeypatch):
    source, weights = layer
    monkeypatch.setattr(module, "CudaRecorder", Recorder)
    monkeypatch.setattr(module, "SpinClock", Clock)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(Recorder, "released", 0)
    calls = []

    def build(quant=Quant.BF16, change=lambda out, call: out, verdict=lambda config: ""):
        def run(x, stored, routing, *, impl, config):
            assert impl == "triton"
            calls.append(config)
            return change(fused_experts(x, stored, routing, impl="reference"), len(calls))

        calls.clear()
        monkeypatch.setattr(module, "fused_experts", run)
        return LayerBench(source, weights[quant], 5, verdict)

    return build


@pytest.mark.parametrize("quant", [Quant.BF16, Quant.FP8_BLOCK, Quant.INT4])
def test_a_right_result_is_taken(make, quant):
    entry = make(quant).open({})
    entry.close()
    assert Recorder.released == 1


@pytest.mark.parametrize("quant", [Quant.BF16, Quant.FP8_BLOCK, Quant.INT4])
def test_a_result_a_little_off_is_wrong(make, quant):
    with pytest.raises(Wrong, match=r"^wrong: error \d\.\d\de-0\d above the budget of "):
        make(quant, lambda out, call: out * 1.1).open({})


def test_one_row_that_is_not_written_is_wrong(make):
    def skip(out, call):
        out[3] = float("nan")
        return out

    with pytest.raises(Wrong, match=r"^wrong: NaN or infinity in the output$"):
        make(change=skip).open({})


def test_a_replay_that_differs_is_wrong_and_gives_its_graph_back(make):
    # Eager, warm-up and capture are right; the replay is not.
    with pytest.raises(Wrong, match=r"^wrong in a CUDA graph: error "):
        make(change=lambda out, call: out if call < 4 else out * 1.5).open({})
    assert Recorder.released == 1


def test_what_cannot_be_compiled_is_not_run(make):
    bench = make(change=lambda out, call: 1 / 0, verdict=lambda config: "ValueError: BLOCK_SIZE_K")
    with pytest.raises(Wrong, match=r"^ValueError: BLOCK_SIZE_K$"):
        bench.open({})


def test_an_error_drops_the_candidate_and_a_lost_device_ends_it_all(make, monkeypatch):
    def fail(out, call):
        raise RuntimeError("out of resource: shared memory\nmore")

    bench = make(change=fail)
    with pytest.raises(Wrong, match=r"^cannot run: RuntimeError: out of resource: shared memory$"):
        bench.open({})

    def lost(device=None):
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    with pytest.raises(DeviceLost, match=r"^RuntimeError: out of resource"):
        bench.open({})
