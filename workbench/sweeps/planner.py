"""What a sweep will run, what it leaves out and why, and how long it may take. No torch here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from workbench.devices import DeviceInfo
from workbench.errors import InvalidInput
from workbench.spec import RunSpec
from workbench.support import Reason, find_reasons
from workbench.sweeps.estimate import built, estimate
from workbench.sweeps.spec import SweepSpec

Find = Callable[[RunSpec, DeviceInfo], Sequence[Reason]]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedPoint:
    """One point: it runs where `reasons` is empty. `estimate_s` is 0 where it does not."""

    spec: RunSpec
    reasons: tuple[Reason, ...]
    estimate_s: float

    @property
    def sentence(self) -> str:
        """Every reason, one after the other; empty where the point runs."""
        return " ".join(dict.fromkeys(reason.sentence for reason in self.reasons))


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Every point of a sweep on one device, in the order in which they run."""

    sweep: SweepSpec
    device: DeviceInfo
    points: tuple[PlannedPoint, ...]

    @property
    def runnable(self) -> tuple[PlannedPoint, ...]:
        """The points that run."""
        return tuple(point for point in self.points if not point.reasons)

    @property
    def skipped(self) -> tuple[PlannedPoint, ...]:
        """The points that cannot run here, with the reasons."""
        return tuple(point for point in self.points if point.reasons)

    @property
    def estimate_s(self) -> float:
        """Rough seconds of the whole."""
        return sum(point.estimate_s for point in self.points)

    def to_table(self) -> tuple[list[str], list[list[str]]]:
        """Header and rows, one row a point: the axes, then `runs` with its estimate or why not."""
        header = [*self.sweep.axes, "runs"]
        rows = []
        for point in self.points:
            flat = point.spec.flat()
            runs = f"no: {point.sentence}" if point.reasons else f"yes, about {duration(point.estimate_s)}"
            rows.append([*(str(flat[name]) for name in self.sweep.axes), runs])
        return header, rows

    def summary(self) -> str:
        """One sentence: how many points, how many run, how long."""
        runs = f"{len(self.runnable)} run, about {duration(self.estimate_s)}"
        rest = f"; {len(self.skipped)} cannot run here" if self.skipped else ""
        return f"{len(self.points)} points on {self.device.name}: {runs}{rest}."

    def why(self) -> dict[str, int]:
        """Each reason and the number of points it stops, the most frequent first; a point may have several."""
        found = Counter(sentence for point in self.skipped for sentence in {r.sentence for r in point.reasons})
        return dict(found.most_common())


def duration(seconds: float) -> str:
    """Seconds as people say them: `0.4 s`, `12 s`, `3 min 20 s`, `2 h 5 min`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s" if whole % 60 else f"{whole // 60} min"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def check_subjects(sweep: SweepSpec) -> None:
    """Refuse a sweep of which nothing can be built; where only some points cannot, the plan says so at each.

    Raises:
        InvalidInput: what is wrong with the first of them.
    """
    names = ("model", "experts", "top_k", "num_layers", "tp_size")
    parts = {name: values for name, values in sweep.axes.items() if name in names}
    first: InvalidInput | None = None
    for spec in SweepSpec(axes=parts, base=sweep.base).points():
        try:
            built(spec)
        except InvalidInput as error:
            first = first or error
        else:
            return
    if first is not None:
        raise first


def plan(sweep: SweepSpec, device: DeviceInfo, *, find: Find = find_reasons) -> Plan:
    """Decide for every point whether it runs on `device`, and estimate its time.

    Raises:
        InvalidInput: no layer of the sweep can be built (unknown model, `top_k` above the experts, ...).
    """
    check_subjects(sweep)
    specs = list(sweep.points())
    reasons = [_reasons(spec, device, find) for spec in specs]
    runnable = [index for index, found in enumerate(reasons) if not found]
    seconds = dict(zip(runnable, estimate([specs[i] for i in runnable], device), strict=True))
    points = tuple(
        PlannedPoint(spec=spec, reasons=reasons[i], estimate_s=seconds.get(i, 0.0)) for i, spec in enumerate(specs)
    )
    return Plan(sweep=sweep, device=device, points=points)


def _reasons(spec: RunSpec, device: DeviceInfo, find: Find) -> tuple[Reason, ...]:
    try:
        return tuple(find(spec, device))
    except InvalidInput as error:  # one layer of several that cannot be built: this point alone is left out
        return (Reason(str(error).partition(":")[0], f"{error}."),)
