"""Tuning a layer for some token counts: what is planned, what is searched, and what is kept. No torch here.

A cell is one token count. Each is searched, and its row written, before the next begins.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

from moe_kernels.tuning.lookup import find_config
from moe_kernels.tuning.names import Problem
from moe_kernels.tuning.rows import Row

from workbench.devices import DeviceInfo
from workbench.errors import InvalidInput
from workbench.models.shapes import ModelShape, model_shape
from workbench.modes import Quant
from workbench.spec import MAX_TOKENS, RunSpec
from workbench.support import find_reasons
from workbench.tune.candidates import Grid, candidates
from workbench.tune.files import read_rows, version_place
from workbench.tune.merge import merge_row, plain
from workbench.tune.neighbours import neighbours
from workbench.tune.search import Bench, CellResult, search

# What a candidate takes: to be compiled by one process, and to be checked, captured and timed.
COMPILE_S, TIME_S, FINALS_S, LOAD_S = 2.0, 0.25, 6.0, 30.0
HOPPER_NAME, HOPPER_SHARED = "NVIDIA H200", 232448
_DTYPE = {Quant.FP32: "fp32", Quant.FP16: "fp16"}
Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class TuneRequest:
    """What to tune.

    Attributes:
        spec: model, format, tensor-parallel size, device and seed; its number of tokens is not read.
        tokens: token counts, ascending.
        out: folder that holds folders of files, one a triton version.
        seconds: budget; None for none.
        quick: whether only rows tuned for neighbouring problems are tried.
    """

    spec: RunSpec
    tokens: tuple[int, ...]
    out: Path
    seconds: float | None = None
    quick: bool = False


class Cell(NamedTuple):
    """One token count and its candidates."""

    problem: Problem
    up: Grid
    down: Grid


@dataclass(kw_only=True)
class TuneReport:
    """What came of it, one line a cell, and whether all were searched."""

    lines: list[str] = field(default_factory=list)
    written: list[Path] = field(default_factory=list)
    complete: bool = True


class Workshop(Protocol):
    """Makes what runs candidates on a device."""

    def bench(self, cell: Cell) -> Bench:
        """Inputs and oracle of one cell."""


OpenWorkshop = Callable[[TuneRequest, DeviceInfo, list[Cell], int, Progress], AbstractContextManager[Workshop]]
"""`(request, device, cells, shared_bytes, progress)`: made once for all cells."""


def parse_tokens(text: str) -> tuple[int, ...]:
    """`1,8,32` as token counts.

    Raises:
        InvalidInput: a word is no whole number from 1 to `MAX_TOKENS`.
    """
    counts = set()
    for word in text.split(","):
        if not word.strip().isascii() or not word.strip().isdigit() or not 1 <= int(word) <= MAX_TOKENS:
            raise InvalidInput(f"tokens: must be whole numbers from 1 to {MAX_TOKENS}, as in 1,8,32, not {text!r}")
        counts.add(int(word))
    return tuple(sorted(counts))


def make_problem(spec: RunSpec, shape: ModelShape, num_tokens: int) -> Problem:
    """The problem whose row is looked up when `spec` runs `num_tokens` tokens."""
    return Problem(
        num_tokens=num_tokens,
        num_experts=shape.num_experts,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        top_k=shape.top_k,
        quant=spec.modes.quant.value,
        dtype=_DTYPE.get(spec.modes.quant, "bf16"),
        group_size=spec.modes.group_size if spec.modes.quant is Quant.INT4 else 0,
    )


def plan_cells(request: TuneRequest, shared_bytes: int, device_name: str) -> list[Cell]:
    """Every token count with its candidates.

    Raises:
        InvalidInput: the model is unknown or cannot be cut or spread as asked, or a quick search has no neighbour.
    """
    shape = model_shape(request.spec)

    def grid(which: str, problem: Problem) -> Grid:
        if request.quick:
            return neighbours(which, problem, shared_bytes, device_name)
        return candidates(which, problem, shared_bytes, seed=request.spec.seed)

    cells = []
    for tokens in request.tokens:
        problem = make_problem(request.spec, shape, tokens)
        cell = Cell(problem, grid("up", problem), grid("down", problem))
        if not cell.up.kept or not cell.down.kept:
            raise InvalidInput(
                f"quick: no row tuned on {device_name} is near enough to {_count(tokens)} of {problem.quant}; "
                "leave it out to search them all"
            )
        cells.append(cell)
    return cells


def estimate_s(cells: list[Cell], workers: int) -> float:
    """Seconds that all cells take where nothing is in triton's cache."""
    count = sum(len(cell.up.kept) + len(cell.down.kept) for cell in cells)
    return LOAD_S + len(cells) * FINALS_S + max(count * TIME_S, count * COMPILE_S / workers)


