"""`FakeEngine`: the engine's interface without a device, for panels and sweeps where speed does not matter."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Self

from workbench.devices import DeviceInfo, find_device
from workbench.engines.environment import device_environment
from workbench.engines.fake_step import made_up_step
from workbench.errors import DeviceBusy
from workbench.modes import Subject
from workbench.record import Correctness, Difference, Environment, Memory, Metric, Record, Startup, Status, now
from workbench.spec import RunSpec
from workbench.support import find_reasons

NAME = "Made-up device"
NOTE = "Made up by the fake engine: nothing was run."
PHASES = ("starting", "compiling", "warming", "checking", "measuring")
_STATES = {Status.CANCELLED: "cancelled", Status.TIMED_OUT: "timed_out"}

Report = Callable[[str, str], None]


class FakeEngine:
    """Answers every spec from `latency` and `fail`; its records say that they are made up."""

    def __init__(
        self,
        latency: Callable[[RunSpec], float] | None = None,
        delay_s: float = 0.0,
        fail: Callable[[RunSpec], Status | None] | None = None,
        device: DeviceInfo | None = None,
    ) -> None:
        """Set what it answers.

        Args:
            latency: median microseconds of a spec (of a step: of one decode step); default 10 and a tenth for every
                token or sequence.
            delay_s: seconds that a point takes.
            fail: the status of a spec that is to fail; None for one that is to be measured.
            device: what decides which modes run; default this machine's CPU. Nothing is run on it.
        """
        self.device: DeviceInfo = device or find_device("cpu")
        self._latency = latency or (lambda spec: 10.0 + spec.size / 10)
        self._delay_s = delay_s
        self._fail = fail or (lambda spec: None)
        self._environment = device_environment(self.device).model_copy(update={"device_name": NAME})
        self._running = threading.Lock()
        self._stop = threading.Event()

    @property
    def environment(self) -> Environment:
        """This machine's, with a device that cannot be taken for a real one."""
        return self._environment

    @property
    def pid(self) -> None:
        """There is no worker."""
        return

    @property
    def busy(self) -> bool:
        """Whether a point is running."""
        return self._running.locked()

    def run(self, spec: RunSpec, *, progress: Report | None = None, stop: threading.Event | None = None) -> Record:
        """Give a made-up record of `spec` after the delay; see `LocalEngine.run`."""
        reasons = find_reasons(spec, self.device)
        if not self._running.acquire(blocking=False):
            raise DeviceBusy("A run is going on in this engine already; wait for its end or stop it.")
        self._stop = asked = threading.Event()
        report = progress or (lambda state, text: None)
        try:
            if reasons:
                sentence = " ".join(dict.fromkeys(reason.sentence for reason in reasons))
                return self._failed(spec, Status.UNSUPPORTED, sentence, report)
            for phase in PHASES:
                until = time.monotonic() + self._delay_s / len(PHASES)
                report(phase, f"{phase} {spec.size_label}")
                while True:
                    if asked.is_set() or (stop is not None and stop.is_set()):
                        return self._failed(spec, Status.CANCELLED, "stopped by the user", report)
                    left = until - time.monotonic()
                    if left <= 0:
                        break
                    asked.wait(min(left, 0.02))
            status = self._fail(spec)
            if status is not None and not status.measured:
                return self._failed(spec, status, f"the fake engine was told to end with {status}", report)
            record = self._measured(spec)
            report("done", NOTE)
            return record
        finally:
            self._running.release()

    def request_stop(self) -> None:
        """Ask the point that is running to end."""
        self._stop.set()

    def close(self) -> None:
        """End the point that is running; there is nothing else to let go of."""
        self._stop.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _measured(self, spec: RunSpec) -> Record:
        if spec.subject is Subject.STEP:
            return self._step(spec)
        median, last = self._latency(spec), max(1, spec.samples - 1)
        # A spread of 2 %, symmetric, so that the median is the latency asked for.
        samples = [median * (1 + 0.02 * (index / last - 0.5)) for index in range(spec.samples)]
        none = Difference(relative_l2=0.0, max_over_rms=0.0, dissimilarity=0.0)
        return Record(
            spec=spec,
            status=Status.OK,
            resolved={"device": self.device.torch_device, "moe_backend": spec.modes.moe_backend},
            metrics={"latency": Metric.from_samples(samples if spec.samples > 1 else [median], "us")},
            startup=Startup(load_s=0.0),
            memory=Memory(),
            correctness=Correctness(
                total=none, kernel=none, kernel_budget=1.0, ratio=0.0, rows_checked=0, rows=0, passed=True
            ),
            environment=self._environment,
            command=spec.command,
            created=now(),
            source="fake",
            notes=(NOTE,),
        )

    def _step(self, spec: RunSpec) -> Record:
        made = made_up_step(spec, self._latency(spec))
        return Record(
            spec=spec,
            status=Status.OK,
            resolved={"device": self.device.torch_device, **made.resolved},
            metrics=made.metrics,
            startup=made.startup,
            memory=made.memory,
            correctness=made.correctness,
            captures=made.captures,
            profile=made.profile,
            environment=self._environment,
            command=spec.command,
            created=now(),
            source="fake",
            notes=(NOTE,),
        )

    def _failed(self, spec: RunSpec, status: Status, reason: str, report: Report) -> Record:
        record = Record(
            spec=spec,
            status=status,
            reason=reason,
            environment=self._environment,
            command=spec.command,
            created=now(),
            source="fake",
            notes=(NOTE,),
        )
        report(_STATES.get(status, "failed"), reason)
        return record
