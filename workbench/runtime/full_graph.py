"""CUDA graphs of one callable at several sizes: captured largest first in one pool, replayed at the next size up.

A size is a number of rows: tokens of a layer, sequences of a decode step.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from workbench.errors import InvalidInput
from workbench.runtime.graph import CAPTURE_MODE, WARMUPS, CaptureError, Recorder, first_cause

MAX_SIZE = 2**16


class Capturable(Protocol):
    """Something that runs on static buffers, whose first rows hold what is to be run."""

    @property
    def largest(self) -> int:
        """Rows that the buffers have."""

    def load(self, rows: int, padded: int) -> None:
        """Make rows `rows .. padded - 1` harmless; the first `rows` were filled by whoever calls."""

    def call(self, size: int) -> torch.Tensor:
        """Run on the first `size` rows, reading the buffers alone; a tensor with as many rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Captured:
    """What one size cost.

    Attributes:
        size: rows.
        capture_s: seconds of warming up and capturing.
        held_bytes: device memory that was reserved for it on top of the larger sizes.
    """

    size: int
    capture_s: float
    held_bytes: int


class FullGraphRunner:
    """Graphs of `subject` at every size of a list.

    A size between two captured ones is padded to the larger. Above the largest, the callable runs eager, and says so.

    Attributes:
        sizes: captured, rising.
        captured: what each cost, in the order of capture: the largest first, so that the others find room in its pool.
        capture_error_mode: of every capture.
        last: how the last run went: `graph` or `eager`, and the size that ran.
    """

    capture_error_mode = CAPTURE_MODE

    def __init__(
        self,
        subject: Capturable,
        sizes: Iterable[int],
        make_recorder: Callable[[], Recorder],
        *,
        largest: int | None = None,
        progress: Callable[[int, int, int], None] | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Warm up and capture every size.

        Args:
            subject: what is captured.
            sizes: rows; the largest is always captured too.
            make_recorder: a fresh recorder for each size, all of one pool.
            largest: rows of the largest graph; None for as many as the buffers have.
            progress: told how many sizes are done, of how many, and the next size.
            check: called before each size; may raise to stop.

        Raises:
            InvalidInput: a size below 1, or above the buffers'.
            CaptureError: a capture failed; it names the size, and everything captured before is given back.
        """
        self.subject = subject
        largest = subject.largest if largest is None else largest
        if not 1 <= largest <= subject.largest:
            raise InvalidInput(f"largest: must be from 1 to {subject.largest}, not {largest}")
        self.sizes = capture_list(sizes, largest)
        self.captured: list[Captured] = []
        self.last = ("none", 0)
        self._graphs: dict[int, tuple[Recorder, torch.Tensor]] = {}
        order = self.sizes[::-1]
        for done, size in enumerate(order):
            try:
                check()
                if progress is not None:
                    progress(done, len(order), size)
                self._capture(size, make_recorder())
            except BaseException:
                self.close()
                raise

    def _capture(self, size: int, recorder: Recorder) -> None:
        subject, start = self.subject, time.perf_counter()
        subject.load(size, size)
        recorder.warm(lambda: subject.call(size), WARMUPS)
        before = recorder.held_bytes()
        why, memory_out = "", False
        try:
            output = recorder.capture(lambda: subject.call(size))
        except Exception as error:
            why, memory_out = first_cause(error)
        if why:  # out of the handler, so that no traceback holds the capture's tensors
            self.close()
            recorder.release()
            if memory_out:
                raise torch.OutOfMemoryError(f"while capturing size {size}: {why}")
            raise CaptureError(f"the capture of size {size} failed: {why}")
        self._graphs[size] = (recorder, output)
        held = max(0, recorder.held_bytes() - before)
        self.captured.append(Captured(size=size, capture_s=time.perf_counter() - start, held_bytes=held))

    @property
    def held_bytes(self) -> int:
        """Device memory that all graphs hold."""
        return sum(one.held_bytes for one in self.captured)

    def padded(self, rows: int) -> int | None:
        """The captured size that `rows` rows are run at; None where they run eager."""
        at = bisect_left(self.sizes, rows)
        return self.sizes[at] if at < len(self.sizes) else None

    def replay(self, rows: int) -> torch.Tensor:
        """Run the first `rows` rows of the buffers.

        Returns:
            The rows' results, part of a static output that the next replay of any size overwrites: `run` copies.

        Raises:
            RuntimeError: the runner was closed.
            InvalidInput: fewer rows than 1, or more than the buffers have.
        """
        if not self._graphs:
            raise RuntimeError("this graph runner was closed")
        if not 1 <= rows <= self.subject.largest:
            raise InvalidInput(f"size: must be from 1 to {self.subject.largest}, not {rows}")
        size = self.padded(rows)
        if size is None:
            self.last = ("eager", rows)
            self.subject.load(rows, rows)
            return self.subject.call(rows)
        self.last = ("graph", size)
        recorder, output = self._graphs[size]
        self.subject.load(rows, size)
        recorder.replay()
        return output[:rows]

    def run(self, rows: int) -> torch.Tensor:
        """As `replay`, but a copy that stays as it is."""
        return self.replay(rows).clone()

    def close(self) -> None:
        """Give every graph's memory back; further runs raise. May be called again."""
        graphs, self._graphs = self._graphs, {}
        recorders = [recorder for recorder, _ in graphs.values()]
        graphs.clear()
        while recorders:
            recorders.pop().release()


def capture_list(sizes: Iterable[int], largest: int) -> list[int]:
    """The sizes that are captured, rising: those given, and the largest that there is.

    Raises:
        InvalidInput: a size below 1, or above the largest.
    """
    wanted = set(sizes)
    for size in wanted:
        if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= largest:
            raise InvalidInput(f"sizes: must be whole numbers from 1 to {largest}, not {size!r}")
    return sorted(wanted | {largest})


def default_sizes(largest: int) -> list[int]:
    """1, 2, 4, 8, then every 8 up to 256, every 16 up to 512, every 64 beyond, as far as `largest`.

    Padding wastes at most the step: below 8 rows a decode step takes nearly the same time at every size.
    """
    found = [1, 2, 4, *range(8, 257, 8), *range(272, 513, 16), *range(576, MAX_SIZE + 1, 64)]
    return capture_list((size for size in found if size <= largest), largest)


def padding_waste(sizes: Sequence[int], rows: Sequence[int]) -> float:
    """Share of replayed rows that are padding; runs of more rows than the largest size are left out."""
    pairs = [(n, sizes[bisect_left(sizes, n)]) for n in rows if n <= sizes[-1]]
    return 1.0 - sum(n for n, _ in pairs) / sum(size for _, size in pairs) if pairs else 0.0
