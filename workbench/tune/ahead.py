"""Compiling candidates ahead in other processes, so that timing finds their kernels in triton's cache on disk.

Workers are started afresh, compile for a GPU that they never open, and are killed at the end: nothing waits for them.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from types import TracebackType
from typing import Any, NamedTuple, Self

from moe_kernels.formats import BLOCK, FORMATS, PACK_UNIT
from moe_kernels.names import Quant
from moe_kernels.tuning.names import Problem
from moe_kernels.tuning.rows import Row

# Jobs that each worker has in hand, so that it need not wait while this process times.
IN_HAND = 4
LONGEST_S = 120.0
MOST_WORKERS = 16


class Job(NamedTuple):
    """One configuration to compile for one problem."""

    problem: Problem
    zero_points: bool
    config: Row
    capability: int
    shared_bytes: int


@dataclass
class _Worker:
    process: SpawnProcess
    pipe: Connection
    in_hand: deque[int] = field(default_factory=deque)
    answered: int = 0


class Ahead:
    """A pool of compilers; leave it by `close`, or use it as a context.

    Attributes:
        compiled: jobs that were compiled.
        notes: the first reason why jobs were left to be compiled when they are timed; empty where none was.
    """

    def __init__(self, workers: int | None = None, compile_one: Callable[[Job], int] | None = None) -> None:
        """Start `workers` processes, by default two less than there are processors, that run `compile_one`."""
        count = workers if workers is not None else max(1, min(MOST_WORKERS, len(os.sched_getaffinity(0)) - 2))
        self._compile = compile_one or compile_job
        self._context = multiprocessing.get_context("spawn")
        self._workers = [self._start() for _ in range(count)]
        self._waiting: deque[int] = deque()
        self._jobs: dict[int, Job] = {}
        self._answers: dict[int, str] = {}
        self.compiled = 0
        self.notes: list[str] = []

    def add(self, job: Job) -> int:
        """Queue a job; returns its number."""
        number = len(self._jobs)
        self._jobs[number] = job
        self._waiting.append(number)
        self._feed()
        return number

    def verdict(self, number: int, longest_s: float = LONGEST_S) -> str:
        """Wait for a job: why its configuration cannot be compiled or launched; empty where it can, or may.

        A job that waits for a worker is not waited for: it moves to the front.
        """
        if number in self._waiting:
            self._waiting.remove(number)
            self._waiting.appendleft(number)
        end = time.monotonic() + longest_s
        while number not in self._answers:
            left = end - time.monotonic()
            if left <= 0:
                return f"compiling takes longer than {longest_s:.0f} s"
            if not self._workers:
                return ""  # it is compiled when it is timed
            self._collect(min(left, 1.0))
        return self._answers[number]

    def close(self) -> None:
        """End all workers at once, whatever they do."""
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join(5.0)
            worker.pipe.close()
        self._workers.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> _Worker:
        own, theirs = self._context.Pipe()
        process = self._context.Process(target=_work, args=(theirs, self._compile), daemon=True)
        process.start()
        theirs.close()
        return _Worker(process, own)

    def _feed(self) -> None:
        for worker in list(self._workers):
            while self._waiting and len(worker.in_hand) < IN_HAND:
                number = self._waiting.popleft()
                worker.in_hand.append(number)
                try:
                    worker.pipe.send((number, self._jobs[number]))
                except OSError:
                    self._ended(worker)
                    break

    def _collect(self, longest_s: float) -> None:
        by_pipe = {worker.pipe: worker for worker in self._workers}
        for ready in wait(list(by_pipe), longest_s):
            worker = by_pipe[ready]  # type: ignore[index]
            try:
                number, kind, text = worker.pipe.recv()
            except (EOFError, OSError):
                self._ended(worker)
                continue
            worker.in_hand.remove(number)
            worker.answered += 1
            self._answers[number] = text if kind == "refused" else ""
            if kind == "compiled":
                self.compiled += 1
            elif kind == "left" and not self.notes:
                self.notes.append(f"Some kernels are compiled when they are timed: {text}")
        self._feed()

    def _ended(self, worker: _Worker) -> None:
        """A compiler that ended took its first job with it; the others go to another one.

        One that ended before it answered anything is not replaced: there may be no compiling in other processes here.
        """
        self._workers.remove(worker)
        worker.pipe.close()
        worker.process.join(1.0)
        ended = f"a compiler ended with {worker.process.exitcode}"
        if worker.answered:
            if worker.in_hand:
                self._answers[worker.in_hand.popleft()] = ended
            self._workers.append(self._start())
        elif not self.notes:
            self.notes.append(f"Some kernels are compiled when they are timed: {ended} before its first kernel")
        self._waiting.extendleft(reversed(worker.in_hand))
        self._feed()


def _work(pipe: Connection, compile_one: Callable[[Job], int]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that waits
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    while True:
        try:
            number, job = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            shared = compile_one(job)
            kind, text = "compiled", ""
            if shared > job.shared_bytes > 0:
                text = f"needs {shared:,} bytes of shared memory and a block may take {job.shared_bytes:,}"
                kind = "refused"
        except (ValueError, NotImplementedError) as error:
            kind, text = "refused", _first_line(error)
        except Exception as error:
            # Of triton's own errors each is about the kernel; any other may be about this shortcut alone.
            kind = "refused" if type(error).__module__.startswith("triton.") else "left"
            text = _first_line(error)
        pipe.send((number, kind, text))


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else 'no message'}"


def compile_job(job: Job) -> int:
    """Compile all kernels of a call as it would launch them; returns the most shared memory that one needs."""
    import torch
    from moe_kernels.experts.config import flatten_config, unflatten_config
    from moe_kernels.experts.triton import launch_experts
    from moe_kernels.testing.offline import compile_only

    problem = job.problem
    config = unflatten_config(tuple(flatten_config(job.config)))
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[problem.dtype]
    size = (problem.num_tokens, problem.top_k)
    with compile_only(job.capability) as kernels:
        launch_experts(
            torch.empty(problem.num_tokens, problem.hidden_size, dtype=dtype, device="meta"),
            meta_layer(problem, job.zero_points, dtype),
            torch.empty(size, dtype=torch.float32, device="meta"),
            torch.empty(size, dtype=torch.int32, device="meta"),
            config,
        )
    return max((kernel.shared for kernel in kernels), default=0)


def meta_layer(problem: Problem, zero_points: bool, dtype: Any) -> Any:
    """A layer's stored weights without memory: `StoredLayer` with tensors on `meta`."""
    import torch
    from moe_kernels.experts.layer import StoredLayer

    quant = Quant(problem.quant)
    form, experts = FORMATS[quant], problem.num_experts
    hidden, ffn = problem.hidden_size, problem.intermediate_size
    if form.packed:
        stored = torch.uint8
    elif form.quantized:
        stored = torch.int8 if quant in (Quant.INT8, Quant.INT8_WEIGHT) else torch.float8_e4m3fn
    else:
        stored = dtype

    def empty(*size: int, kind: Any) -> Any:
        return torch.empty(*size, dtype=kind, device="meta")

    def columns(count: int) -> int:
        return _ceil(count, PACK_UNIT) * PACK_UNIT // 2 if form.packed else count

    def scale(rows: int, count: int) -> tuple[tuple[int, int], Any] | None:
        if not form.quantized:
            return None
        return {
            Quant.FP8_TENSOR: ((1, 1), torch.float32),
            Quant.FP8_BLOCK: ((_ceil(rows, BLOCK), _ceil(count, BLOCK)), torch.float32),
            Quant.INT4: ((rows, _ceil(count, problem.group_size or BLOCK)), dtype),
            Quant.NVFP4: ((rows, 2 * _ceil(count, PACK_UNIT)), torch.float8_e4m3fn),
            Quant.MXFP4: ((rows, _ceil(count, PACK_UNIT)), torch.uint8),
        }.get(quant, ((rows, 1), torch.float32))

    w1, w2 = scale(ffn, hidden), scale(hidden, ffn)
    zero = quant is Quant.INT4 and zero_points
    nvfp4 = quant is Quant.NVFP4
    return StoredLayer(
        w1=empty(experts, 2 * ffn, columns(hidden), kind=stored),
        w2=empty(experts, hidden, columns(ffn), kind=stored),
        w1_scale=empty(experts, 2, *w1[0], kind=w1[1]) if w1 else None,
        w2_scale=empty(experts, *w2[0], kind=w2[1]) if w2 else None,
        w1_zero=empty(experts, 2, *w1[0], kind=torch.uint8) if w1 and zero else None,
        w2_zero=empty(experts, *w2[0], kind=torch.uint8) if w2 and zero else None,
        w1_global=empty(experts, 2, kind=torch.float32) if nvfp4 else None,
        w2_global=empty(experts, kind=torch.float32) if nvfp4 else None,
        x_scale=None,
        h_scale=None,
        quant=quant,
        intermediate_size=ffn,
        group_size=problem.group_size if quant is Quant.INT4 else 0,
    )


def _ceil(value: int, unit: int) -> int:
    return -(-value // unit)
