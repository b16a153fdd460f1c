"""Which values of each axis can be honoured on a device whatever else is chosen, and why the others cannot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from itertools import product
from typing import Any

from workbench.devices import DeviceInfo
from workbench.modes import Subject
from workbench.spec import DEFAULTS, RunSpec
from workbench.support import Reason, find_reasons

JOINT = {
    Subject.MOE_LAYER: ("moe_backend", "quant", "compile", "graph"),
    Subject.STEP: ("moe_backend", "quant", "compile", "graph"),
}
"""Axes that depend on each other: a value is out only if it runs with no choice of the others."""
DEPENDENT: dict[str, tuple[str, ...]] = {
    "group_size": ("quant",),
    "zero_points": ("quant",),
    "activation_scale": ("quant",),
    "split_k": ("moe_backend",),
    "reduction": ("moe_backend", "split_k"),
    "mla_prefill": ("model",),
    "mla_decode": ("model",),
    "compile_scope": ("model", "compile"),
    "max_compile_batch": ("compile",),
    "max_capture_batch": ("graph",),
}
"""Axes that mean something beside some choices of others: a value is out where it means nothing beside those made."""


def unavailable(
    base: RunSpec,
    device: DeviceInfo,
    values: Mapping[str, Sequence[Any]],
    chosen: Mapping[str, Sequence[Any]] | None = None,
) -> dict[str, dict[Any, str]]:
    """Axis -> value -> the sentence why it cannot be honoured; values that can are left out.

    Args:
        base: everything else of the run (model, sizes, device).
        values: axis -> the values that are offered.
        chosen: axis -> the values that are on, of axes that others depend on; default those of `base`.

    Raises:
        InvalidInput: the base itself cannot be built.
    """
    # What depends on the others must not rule them out: it goes back to its default while they are tried.
    flat = base.flat()
    plain = base.replace(**{axis: DEFAULTS[base.subject][axis] for axis in DEPENDENT if axis in flat})
    offered = tuple((axis, tuple(listed)) for axis, listed in values.items() if axis not in DEPENDENT)
    found = {axis: dict(reasons) for axis, reasons in _unavailable(plain, device, offered).items()}
    for axis, governing in DEPENDENT.items():
        on = [tuple((chosen or {}).get(other, (flat[other],))) for other in governing]
        for value in values.get(axis, ()):
            hits = []
            for choice in product(*on):
                made = plain.replace(**{**dict(zip(governing, choice, strict=True)), axis: value})
                hits.append([reason for reason in find_reasons(made, device) if reason.field == axis])
            if hits and all(hits):
                found.setdefault(axis, {})[value] = _sentence(axis, hits)
    return found


@lru_cache(maxsize=64)
def _unavailable(
    base: RunSpec, device: DeviceInfo, offered: tuple[tuple[str, tuple[Any, ...]], ...]
) -> dict[str, dict[Any, str]]:
    values = dict(offered)
    joint = [axis for axis in JOINT[base.subject] if axis in values]
    choices = list(product(*(values[axis] for axis in joint)))

    @cache
    def reasons_of(choice: tuple[Any, ...]) -> list[Reason]:
        return find_reasons(base.replace(**dict(zip(joint, choice, strict=True))), device)

    result: dict[str, dict[Any, str]] = {}
    for place, axis in enumerate(joint):
        for value in values[axis]:
            hits = []
            for choice in choices:
                if choice[place] == value:
                    hits.append(reasons_of(choice))
                    if not hits[-1]:  # it runs, so the other choices need not be tried
                        break
            if hits and all(hits):
                result.setdefault(axis, {})[value] = _sentence(axis, hits)
    running = next((choice for choice in choices if not reasons_of(choice)), None)
    runs = None if running is None else dict(zip(joint, running, strict=True))
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