def check_runnable(request: TuneRequest, device: DeviceInfo) -> None:
    """Raise InvalidInput with the first reason why the layer cannot be run on `device`."""
    spec = request.spec.replace(moe_backend="triton", num_tokens=max(request.tokens), routing="uniform")
    reasons = find_reasons(spec, device)
    if reasons:
        raise InvalidInput(f"{reasons[0].field}: tuning cannot run on {device.name}: {reasons[0].sentence}")


def tune(
    request: TuneRequest,
    device: DeviceInfo,
    shared_bytes: int,
    open_workshop: OpenWorkshop,
    *,
    progress: Progress = lambda text: None,
    clock: Callable[[], float] = time.monotonic,
) -> TuneReport:
    """Search all cells within the budget and keep the fastest rows in files below `request.out`.

    Each cell gets an equal share of the time that is left. Cells that no time is left for are named in the report.

    Raises:
        InvalidInput: the layer cannot be run here, or the folder cannot be read or written.
    """
    start = clock()
    check_runnable(request, device)
    cells = plan_cells(request, shared_bytes, device.name)
    folder = version_place(request.out)
    for cell in cells:  # a folder that cannot be used is told before time is spent
        read_rows(folder, cell.problem, device.name, shared_bytes)
    report = TuneReport()
    with ExitStack() as stack:
        workshop = stack.enter_context(open_workshop(request, device, cells, shared_bytes, progress))
        for index, cell in enumerate(cells):
            tokens = cell.problem.num_tokens
            left = float("inf") if request.seconds is None else request.seconds - (clock() - start)
            if left <= 0:
                report.complete = False
                report.lines.append(f"{_count(tokens)}: no time was left")
                continue
            name = f"[{index + 1}/{len(cells)}] {_count(tokens)}"
            result = _search_cell(
                cell, folder, device.name, shared_bytes, workshop, left / (len(cells) - index), clock, progress, name
            )
            for text in result.dropped:
                progress(f"{name}: dropped: {text}")
            if result.best is not None:
                merged = merge_row(folder, cell.problem, device.name, shared_bytes, result.best)
                report.written += [path for path in merged.paths if path not in report.written]
                for note in merged.notes:
                    progress(note)
                kept = "written" if merged.paths else "the row that was there stays"
                report.lines.append(f"{_count(tokens)}: {result.best.us:.1f} us, {kept}{_left(result)}")
            else:
                report.complete = False
                report.lines.append(f"{_count(tokens)}: nothing could be timed{_left(result)}")
            progress(f"{name}: {report.lines[-1].partition(': ')[2]}")
            if result.lost:
                report.complete = False
                report.lines.append(f"Ended early: the device can run nothing more in this process ({result.lost})")
                break
    return report


def _search_cell(
    cell: Cell,
    folder: Path,
    device_name: str,
    shared_bytes: int,
    workshop: Workshop,
    seconds: float,
    clock: Callable[[], float],
    progress: Progress,
    name: str,
) -> CellResult:
    begin = clock()
    bench = workshop.bench(cell)
    return search(
        cell.up.kept,
        cell.down.kept,
        bench,
        known=_known(cell.problem, folder, device_name, shared_bytes),
        seconds=seconds - (clock() - begin),
        clock=clock,
        progress=lambda text: progress(f"{name}: {text}"),
    )


def _known(problem: Problem, folder: Path, device_name: str, shared_bytes: int) -> list[Row]:
    """What a new row must be faster than: the folder's own, and what is taken without it."""
    rows, _ = read_rows(folder, problem, device_name, shared_bytes)
    own = rows.get(problem.num_tokens)
    found = find_config(problem, device_name, shared_bytes).config
    return [*([plain(own)] if own is not None else []), *([plain(found)] if found is not None else [])]


def _left(result: CellResult) -> str:
    parts = [f"{len(result.dropped)} dropped"] if result.dropped else []
    parts += [f"no time for {result.left} candidates"] if result.left else []
    return f" ({', '.join(parts)})" if parts else ""


def _count(tokens: int) -> str:
    return "1 token" if tokens == 1 else f"{tokens} tokens"


@contextmanager
def gpu_workshop(
    request: TuneRequest, device: DeviceInfo, cells: list[Cell], shared_bytes: int, progress: Progress
) -> Iterator[Workshop]:
    """The real one: holds the device's lock, compiles ahead in other processes, and times on the GPU."""
    import os

    from workbench.engines.lock import DeviceLock
    from workbench.tune.ahead import Ahead
    from workbench.tune.workshop import GpuWorkshop

    lock = DeviceLock(device)
    lock.acquire(owner_pid=os.getpid(), owner="workbench tune")
    try:
        with Ahead() as ahead:
            yield GpuWorkshop(request, device, cells, shared_bytes, ahead, progress)
            for note in ahead.notes:
                progress(note)
    finally:
        lock.release()
