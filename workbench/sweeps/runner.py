"""Run a sweep: points one after another on an engine, each record kept at once, whatever happens to the next."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any, Protocol

from workbench.devices import DeviceInfo, find_device
from workbench.errors import DeviceBusy, InvalidInput
from workbench.record import Environment, Record, Status, now
from workbench.spec import RunSpec, size_words
from workbench.support import find_reasons
from workbench.sweeps.anchor import Anchor
from workbench.sweeps.estimate import Clock, modes_of
from workbench.sweeps.keeper import EXPORTS, Keeper, final_keys
from workbench.sweeps.planner import Find, Plan, PlannedPoint, plan
from workbench.sweeps.results import Results
from workbench.sweeps.spec import SweepSpec
from workbench.units import microseconds


class Engine(Protocol):
    """Where points run. `run` gives a record for a point that fails, too."""

    @property
    def environment(self) -> Environment:
        """Where it runs."""

    def run(
        self, spec: RunSpec, *, progress: Callable[[str, str], None] | None = None, stop: Event | None = None
    ) -> Record:
        """Run one point."""

    def request_stop(self) -> None:
        """Ask the point that is running to end."""

    def close(self) -> None:
        """Let go of the device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepProgress:
    """Where a sweep stands.

    Attributes:
        done, total: points with an answer, of all.
        ok, failed, skipped: of the done ones; skipped counts unsupported, skipped and resumed ones.
        state: of the current point (`compiling`, `measuring`, ...), or `done`, `cancelled`, `failed` at the end.
        text: a sentence for people.
        record: the record just made; None between.
        remaining_s: seconds that the rest may take.
    """

    done: int
    total: int
    ok: int
    failed: int
    skipped: int
    state: str
    text: str
    record: Record | None
    remaining_s: float


Report = Callable[[SweepProgress], None]


def open_engine(engine: Any, device: str) -> tuple[Engine, bool]:
    """The engine to use, and whether it was opened here. Raises `InvalidInput` for a name that is none."""
    if engine in (None, "local"):
        from workbench.engines.local import LocalEngine

        return LocalEngine(device), True
    if isinstance(engine, str):
        raise InvalidInput(f"engine: must be local or an engine object, not {engine!r}")
    return engine, False


def run(spec: RunSpec, engine: Any = None, progress: Callable[[str, str], None] | None = None) -> Record:
    """Run one point and give its record, whatever its status.

    Args:
        spec: what to run.
        engine: where; default a `LocalEngine` on the spec's device, closed afterwards.
        progress: called with a state and a sentence.

    Raises:
        DeviceBusy: another process holds the device.
        InvalidInput: a device that is not here, or a model that is none.
    """
    if not isinstance(spec, RunSpec):
        raise InvalidInput(f"spec: must be a RunSpec, not {type(spec).__name__}")
    used, opened = open_engine(engine, spec.device)
    try:
        return used.run(spec, progress=progress)
    finally:
        if opened:
            used.close()


def sweep(
    spec: SweepSpec,
    out: str | Path | None = None,
    resume: bool = False,
    engine: Any = "local",
    progress: Report | None = None,
    stop: Event | None = None,
    exports: bool = True,
    find: Find = find_reasons,
) -> Results:
    """Run every point of `spec` that can run, and keep a record of every point.

    Args:
        spec: the axes and their base.
        out: results folder; an existing one is never overwritten (`-2`, `-3`, ... is made). None keeps all in memory.
        resume: continue `out`: points whose key and environment match and whose answer is final are not run again.
        engine: `local` or an engine object, which is left open.
        progress: called often, from this thread.
        stop: when set, the current point is ended and recorded as cancelled; later ones are left for `resume`.
        exports: whether to write records.parquet, summary.md and report.html beside the records at the end.
        find: decides what cannot run; see `workbench.supports`.

    An interrupt (Ctrl-C) ends the sweep like `stop`; the results have `interrupted=True`.

    Raises:
        InvalidInput: nothing of it can be built, or the folder cannot be used.
        DeviceBusy: another process holds the device and nothing was measured.
    """
    if not isinstance(spec, SweepSpec):
        raise InvalidInput(f"spec: must be a SweepSpec, not {type(spec).__name__}")
    device = find_device(spec.base.device)
    planned = plan(spec, device, find=find)
    keeper = Keeper(spec, Path(out) if out is not None else None, resume=resume)
    used, opened = None, False
    try:
        used, opened = open_engine(engine, spec.base.device)
        job = _Job(planned, device, keeper, used, progress, stop)
        interrupted = job.work()
        if note := job.anchor.note:
            keeper.notes.append(note)
        files = keeper.export(tuple(EXPORTS) if exports else ())
        results = keeper.results(interrupted=interrupted)
        where = f" Written: {keeper.folder} ({len(files) + 2} files)." if keeper.folder else ""
        job.report("cancelled" if interrupted else "done", f"{results.totals()}.{where}")
        return results
    finally:
        keeper.close()
        if opened and used is not None:
            used.close()


