"""The anchor: one point timed again and again during a sweep, so that drift of the machine is seen."""

from __future__ import annotations

from collections.abc import Iterable

from workbench.record import Metric, Record, Status
from workbench.units import microseconds

EVERY = 24  # measured points between two repeats; repeats happen only where the set of modes changes


class Anchor:
    """Remembers the first point that was measured and how its repeats compare with it."""

    def __init__(self) -> None:
        self.first: Record | None = None
        self.last: Metric | None = None
        self._since = 0

    def see(self, record: Record, *, earlier: bool = False) -> None:
        """Count a point; the first measured one becomes the anchor. One of an `earlier` run may be it, uncounted."""
        if record.status is not Status.OK or record.latency is None:
            return
        if self.first is None:
            self.first = record
        elif not earlier:
            self._since += 1

    def due(self, *, at_end: bool = False) -> bool:
        """Whether the anchor should be timed again before the next set of modes, or at the end."""
        return self.first is not None and self._since >= (1 if at_end else EVERY)

    def repeated(self, record: Record) -> None:
        """Take in a repeat."""
        self._since = 0
        if record.status is Status.OK:
            self.last = record.latency

    @property
    def note(self) -> str:
        """One sentence on drift; empty where nothing was repeated."""
        start, end = self.first.latency if self.first is not None else None, self.last
        if start is None or end is None:
            return ""
        change = end.median / start.median - 1
        tie = end.p10 <= start.p90 and start.p10 <= end.p90
        verdict = (
            "within its noise, as the bands p10 to p90 overlap" if tie else "outside its noise: the machine drifted"
        )
        return (
            f"Drift: the anchor point took {microseconds(start.median)} at the start and "
            f"{microseconds(end.median)} at the last repeat ({change:+.1%}), {verdict}."
        )


def drift_note(records: Iterable[Record]) -> str:
    """The sentence on drift of stored records; empty where the anchor was not repeated."""
    anchor = Anchor()
    for record in records:
        if record.anchor:
            anchor.repeated(record)
        else:
            anchor.see(record)
    return anchor.note
