"""What is known of a record while its point runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from workbench.engines.environment import with_clocks
from workbench.engines.session import PointSession
from workbench.record import (
    CaptureRow,
    Correctness,
    Memory,
    Metric,
    ProfileRow,
    Record,
    Scalar,
    Startup,
    Status,
    Work,
    now,
)
from workbench.spec import RunSpec


@dataclass(slots=True)
class Draft:
    """What is known of a record so far; a failed point keeps it."""

    status: Status = Status.OK
    reason: str = ""
    detail: str = ""
    resolved: dict[str, Scalar] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    metrics: dict[str, Metric] = field(default_factory=dict)
    startup: dict[str, Any] = field(default_factory=dict)
    memory: dict[str, int | None] = field(default_factory=dict)
    work: Work | None = None
    correctness: Correctness | None = None
    profile: tuple[ProfileRow, ...] = ()
    captures: tuple[CaptureRow, ...] = ()

    def record(self, spec: RunSpec, session: PointSession) -> Record:
        """The record."""
        return Record(
            spec=spec,
            status=self.status,
            reason=self.reason,
            detail=self.detail,
            resolved=self.resolved,
            metrics=self.metrics,
            startup=Startup(**self.startup),
            memory=Memory(**self.memory),
            work=self.work,
            correctness=self.correctness,
            profile=self.profile,
            captures=self.captures,
            environment=with_clocks(session.environment),
            command=spec.command,
            created=now(),
            notes=tuple(dict.fromkeys(self.notes)),
        )
