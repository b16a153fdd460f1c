"""A step's compile and graph modes put in force, with what they cost and what was in force at this point."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from workbench.engines.draft import Draft
from workbench.measure.graph_kernels import count_kernels
from workbench.modes import Compile, CompileScope, Graph
from workbench.record import CaptureRow
from workbench.runtime.compile import compile_count
from workbench.runtime.full_graph import FullGraphRunner, default_sizes
from workbench.runtime.graph import CAPTURE_MODE, CudaRecorder, Recorder
from workbench.runtime.step import StepRunner
from workbench.runtime.step_compile import CompiledDecode
from workbench.runtime.step_decode import BufferedStepRunner
from workbench.spec import RunSpec


@dataclass(slots=True)
class StepModes:
    """Modes of one point; `close` gives back what they took."""

    spec: RunSpec
    device: torch.device
    progress: Callable[[str, str], None]
    check: Callable[[], None]
    draft: Draft
    _made: list[BufferedStepRunner] = field(default_factory=list)

    def runner(self, plain: StepRunner) -> BufferedStepRunner:
        """The step of `plain`, its decode compiled and captured as the spec asks."""
        modes = self.spec.modes
        torch._dynamo.reset()
        decode = CompiledDecode(
            plain.network,
            plain.cache,
            modes.compile,
            skip_moe=modes.compile_scope is CompileScope.SKIP_MOE,
            max_batch=modes.max_compile_batch,
        )
        made = BufferedStepRunner(
            plain.network, plain.cache, plain.prompts_BS, plain.output_len, plain.routings, pick=decode.pick
        )
        self._made.append(made)
        captured = modes.graph is Graph.FULL
        largest = modes.max_capture_batch or plain.batch_size
        sizes = default_sizes(largest) if modes.max_capture_batch else [largest]
        self._compile(made, decode, sizes[::-1] if captured else [plain.batch_size])
        if captured:
            self._capture(made, sizes, largest)
        return made

    def _compile(self, made: BufferedStepRunner, decode: CompiledDecode, sizes: list[int]) -> None:
        """Run every size once, so that what is compiled is not taken for the capture's own time."""
        modes, draft = self.spec.modes, self.draft
        batch_size = made.batch_size
        draft.resolved["compile"] = modes.compile.value if decode.compiles(made.batch_size) else Compile.NONE.value
        if modes.compile is Compile.NONE:
            return
        draft.resolved["compile_scope"] = modes.compile_scope.value
        before, start = compile_count(), time.perf_counter()
        for size in sizes:
            self.check()
            if decode.compiles(size):
                self.progress("compiling", f"decode at batch {size}, compile {modes.compile}")
                for _ in range(2):
                    made.buffers.load(size, size)
                    made.buffers.call(size)
        self._wait()
        made_now = compile_count().since(before)
        if made_now:
            draft.startup["compile_s"] = draft.startup.get("compile_s", 0.0) + time.perf_counter() - start
            draft.startup["compile_cache"] = self.spec.cache.value
        wanted = sum(decode.compiles(size) for size in sizes)
        draft.resolved |= {
            "graphs_compiled": made_now.graphs,
            "graph_breaks": made_now.graph_breaks,
            "recompiles": max(0, made_now.graphs - wanted),
            "kernels_compiled": int(draft.resolved.get("kernels_compiled") or 0) + made_now.kernels,
        }
        if not decode.compiles(batch_size):
            draft.notes.append(
                f"Batch {batch_size} is above max_compile_batch {modes.max_compile_batch}: this step is not compiled."
            )

    def _capture(self, made: BufferedStepRunner, sizes: list[int], largest: int) -> None:
        draft = self.draft
        pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None
        start = time.perf_counter()
        graphs = made.capture(
            sizes,
            largest,
            lambda: self.recorder(pool),
            progress=lambda done, of, size: self.progress("compiling", f"capturing batch {size}, {done} of {of} done"),
            check=self.check,
        )
        self._wait()
        draft.startup["capture_s"] = time.perf_counter() - start
        draft.memory["graph_bytes"] = graphs.held_bytes
        kernels = self.kernels(graphs)
        draft.captures = tuple(
            CaptureRow(
                size=one.size,
                capture_s=one.capture_s,
                held_bytes=one.held_bytes,
                kernels=kernels.get(one.size),
            )
            for one in graphs.captured
        )
        size = graphs.padded(made.batch_size)
        draft.resolved |= {"graph": "eager" if size is None else "full", "capture_error_mode": CAPTURE_MODE}
        if size is None:
            draft.notes.append(
                f"Batch {made.batch_size} is above the largest graph, of batch {largest}: it runs eager."
            )
        else:
            draft.resolved["captured_size"] = size

    def recorder(self, pool: object) -> Recorder:
        """A fresh recorder."""
        return CudaRecorder(self.device, pool)

    def kernels(self, graphs: FullGraphRunner) -> dict[int, int]:
        """Kernels of each graph."""
        self.progress("compiling", "counting the graphs' kernels")
        return count_kernels(graphs.replay, graphs.sizes, self.device)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """Close the graphs, and forget compiled code: it holds weights and caches."""
        for made in self._made:
            made.close()
        self._made.clear()
        torch._dynamo.reset()
