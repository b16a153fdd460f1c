"""`LocalEngine`: runs points in a worker process that is started anew after it breaks. No torch here."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Self

from workbench.devices import find_device
from workbench.engines.environment import device_environment
from workbench.engines.process import WorkerProcess
from workbench.engines.protocol import Busy, Cancel, Done, Progress, Ready, Run, Unable
from workbench.errors import DeviceBusy, InvalidInput
from workbench.record import Environment, Record, Status, now
from workbench.spec import RunSpec
from workbench.support import find_reasons

Report = Callable[[str, str], None]
START_S = 300.0
GRACE_S = 2.0
POLL_S = 0.05


class _Slot:
    """Holds the worker, apart from the engine, so that the engine's finalizer can close it."""

    def __init__(self) -> None:
        self.worker: WorkerProcess | None = None

    def kill(self) -> None:
        worker, self.worker = self.worker, None
        if worker is not None:
            worker.kill()

    def close(self) -> None:
        worker, self.worker = self.worker, None
        if worker is not None:
            worker.close()


class LocalEngine:
    """Runs points one at a time on one device; the worker starts with the first and holds the device until `close`.

    A crash, a time-out or a device error costs its point: the next one gets a new worker.
    """

    def __init__(self, device: str = "auto") -> None:
        """Raises `InvalidInput` for a device that is not here."""
        self.device = find_device(device)
        self._environment = device_environment(self.device)
        self._slot = _Slot()
        self._running = threading.Lock()
        self._stop = threading.Event()
        self._generation = 0
        self._finalizer = weakref.finalize(self, self._slot.kill)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def environment(self) -> Environment:
        """Where points run; measured roofs and clocks are in it once the worker has started."""
        return self._environment

    @property
    def busy(self) -> bool:
        """Whether a point is running."""
        return self._running.locked()

    @property
    def pid(self) -> int | None:
        """The worker's process id; None where none is running."""
        worker = self._slot.worker
        return None if worker is None else worker.pid

    def run(self, spec: RunSpec, *, progress: Report | None = None, stop: threading.Event | None = None) -> Record:
        """Run one point and give its record, whatever its status.

        Args:
            spec: what to run; its device must be this engine's, or `auto`.
            progress: called from this thread with a state and a sentence.
            stop: when set, the point is asked to end, and made to 2 s later.

        Raises:
            DeviceBusy: another process holds the device, or this engine is running a point already.
            InvalidInput: the spec describes no layer, or names another device.
        """
        tell = progress or _silent
        reasons = self._reasons(spec)
        if not self._running.acquire(blocking=False):
            raise DeviceBusy("A run is going on in this engine already; wait for its end or stop it.")
        try:
            self._stop.clear()
            if reasons:
                return self._made(spec, Status.UNSUPPORTED, reasons, tell=tell)
            return self._run(spec, tell, stop)
        except BaseException:
            # An interrupt, an error of the caller's own progress: the worker's state is unknown.
            self._slot.kill()
            raise
        finally:
            self._running.release()

    def request_stop(self) -> None:
        """Ask the point that is running to end. Returns at once; may be called from any thread."""
        self._stop.set()

    def close(self) -> None:
        """End the worker; the device is free when this returns. A later `run` starts a new one."""
        if self._running.acquire(blocking=False):
            try:
                self._slot.close()
            finally:
                self._running.release()
        else:
            self._stop.set()
            self._slot.kill()

    def _reasons(self, spec: RunSpec) -> str:
        """Why the spec cannot run here; empty where it can."""
        if spec.device != "auto" and find_device(spec.device).torch_device != self.device.torch_device:
            raise InvalidInput(
                f"device: must be auto or {self.device.torch_device}, which this engine holds, not {spec.device}"
            )
        return " ".join(dict.fromkeys(reason.sentence for reason in find_reasons(spec, self.device)))

    def _run(self, spec: RunSpec, tell: Report, stop: threading.Event | None) -> Record:
        self._generation += 1
        deadline = time.monotonic() + START_S
        try:
            ended = self._start(spec, tell, stop, deadline)
            if ended is not None:
                return ended
            worker = self._slot.worker
            assert worker is not None
            worker.send(Run(generation=self._generation, spec=spec))
            return self._follow(worker, spec, tell, stop)
        except _Gone as gone:
            worker, self._slot.worker = self._slot.worker, None
            if worker is None:  # closed from another thread meanwhile
                return self._made(spec, Status.CANCELLED, "the engine was closed", tell=tell)
            reason = f"the worker crashed ({worker.ending()}) while {gone.state}"
            detail = worker.log_tail()
            worker.kill()
            return self._made(spec, Status.CRASHED, reason, detail, tell=tell)

    def _start(self, spec: RunSpec, tell: Report, stop: threading.Event | None, deadline: float) -> Record | None:
        """Have a worker that is ready; a record where that came to nothing."""
        if self._slot.worker is not None:
            if self._slot.worker.wait(0) is None:
                return None
            self._slot.kill()  # it died between two points: that is no fault of this one
        if self._asked(stop):
            return self._made(spec, Status.CANCELLED, "stopped by the user before the worker started", tell=tell)
        tell("starting", f"starting a worker on {self.device.name}")
        worker = self._slot.worker = WorkerProcess(self.device)
        while True:
            if self._asked(stop):
                self._slot.kill()
                return self._made(spec, Status.CANCELLED, "stopped by the user while the worker started", tell=tell)
            if time.monotonic() > deadline:
                tail = worker.log_tail()
                self._slot.kill()
                return self._made(
                    spec, Status.CRASHED, f"the worker did not start within {START_S:.0f} s", tail, tell=tell
                )
            answer = self._next(worker, "starting")
            if isinstance(answer, Ready):
                self._environment = answer.environment
                return None
            if isinstance(answer, Busy):
                self._slot.kill()
                raise DeviceBusy(answer.sentence)
            if isinstance(answer, Unable):
                self._slot.kill()
                return self._made(spec, Status.RUNTIME_ERROR, answer.sentence, tell=tell)

    def _follow(self, worker: WorkerProcess, spec: RunSpec, tell: Report, stop: threading.Event | None) -> Record:
        """Wait for the record of the running point, and end it where it must."""
        deadline = time.monotonic() + spec.timeout_s
        asked_at: float | None = None
        state = "starting"
        while True:
            moment = time.monotonic()
            if asked_at is None and self._asked(stop):
                asked_at = moment
                worker.send(Cancel(generation=self._generation))
                tell(state, "stopping")
            if asked_at is not None and moment > asked_at + GRACE_S:
                self._slot.kill()
                return self._made(spec, Status.CANCELLED, f"stopped by the user while {state}", tell=tell)
            if moment > deadline:
                tail = worker.log_tail()
                self._slot.kill()
                reason = f"the point took longer than its {spec.timeout_s:g} s, and was ended while {state}"
                return self._made(spec, Status.TIMED_OUT, reason, tail, tell=tell)
            answer = self._next(worker, state)
            if isinstance(answer, Progress) and answer.generation == self._generation:
                state = answer.state if answer.state not in ("done", "failed", "cancelled") else state
                tell(answer.state, answer.text)
            elif isinstance(answer, Done) and answer.generation == self._generation:
                if answer.leaving:
                    self._slot.kill()
                    return _with_note(answer.record, f"The worker was started anew: {answer.leaving}.")
                return answer.record

    def _next(self, worker: WorkerProcess, state: str) -> object:
        try:
            answer = worker.answers.get(timeout=POLL_S)
        except queue.Empty:
            if worker.status() is not None:
                worker.kill_group()  # a fork that it left may hold its pipe open, and keep us waiting
            return ()
        if answer is None:
            raise _Gone(state)
        return answer

    def _asked(self, stop: threading.Event | None) -> bool:
        return self._stop.is_set() or (stop is not None and stop.is_set())

    def _made(self, spec: RunSpec, status: Status, reason: str, detail: str = "", *, tell: Report) -> Record:
        tell(status.value if status in (Status.CANCELLED, Status.TIMED_OUT) else "failed", reason)
        return Record(
            spec=spec,
            status=status,
            reason=reason,
            detail=detail,
            environment=self._environment,
            command=spec.command,
            created=now(),
        )


class _Gone(Exception):
    """The worker's pipe ended; `state` is what it was doing."""

    def __init__(self, state: str) -> None:
        super().__init__(state)
        self.state = state


def _silent(state: str, text: str) -> None:
    """Tell nobody."""


def _with_note(record: Record, note: str) -> Record:
    return record.model_copy(update={"notes": (*record.notes, note)})
