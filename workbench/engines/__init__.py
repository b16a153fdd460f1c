"""Where one point runs."""

from __future__ import annotations

from pathlib import Path

from workbench.record import ProfileRow
from workbench.spec import RunSpec


def run_profile(spec: RunSpec, path: Path) -> tuple[ProfileRow, ...]:
    """`workbench.engines.trace.run_profile`; torch is loaded when it is called."""
    from workbench.engines.trace import run_profile as run

    return run(spec, path)