@dataclass(slots=True)
class _Job:
    plan: Plan
    device: DeviceInfo
    keeper: Keeper
    engine: Engine
    progress: Report | None
    stop: Event | None
    anchor: Anchor = field(default_factory=Anchor)
    clock: Clock = field(init=False)
    too_large: dict[RunSpec, int] = field(default_factory=dict)
    done: int = 0
    ok: int = 0
    failed: int = 0
    skipped: int = 0

    def __post_init__(self) -> None:
        self.clock = Clock([point.estimate_s for point in self.plan.points])

    def work(self) -> bool:
        """Run what is left; returns whether it was interrupted."""
        environment = self.engine.environment
        finished = final_keys(self.keeper.records, environment.fingerprint)
        for record in self.keeper.records:
            if record.environment.fingerprint == environment.fingerprint and not record.anchor:
                self._learn(record, earlier=True)
        modes: RunSpec | None = None
        for index, point in enumerate(self.plan.points):
            if point.spec.key in finished:
                self.clock.skip(index)
                self._count(None)
                self.report("idle", "kept from the earlier run")
                continue
            if self.stop is not None and self.stop.is_set():
                return True
            left_out = self._left_out(point, environment)
            if left_out is not None:
                self.clock.skip(index)
                self._keep(left_out)
                continue
            if modes is not None and modes != modes_of(point.spec) and self.anchor.due() and not self._repeat():
                return True
            modes = modes_of(point.spec)
            started = time.monotonic()
            made, going = self._run(point.spec, environment)
            if made is None:
                return True
            self.clock.observe(index, time.monotonic() - started)
            self._keep(made)
            if not going:
                return True
        return self.anchor.due(at_end=True) and not self._repeat()

    def report(self, state: str, text: str, record: Record | None = None) -> None:
        """Tell the caller."""
        if self.progress is not None:
            self.progress(
                SweepProgress(
                    done=self.done,
                    total=len(self.plan.points),
                    ok=self.ok,
                    failed=self.failed,
                    skipped=self.skipped,
                    state=state,
                    text=text,
                    record=record,
                    remaining_s=self.clock.remaining_s,
                )
            )

    def _run(self, spec: RunSpec, environment: Environment) -> tuple[Record | None, bool]:
        """One point: its record (None where there is nothing to keep), and whether to go on."""
        try:
            record = self.engine.run(spec, progress=self.report, stop=self.stop)
        except KeyboardInterrupt:
            with suppress(Exception):  # what matters now is that the records so far are returned
                self.engine.request_stop()
            return self._made(spec, environment, Status.CANCELLED, "interrupted from the keyboard"), False
        except DeviceBusy as error:
            if not self.ok and not self.failed:
                raise
            self.keeper.notes.append(f"The sweep ended early: {error}")
            return None, False
        except InvalidInput as error:
            return self._made(spec, environment, Status.UNSUPPORTED, str(error)), True
        except Exception as error:  # an engine should not raise; one that does costs this point and no other
            return self._made(spec, environment, Status.RUNTIME_ERROR, f"{type(error).__name__}: {error}"), True
        return record, record.status is not Status.CANCELLED

    def _repeat(self) -> bool:
        """Time the anchor again; returns whether to go on."""
        assert self.anchor.first is not None
        first = self.anchor.first
        self.report("measuring", "timing the anchor point again, to see drift")
        record, going = self._run(first.spec, first.environment)
        if record is not None and record.status is not Status.CANCELLED:
            record = record.model_copy(update={"anchor": True})
            self.keeper.add(record)
            self.anchor.repeated(record)
        return going

    def _left_out(self, point: PlannedPoint, environment: Environment) -> Record | None:
        if point.reasons:
            return self._made(point.spec, environment, Status.UNSUPPORTED, point.sentence)
        limit = self.too_large.get(modes_of(point.spec))
        if limit is not None and point.spec.size > limit:
            reason = f"{size_words(point.spec.subject, limit)} already ran out of memory with the same modes"
            return self._made(point.spec, environment, Status.SKIPPED, reason)
        return None

    def _keep(self, record: Record) -> None:
        self.keeper.add(record)
        self._learn(record)
        self._count(record)
        what = f"{self._name(record.spec)}: {record.status}"
        latency = record.latency_us
        what += f", {microseconds(latency)}" if latency is not None else f", {record.reason}"
        self.report("done" if record.status.measured else "failed", what, record)

    def _name(self, spec: RunSpec) -> str:
        """The point by what varies in this sweep, its size last."""
        flat = spec.flat()
        plain = ("model", "quant", "moe_backend", "routing")  # their values say what they are
        words = [str(flat[name]) if name in plain else f"{name} {flat[name]}" for name in self.plan.sweep.varying]
        return ", ".join([*words, size_words(spec.subject, spec.size)])

    def _learn(self, record: Record, *, earlier: bool = False) -> None:
        self.anchor.see(record, earlier=earlier)
        if record.status is Status.OUT_OF_MEMORY:
            modes, size = modes_of(record.spec), record.spec.size
            self.too_large[modes] = min(size, self.too_large.get(modes, size))

    def _count(self, record: Record | None) -> None:
        self.done += 1
        if record is None or record.status in (Status.UNSUPPORTED, Status.SKIPPED):
            self.skipped += 1
        elif record.status.measured:
            self.ok += 1
        else:
            self.failed += 1

    def _made(self, spec: RunSpec, environment: Environment, status: Status, reason: str) -> Record:
        return Record(
            spec=spec, status=status, reason=reason, environment=environment, command=spec.command, created=now()
        )
