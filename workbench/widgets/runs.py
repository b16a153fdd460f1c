"""The runs of a panel: one sweep at a time in the background, followed at most ten times a second."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from workbench.errors import InvalidInput
from workbench.sweeps.results import Results
from workbench.sweeps.spec import SweepSpec
from workbench.widgets.job import EngineHolder, Snapshot, SweepJob

INTERVAL_S = 0.1
"""Shortest time between two updates of the page: more than ten a second only fill its queue."""


class Runs:
    """Starts sweeps and tells what becomes of them; what an older run still has to say is dropped.

    Attributes:
        lock: held while `moved` and `ended` are called; whoever draws at other times holds it, too.
        job: the sweep that is under way; None while there is none.
        sweep: what was run last; None before.
        last: the results of the last run; None before, and until the one under way has ended.
    """

    def __init__(
        self,
        engine: Any,
        *,
        began: Callable[[], None],
        moved: Callable[[SweepJob, Snapshot], None],
        ended: Callable[[SweepJob], None],
    ) -> None:
        """Prepare.

        Args:
            engine: where points run, left open; with None a worker process of its own, ended by `close`.
            began: called when a run is prepared, before its first point; in the thread of `start`.
            moved, ended: called with news, and at the end; in a thread of the run's own.
        """
        self.lock = threading.RLock()
        self.job: SweepJob | None = None
        self.sweep: SweepSpec | None = None
        self.last: Results | None = None
        self._engine = EngineHolder(engine)
        self._began, self._moved, self._ended = began, moved, ended
        self._error: BaseException | None = None
        self._pump: threading.Thread | None = None
        self._generation = 0
        self._closed = False

    @property
    def results(self) -> Results | None:
        """The results of the last run; of one under way, those that there are so far."""
        job = self.job
        return self.last if job is None or self.last is not None else Results(job.snapshot().records)

    def start(self, sweep: SweepSpec, out: Path) -> None:
        """Run a sweep that writes into the folder `out`; returns at once. There must be no job."""
        self._generation += 1
        self.last, self.sweep = None, sweep
        job = self.job = SweepJob(sweep, lambda: self._engine.get(sweep.base.device), out, self._job_ended)
        self._began()
        job.start()
        follow = (job, self._generation)
        self._pump = threading.Thread(target=self._follow, args=follow, name="panel updates", daemon=True)
        self._pump.start()

    def stop(self) -> bool:
        """Ask the job to end; returns at once: whether there was one that had not been asked yet."""
        if self.job is None or self.job.stopping:
            return False
        self.job.stop()
        return True

    def wait(self, timeout_s: float | None = None) -> Results:
        """Wait for the job, if any, and give the results; raises again what made it fail.

        Raises:
            InvalidInput: nothing was run yet.
            TimeoutError: it was still running after `timeout_s`.
        """
        pump = self._pump
        if pump is not None:
            pump.join(timeout_s)
            if pump.is_alive():
                raise TimeoutError(f"the sweep was still running after {timeout_s} s")
        if self._error is not None:
            raise self._error
        if self.last is None:
            raise InvalidInput("result: nothing was run yet")
        return self.last

    def close(self) -> None:
        """Stop the job and end the worker process; nothing is told any more."""
        self._closed = True
        job = self.job
        if job is not None:
            job.stop()  # its thread ends the worker when it is done
        else:
            self._engine.close()

    def _job_ended(self) -> None:
        if self._closed:
            self._engine.close()

    def _follow(self, job: SweepJob, generation: int) -> None:
        seen, cost = -1, 0.0
        while not job.finished.wait(max(INTERVAL_S, 4 * cost)):
            began = time.monotonic()
            version = job.snapshot().version
            if version != seen:
                seen = version
                self._tell(job, generation)
            cost = time.monotonic() - began
        self._tell(job, generation)
        self._finish(job, generation)

    def _tell(self, job: SweepJob, generation: int) -> None:
        with self.lock:
            if generation == self._generation and not self._closed:
                self._moved(job, job.snapshot())

    def _finish(self, job: SweepJob, generation: int) -> None:
        with self.lock:
            if generation != self._generation or self._closed:
                return
            self._error, self.last = job.error, job.results or Results(job.snapshot().records)
            self.job = None  # after `last`: in between, `results` holds them, too
            self._ended(job)
