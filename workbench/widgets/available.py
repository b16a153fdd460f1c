"""Which values of each axis can be honoured on a device whatever else is chosen, and why the others cannot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import product
from typing import Any

from workbench.devices import DeviceInfo
from workbench.spec import RunSpec
from workbench.support import Reason, find_reasons

JOINT = ("moe_backend", "quant", "compile", "dynamic", "graph")
"""Axes that depend on each other: a value is out only if it runs with no choice of the others."""


def unavailable(base: RunSpec, device: DeviceInfo, values: Mapping[str, Sequence[Any]]) -> dict[str, dict[Any, str]]:
    """Axis -> value -> the sentence why it cannot be honoured; values that can are left out.

    Args:
        base: everything else of the run (model, sizes, device).
        values: axis -> the values that are offered.

    Raises:
        InvalidInput: the base itself cannot be built.
    """
    offered = tuple((axis, tuple(listed)) for axis, listed in values.items())
    found = _unavailable(base, device, offered)
    return {axis: dict(reasons) for axis, reasons in found.items()}


@lru_cache(maxsize=64)
def _unavailable(
    base: RunSpec, device: DeviceInfo, offered: tuple[tuple[str, tuple[Any, ...]], ...]
) -> dict[str, dict[Any, str]]:
    values = dict(offered)
    joint = [axis for axis in JOINT if axis in values]
    tried: list[tuple[dict[str, Any], list[Reason]]] = []
    for choice in product(*(values[axis] for axis in joint)):
        chosen = dict(zip(joint, choice, strict=True))
        tried.append((chosen, find_reasons(base.replace(**chosen), device)))
    result: dict[str, dict[Any, str]] = {}
    for axis in joint:
        for value in values[axis]:
            hits = [reasons for chosen, reasons in tried if chosen[axis] == value]
            if hits and all(hits):
                result.setdefault(axis, {})[value] = _sentence(axis, hits)
    runs = next((chosen for chosen, reasons in tried if not reasons), None)
    for axis in values:
        if axis in joint or runs is None:
            continue
        for value in values[axis]:
            reasons = find_reasons(base.replace(**{**runs, axis: value}), device)
            if reasons:
                result.setdefault(axis, {})[value] = _sentence(axis, [reasons])
    return result


def _sentence(axis: str, hits: Sequence[Sequence[Reason]]) -> str:
    """The plainest explanation: the fewest reasons, those that name the axis itself first."""
    best = min(hits, key=lambda reasons: (not any(r.field == axis for r in reasons), len(reasons)))
    own = [reason for reason in best if reason.field == axis] or list(best)
    return " ".join(dict.fromkeys(reason.sentence for reason in own))
