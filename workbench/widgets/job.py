"""One sweep in a thread of its own: it drives the engine (a worker process), and keeps what it reports to be read."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.record import Record
from workbench.sweeps.results import Results
from workbench.sweeps.runner import SweepProgress, sweep
from workbench.sweeps.spec import SweepSpec

RUNNING = ("starting", "compiling", "warming", "checking", "measuring")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a job has reported so far. `version` grows with every report."""

    version: int
    state: str
    progress: SweepProgress | None
    records: tuple[Record, ...]


class EngineHolder:
    """The engine of a panel: one that was given and stays open, or a worker process of its own, kept between sweeps."""

    def __init__(self, given: Any) -> None:
        """Hold `given`, or with None make one when it is first needed."""
        self._given = given
        self._own: Any = None
        self._device = ""

    def get(self, device: str) -> Any:
        """The engine for a device; called from the job's thread, because a worker may take a while to start."""
        if self._given is not None:
            return self._given
        if self._own is not None and self._device != device:
            self.close()
        if self._own is None:
            self._own, self._device = local_engine(device), device
        return self._own

    def close(self) -> None:
        """End the worker process, if there is one."""
        engine, self._own = self._own, None
        if engine is not None:
            engine.close()


def local_engine(device: str) -> Any:
    """A worker process that owns the device."""
    from workbench.engines.local import LocalEngine

    return LocalEngine(device)


class SweepJob:
    """Runs `spec` on the engine that `engine()` gives; nothing here touches a widget.

    Attributes:
        finished: set when the thread is done.
        results, error: the end: one of them is there.
    """

    def __init__(self, spec: SweepSpec, engine: Callable[[], Any], out: Path, on_end: Callable[[], None]) -> None:
        """Prepare; `start` begins. `on_end` is called last, from the job's thread."""
        self.spec, self.out = spec, out
        self._engine, self._on_end = engine, on_end
        self._lock = threading.Lock()
        self._records: list[Record] = []
        self._progress: SweepProgress | None = None
        self._state, self._version = "starting", 0
        self._stop = threading.Event()
        self.finished = threading.Event()
        self.results: Results | None = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name=f"sweep {spec.name}", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """Ask it to end; returns at once."""
        self._stop.set()

    @property
    def stopping(self) -> bool:
        """Whether it was asked to end."""
        return self._stop.is_set()

    def snapshot(self) -> Snapshot:
        """What there is now."""
        with self._lock:
            return Snapshot(self._version, self._state, self._progress, tuple(self._records))

    def end_state(self) -> str:
        """How it ended: done, failed, cancelled or timed_out."""
        if self.error is not None or self.results is None:
            return "failed"
        if self.results.interrupted:
            return "cancelled"
        statuses = [str(record.status) for record in self.results.records]
        if any(status in ("ok", "unchecked") for status in statuses) or not statuses:
            return "done"
        tried = {status for status in statuses if status not in ("unsupported", "skipped")}
        return "done" if not tried else "timed_out" if tried == {"timed_out"} else "failed"

    def _report(self, progress: SweepProgress) -> None:
        with self._lock:
            self._version += 1
            self._progress = progress
            # A point's own end is not the sweep's: the state changes when the next point starts.
            if progress.state in RUNNING:
                self._state = progress.state
            if progress.record is not None:
                self._records.append(progress.record)

    def _work(self) -> None:
        try:
            self.results = sweep(self.spec, out=self.out, engine=self._engine(), progress=self._report, stop=self._stop)
        except BaseException as error:  # kept as a value: `result()` raises it, the panel shows it
            self.error = error
        finally:
            self.finished.set()
            self._on_end()
