"""A CUDA graph around a whole layer.

Shapes: T tokens, D model, K experts per token.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import torch
from moe_kernels import Routing

from workbench.runtime.inputs import Inputs, LayerFunction

CAPTURE_MODE = "thread_local"
WARMUPS = 3


class CaptureError(RuntimeError):
    """A capture failed. `leaked_bytes`: device memory that did not come back, 0 where all did."""

    def __init__(self, message: str, leaked_bytes: int = 0) -> None:
        super().__init__(message)
        self.leaked_bytes = leaked_bytes


class Recorder(Protocol):
    """What records and replays; `CudaRecorder` on a GPU, a stand-in in tests."""

    def warm(self, call: Callable[[], torch.Tensor], times: int) -> None:
        """Run `call` `times` times where it will be captured."""

    def capture(self, call: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Record `call`; returns the output that every replay fills."""

    def replay(self) -> None:
        """Run what was recorded."""

    def release(self) -> None:
        """Let go of the record and its memory."""

    def held_bytes(self) -> int:
        """Device bytes that this process has reserved."""


class CudaRecorder:
    """One graph in a memory pool, captured on a side stream.

    The capture mode is `thread_local`: another thread of this process (one that reads telemetry, say) does not break
    the capture.
    """

    _streams: ClassVar[dict[int, torch.cuda.Stream]] = {}

    def __init__(self, device: torch.device, pool: Any = None) -> None:
        """`pool`: a `torch.cuda.graph_pool_handle()` that several recorders share; None for one of its own."""
        self.device = device
        self._pool = pool
        # One side stream a device: memory is cached by stream, so a stream a graph would keep some for each.
        index = device.index or 0
        if index not in self._streams:
            self._streams[index] = torch.cuda.Stream(device)
        self._stream = self._streams[index]
        self._graph: Any = None

    def warm(self, call: Callable[[], torch.Tensor], times: int) -> None:
        """See `Recorder`: first calls compile kernels and start libraries, which a capture cannot."""
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            for _ in range(times):
                call()
        torch.cuda.current_stream(self.device).wait_stream(self._stream)
        torch.cuda.synchronize(self.device)

    def capture(self, call: Callable[[], torch.Tensor]) -> torch.Tensor:
        """See `Recorder`."""
        gc.collect()  # a graph that is freed during a capture breaks it
        enabled = gc.isenabled()
        gc.disable()
        self._graph = torch.cuda.CUDAGraph()
        whole = False
        try:
            pool = torch.cuda.graph_pool_handle() if self._pool is None else self._pool
            with torch.cuda.graph(self._graph, pool=pool, stream=self._stream, capture_error_mode=CAPTURE_MODE):
                output = call()
            whole = True
        finally:
            if enabled:
                gc.enable()
            if not whole:  # a stream whose capture broke is not used again
                self._streams.pop(self.device.index or 0, None)
        return output

    def replay(self) -> None:
        """See `Recorder`."""
        self._graph.replay()

    def release(self) -> None:
        """See `Recorder`."""
        graph, self._graph = self._graph, None
        if graph is not None:
            torch.cuda.synchronize(self.device)
            graph.reset()
        del graph
        gc.collect()
        torch.cuda.empty_cache()

    def held_bytes(self) -> int:
        """See `Recorder`."""
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        return int(torch.cuda.memory_reserved(self.device))


class FullGraph:
    """A layer captured at the size of `inputs`, whose buffers every replay reads.

    Attributes:
        inputs: the static inputs.
        held_bytes: device memory that the graph holds.
    """

    def __init__(self, function: LayerFunction, inputs: Inputs, recorder: Recorder) -> None:
        """Warm up with the very shape, then capture.

        Raises:
            CaptureError: the capture failed, with the cause; another one may be tried.
        """
        self.inputs = inputs
        self._recorder = recorder
        self._output: torch.Tensor | None = None
        recorder.warm(lambda: inputs.call(function), WARMUPS)
        before = recorder.held_bytes()
        why, memory_out = "", False
        try:
            self._output = recorder.capture(lambda: inputs.call(function))
        except Exception as error:
            why, memory_out = first_cause(error)
        if why:  # out of the handler, so that no traceback holds the capture's tensors
            recorder.release()
            if memory_out:
                raise torch.OutOfMemoryError(f"while capturing: {why}")
            raise CaptureError(f"the capture failed: {why}", max(0, recorder.held_bytes() - before))
        self.held_bytes = max(0, recorder.held_bytes() - before)

    @property
    def output(self) -> torch.Tensor:
        """The static output `[T, D]`, overwritten by every replay."""
        if self._output is None:
            raise RuntimeError("this graph was closed")
        return self._output

    def replay(self) -> torch.Tensor:
        """Replay on what the inputs hold; the result is the static output itself."""
        output = self.output
        self._recorder.replay()
        return output

    def run(self, x_TD: torch.Tensor, routing: Routing) -> torch.Tensor:
        """Copy inputs in, replay, and return a copy that later replays leave alone."""
        self.inputs.load(x_TD, routing)
        return self.replay().clone()

    def close(self) -> None:
        """Give the graph's memory back; further replays raise. May be called again."""
        if self._output is not None:
            self._output = None
            self._recorder.release()


def first_cause(error: BaseException) -> tuple[str, bool]:
    """What broke a capture, in one line, and whether memory ran out.

    Ending a capture that was broken raises another error on top of the one that broke it.
    """
    causes = _causes(error)
    memory_out = any(isinstance(cause, (torch.OutOfMemoryError, MemoryError)) for cause in causes)
    text = str(causes[-1])
    return f"{type(causes[-1]).__name__}: {text.splitlines()[0] if text else 'no message'}", memory_out


def _causes(error: BaseException) -> list[BaseException]:
    """An error and what it was raised on top of, the first cause last."""
    found = [error]
    while (earlier := found[-1].__cause__ or found[-1].__context__) is not None and earlier not in found:
        found.append(earlier)
    return found
