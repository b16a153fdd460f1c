"""Time one call many times: device events on a GPU, a monotonic clock on a CPU.

Inputs are loaded, caches emptied and the device held busy outside the timed part of every sample. On a GPU there are
two series. The latency is the device's own: launches are queued behind a spin kernel, so that the host's pace stays
out of it. The wall time starts from an idle device, so that it holds what the host needs to launch.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from workbench.measure.cachelevel import Evictor
from workbench.modes import L2

REPLAYS_A_SYNC = 16
SPIN_PROBE_S = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """A series of samples.

    Attributes:
        samples_us: microseconds, in order.
        wall_us: the same from an idle device, launches included; empty on a CPU, where the clock sees both.
        method: how they were timed, one phrase.
        cold_method: how the last-level cache was emptied; empty where it was not.
        notes: sentences to show beside the result.
        evictor_bytes: memory that the timer itself held.
        compiled_in: indices of samples during which something was compiled.
    """

    samples_us: tuple[float, ...]
    wall_us: tuple[float, ...] = ()
    method: str
    cold_method: str = ""
    notes: tuple[str, ...] = ()
    evictor_bytes: int = 0
    compiled_in: tuple[int, ...] = ()


def nothing() -> None:
    """Do nothing."""


@dataclass(slots=True, kw_only=True)
class Timer:
    """Times `call`.

    Attributes:
        device: where it runs.
        call: what is timed.
        prepare: loads the inputs of sample i; not timed.
        l2: last-level cache cold or hot.
        replay: whether `call` is a single graph launch.
        compiles: a value that changes when something is compiled.
        check: called between samples; may raise to stop.
    """

    device: torch.device
    call: Callable[[], object]
    prepare: Callable[[int], None]
    l2: L2 = L2.COLD
    replay: bool = False
    compiles: Callable[[], Any] = field(default=nothing)
    check: Callable[[], None] = field(default=nothing)

    def run(self, samples: int) -> Timed:
        """Take `samples` samples. Where something was compiled meanwhile, they are taken once more."""
        evict = Evictor(self.device) if self.l2 is L2.COLD else None
        series = self._cuda if self.device.type == "cuda" else self._cpu
        timed = series(samples, evict)
        if not timed.compiled_in:
            return timed
        first = len(timed.compiled_in)
        timed = series(samples, evict)
        if timed.compiled_in:
            note = f"Something was compiled during {len(timed.compiled_in)} of {samples} samples, also when repeated."
        else:
            note = f"Something was compiled during {first} of {samples} samples; all were taken again, without."
        return replace(timed, notes=(*timed.notes, note))

    def _ready(self, index: int, evict: Evictor | None) -> None:
        self.check()
        self.prepare(index)
        if evict is not None:
            evict()
        else:
            self.call()  # hot: this very call was just made, untimed

    def _cpu(self, samples: int, evict: Evictor | None) -> Timed:
        times, compiled = [], []
        for index in range(samples):
            self._ready(index, evict)
            before = self.compiles()
            start = time.perf_counter_ns()
            self.call()
            times.append((time.perf_counter_ns() - start) / 1e3)
            if self.compiles() != before:
                compiled.append(index)
        return Timed(
            samples_us=tuple(times),
            method="host monotonic clock around each call",
            cold_method=_cold(evict),
            notes=("On a CPU: timed by the host's clock, Python's own cost included.",),
            evictor_bytes=evict.nbytes if evict else 0,
            compiled_in=tuple(compiled),
        )

    def _cuda(self, samples: int, evict: Evictor | None) -> Timed:
        clock = SpinClock(self.device)
        self._ready(0, evict)
        host_s, waits = self._host_seconds(clock)
        # Twice what the host needs, so that the device finds the whole call queued when the spin ends.
        spin_s = 0.0 if waits else min(SPIN_PROBE_S, 2.0 * host_s + 50e-6)
        compiled: set[int] = set()
        wall = self._events(samples, evict, compiled, before=lambda: torch.cuda.synchronize(self.device), every=1)
        every = REPLAYS_A_SYNC if self.replay else 1
        times = self._events(samples, evict, compiled, before=lambda: clock.spin(spin_s), every=every)
        return Timed(
            samples_us=times,
            wall_us=wall,
            method=_method(self.replay, waits),
            cold_method=_cold(evict),
            notes=_notes(self.replay, waits, host_s),
            evictor_bytes=evict.nbytes if evict else 0,
            compiled_in=tuple(sorted(compiled)),
        )

    def _events(
        self, samples: int, evict: Evictor | None, compiled: set[int], *, before: Callable[[], None], every: int
    ) -> tuple[float, ...]:
        """Microseconds between events around each call; the host waits after `every` samples."""
        times: list[float] = []
        pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        for index in range(samples):
            self._ready(index, evict)
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            before()
            count = self.compiles()
            start.record()
            self.call()
            end.record()
            if self.compiles() != count:
                compiled.add(index)
            pairs.append((start, end))
            if len(pairs) >= every or index == samples - 1:
                end.synchronize()
                times += [a.elapsed_time(b) * 1e3 for a, b in pairs]
                pairs.clear()
        return tuple(times)

    def _host_seconds(self, clock: SpinClock) -> tuple[float, bool]:
        """Seconds until the call returns to the host while the device is held busy, and whether it waited for that.

        A call that comes back only when the spin of 20 ms has ended waits for the device inside.
        """
        self.call()  # a kernel's first launch loads it, and that waits for the device
        torch.cuda.synchronize(self.device)
        clock.spin(SPIN_PROBE_S)
        spun = torch.cuda.Event()
        spun.record()
        start = time.perf_counter()
        self.call()
        taken = time.perf_counter() - start
        waits = bool(spun.query())
        torch.cuda.synchronize(self.device)
        return taken, waits


class SpinClock:
    """A kernel that holds the device busy for a given time and touches no memory."""

    _rates: dict[int, float] = {}  # noqa: RUF012 - one measured rate a device, for the life of the process

    def __init__(self, device: torch.device) -> None:
        index = device.index or 0
        if index not in self._rates:
            self._rates[index] = self._measure()
        self._rate = self._rates[index]

    @staticmethod
    def _measure() -> float:
        """Cycles a second, the fastest of a few, so that a spin is never shorter than asked."""
        torch.cuda._sleep(100_000_000)  # an idle device's clock is low at first
        cycles, rates = 2_000_000, []
        for _ in range(3):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            torch.cuda._sleep(cycles)
            end.record()
            end.synchronize()
            rates.append(cycles / (start.elapsed_time(end) / 1e3))
        return float(max(rates))

    def spin(self, seconds: float) -> None:
        """Queue a spin; none for 0 seconds."""
        if seconds > 0:
            torch.cuda._sleep(int(seconds * self._rate))


def _cold(evict: Evictor | None) -> str:
    return f"reading {evict.nbytes / 2**20:.0f} MiB before each sample" if evict else ""


def _method(replay: bool, waits: bool) -> str:
    if replay:
        return "device events around one graph replay, queued behind a spin kernel"
    if waits:
        return "device events around the launches, host waits included"
    return "device events around launches queued behind a spin kernel"


def _notes(replay: bool, waits: bool, host_s: float) -> tuple[str, ...]:
    if replay:
        return ()
    if waits:
        return ("The call waits for the device inside, so the host's own time is in the latency.",)
    return (
        f"The host needs {host_s * 1e6:.0f} us to launch this call; the launches were queued beforehand, so that is "
        "not in the latency but in the metric wall, which starts from an idle device.",
    )


def middle(values: Sequence[float]) -> float:
    """The median of at least one value."""
    return float(statistics.median(values))
