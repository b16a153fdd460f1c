"""A captured layer on a stand-in recorder: buffers, copies, failures, what is let go. The real one is in test_gpu."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from moe_kernels import Routing

from workbench.runtime.graph import WARMUPS, CaptureError, FullGraph
from workbench.runtime.inputs import Inputs


class Playback:
    """Records by keeping the call; replays it into the first output."""

    def __init__(self, leak: int = 0) -> None:
        self.call: Callable[[], torch.Tensor] | None = None
        self.output: torch.Tensor | None = None
        self.warmed = self.released = 0
        self.held = 1000
        self.leak = leak

    def warm(self, call: Callable[[], torch.Tensor], times: int) -> None:
        for _ in range(times):
            call()
        self.warmed += times

    def capture(self, call: Callable[[], torch.Tensor]) -> torch.Tensor:
        self.held += 500
        self.call, self.output = call, call()
        return self.output

    def replay(self) -> None:
        assert self.call is not None
        assert self.output is not None
        self.output.copy_(self.call())

    def release(self) -> None:
        self.released += 1
        self.held = 1000 + self.leak

    def held_bytes(self) -> int:
        return self.held


def problem(scale: float) -> tuple[torch.Tensor, Routing]:
    return scale * torch.ones(3, 4), Routing(torch.full((3, 2), scale), torch.ones(3, 2, dtype=torch.int32))


def layer(x: torch.Tensor, w: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return x * w.sum(dim=1, keepdim=True) + ids.sum()


def test_results_are_copies_and_inputs_are_static() -> None:
    recorder = Playback()
    inputs = Inputs(*problem(1.0))
    addresses = [t.data_ptr() for t in (inputs.x, inputs.topk_weights, inputs.topk_ids)]
    graph = FullGraph(layer, inputs, recorder)
    assert recorder.warmed == WARMUPS
    assert graph.held_bytes == 500
    outs = [graph.run(*problem(scale)) for scale in (1.0, 2.0, 3.0)]
    assert [float(out[0, 0]) for out in outs] == [8.0, 14.0, 24.0]  # earlier results keep their values
    assert graph.replay() is graph.output
    assert addresses == [t.data_ptr() for t in (inputs.x, inputs.topk_weights, inputs.topk_ids)]
    x, routing = problem(3.0)
    assert inputs.untouched(x, routing)
    assert not inputs.untouched(2 * x, routing)


def test_chained_replays() -> None:
    graph = FullGraph(lambda x, w, ids: x + 1, Inputs(*problem(1.0)), Playback())
    once = graph.run(*problem(1.0))
    twice = graph.run(once, problem(1.0)[1])
    assert float(once[0, 0]) == 2.0
    assert float(twice[0, 0]) == 3.0


def test_close_gives_back_and_ends() -> None:
    recorder = Playback()
    graph = FullGraph(layer, Inputs(*problem(1.0)), recorder)
    graph.close()
    graph.close()
    assert recorder.released == 1
    with pytest.raises(RuntimeError, match="closed"):
        graph.replay()


def test_a_failed_capture_names_the_first_cause_and_the_leak() -> None:
    class Broken(Playback):
        def capture(self, call: Callable[[], torch.Tensor]) -> torch.Tensor:
            try:
                raise ValueError("reads a value on the host\nmore")
            except ValueError:
                raise RuntimeError("capture was invalidated")  # noqa: B904 - as the end of a broken capture does

    recorder = Broken(leak=64)
    with pytest.raises(CaptureError, match=r"ValueError: reads a value on the host$") as told:
        FullGraph(layer, Inputs(*problem(1.0)), recorder)
    assert told.value.leaked_bytes == 64
    assert recorder.released == 1
    assert float(FullGraph(layer, Inputs(*problem(1.0)), Playback()).run(*problem(2.0))[0, 0]) == 14.0


def test_memory_that_runs_out_in_a_capture_is_named_so() -> None:
    class Full(Playback):
        def capture(self, call: Callable[[], torch.Tensor]) -> torch.Tensor:
            try:
                raise torch.OutOfMemoryError("tried to allocate 9 GiB")
            finally:
                raise RuntimeError("capture was invalidated")

    with pytest.raises(torch.OutOfMemoryError, match="while capturing"):
        FullGraph(layer, Inputs(*problem(1.0)), Full())
