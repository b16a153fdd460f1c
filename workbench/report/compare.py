"""How much faster a point is than a baseline, and when that is no more than noise."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from workbench.errors import InvalidInput, choices
from workbench.plots.select import points
from workbench.plots.speedup import baselines
from workbench.plots.style import MODE_AXES, PROBLEM_AXES, missing
from workbench.spec import check_value, parse_value

SAME = (*PROBLEM_AXES, "size", "fingerprint")


@dataclass(frozen=True, slots=True)
class Speedup:
    """`ratio` is baseline latency over this one; a `tie` where the bands p10 to p90 overlap; `own`: the baseline."""

    ratio: float
    tie: bool
    own: bool = False

    def __str__(self) -> str:
        return "baseline" if self.own else "tie" if self.tie else f"{self.ratio:.2f}x"


def parse_baseline(texts: list[str]) -> dict[str, Any]:
    """Read `axis=value` words. Raises `InvalidInput` for an axis that is no mode or a value that it does not allow."""
    wanted: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or name not in MODE_AXES:
            raise InvalidInput(f"baseline: must be AXIS=VALUE with an axis of {choices(MODE_AXES)}, not {text!r}")
        wanted[name] = check_value(name, parse_value(name, value.strip()))
    return wanted


def default_baseline(frame: pd.DataFrame) -> dict[str, Any]:
    """The plainest set of modes measured, by the axes on which the rows differ; empty where they differ on none."""
    measured = points(frame)
    measured = measured[measured["latency_us"].notna()]
    if not len(measured):
        return {}
    plain = next(iter(baselines(measured).values()))
    held = [axis for axis in MODE_AXES if measured[axis].nunique(dropna=False) > 1]
    return {axis: None if missing(plain[axis]) else plain[axis] for axis in held}


def describe(baseline: Mapping[str, Any]) -> str:
    """A baseline as `quant=bf16, compile=none`."""
    return ", ".join(f"{name}={_text(value)}" for name, value in baseline.items())


def _text(value: object) -> str:
    return "none" if missing(value) else str(value)


def speedups(frame: pd.DataFrame, baseline: Mapping[str, Any]) -> list[Speedup | None]:
    """One entry a row: against the row that is equal in all but the axes of `baseline`; None where there is none.

    Raises:
        InvalidInput: no measured row has the baseline's values.
    """
    names = [*SAME, *MODE_AXES]
    keys = list(zip(*([_text(value) for value in frame[name]] for name in names), strict=True))
    latency, low, high = (frame[name].to_list() for name in ("latency_us", "p10_us", "p90_us"))
    anchor = frame["anchor"].to_list()
    first: dict[tuple[str, ...], int] = {}
    for index, key in enumerate(keys):
        if not math.isnan(latency[index]) and not anchor[index]:
            first.setdefault(key, index)
    where = {names.index(name): _text(value) for name, value in baseline.items()}
    if baseline and not any(all(key[at] == value for at, value in where.items()) for key in first):
        raise InvalidInput(f"baseline: nothing with {describe(baseline)} was measured")
    found: list[Speedup | None] = []
    for index, key in enumerate(keys):
        base = first.get(tuple(where.get(at, value) for at, value in enumerate(key)))
        if base is None or math.isnan(latency[index]) or not baseline:
            found.append(None)
            continue
        tie = low[index] <= high[base] and low[base] <= high[index]
        found.append(Speedup(latency[base] / latency[index], tie, own=base == index))
    return found
