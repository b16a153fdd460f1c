"""Numbers with units, as people read them. Imports nothing from above."""

from __future__ import annotations

import math


def microseconds(value: float) -> str:
    """`870 ns`, `12.3 us`, `4.56 ms`, `1.2 s`; empty for NaN."""
    if math.isnan(value):
        return ""
    for limit, factor, unit in ((0.9995, 1e3, "ns"), (999.5, 1.0, "us"), (999.5e3, 1e-3, "ms")):
        if value < limit:
            return f"{_three(value * factor)} {unit}"
    return f"{_three(value * 1e-6)} s"


def _three(value: float) -> str:
    if value == 0:
        return "0"
    return f"{value:.0f}" if value >= 999.5 else f"{value:#.3g}".rstrip(".")
