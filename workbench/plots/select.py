"""From a frame of results to the lines of a figure: which axes vary, one series per set of modes, filters."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pandas as pd

from workbench.errors import InvalidInput, choices
from workbench.modes import BACKENDS, ActivationScale, Compile, Graph, Quant, Reduction, RoutingKind
from workbench.plots.style import AXES, MODE_AXES, duration, label, missing, modes_label, number, short, told

Timing = Literal["device", "wall"]
TIMINGS: tuple[Timing, ...] = ("device", "wall")
# Shown column -> where the device's own time and the time from an idle device stand while the other is shown.
_TIMES = {
    "latency_us": ("device_us", "wall_us"),
    "p10_us": ("device_p10_us", "wall_p10_us"),
    "p90_us": ("device_p90_us", "wall_p90_us"),
}
_ORDER: dict[str, list[str]] = {
    "compile": [str(v) for v in Compile],
    "graph": [str(v) for v in Graph],
    "quant": [str(v) for v in Quant],
    "routing": [str(v) for v in RoutingKind],
    "activation_scale": [str(v) for v in ActivationScale],
    "reduction": [str(v) for v in Reduction],
    "moe_backend": list(BACKENDS),
}


@dataclass(frozen=True)
class Series:
    """One line: `values` on the varying axes, a `label` (plain text), and `rows`, one per token count, ascending."""

    key: str
    label: str
    values: dict[str, Any]
    rows: list[dict[str, Any]]


def points(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows that figures show: all but repeats of the anchor point.

    Raises:
        InvalidInput: a frame of another kind.
    """
    if len(frame) and ("num_tokens" not in frame or "latency_us" not in frame):
        raise InvalidInput("frame: must have the columns of Results.frame(), num_tokens and latency_us among them")
    if "anchor" not in frame or not len(frame):
        return frame
    anchors = frame["anchor"].to_numpy(dtype=bool)
    return frame[~anchors] if anchors.any() else frame


def timed(frame: pd.DataFrame, timing: Timing) -> pd.DataFrame:
    """The frame with the chosen time in `latency_us`, `p10_us` and `p90_us`, which is what figures and matrices read.

    Args:
        frame: `Results.frame()`, or what this gave.
        timing: `device`, the device's own time; `wall`, the time from an idle device, host launches included (NaN
            where it was not recorded). The device's own time then stands in `device_us`.

    Raises:
        InvalidInput: another word.
    """
    if timing not in TIMINGS:
        raise InvalidInput(f"timing: must be {choices(TIMINGS)}, not {timing!r}")
    if not len(frame) or timing == timing_of(frame):
        return frame
    if timing == "device":
        kept = frame.drop(columns=[device for device, _ in _TIMES.values()])
        return kept.assign(**{shown: frame[device] for shown, (device, _) in _TIMES.items()})
    old = {device: frame[shown] for shown, (device, _) in _TIMES.items()}
    return frame.assign(**old, **{shown: frame.get(wall, math.nan) for shown, (_, wall) in _TIMES.items()})


def timing_of(frame: pd.DataFrame) -> Timing:
    """Which time `latency_us` of this frame holds."""
    return "wall" if "device_us" in frame else "device"


def has_wall(frame: pd.DataFrame) -> bool:
    """Whether any row has a time from an idle device."""
    return "wall_us" in frame and bool(frame["wall_us"].notna().any())


def time_title(frame: pd.DataFrame, line_break: str = " ") -> str:
    """The title, with its unit, of the axis that shows `latency_us` of this frame."""
    if timing_of(frame) == "device":
        return "median latency (µs)"
    return f"median time from an idle device,{line_break}host launches included (µs)"


def other_time(row: Mapping[str, Any], base: Mapping[str, Any] | None = None) -> str:
    """The time of a row that is not the shown one, in words (against that of `base`); empty where there is none."""
    name, words = ("device_us", "the device's own time") if "device_us" in row else ("wall_us", "with host launches")
    values = [number(one.get(name)) for one in (row, base) if one is not None]
    known = [duration(value) for value in values if value is not None]
    return f"{words}: {' against '.join(known)}" if len(known) == len(values) else ""


def varying(frame: pd.DataFrame, among: Iterable[str] = AXES) -> list[str]:
    """The axes on which the rows differ, in reading order."""
    if not len(frame):
        return []
    return [axis for axis in among if axis in frame and frame[axis].nunique(dropna=False) > 1]


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows as dicts. Column by column: many times faster than `DataFrame.to_dict` on strings held by Arrow."""
    names = list(frame.columns)
    return [dict(zip(names, row, strict=True)) for row in zip(*(frame[n].tolist() for n in names), strict=True)]


def rank(axis: str, value: object) -> tuple[Any, ...]:
    """Sorts values of an axis as its vocabulary lists them, unknown ones after that by name."""
    if missing(value):
        return (0, 0, "")
    order = _ORDER.get(axis, [])
    if value in order:
        return (1, order.index(str(value)), "")
    if isinstance(value, int | float) or hasattr(value, "dtype"):
        return (2, float(value), "")  # type: ignore[arg-type]
    return (3, 0, str(value))


def split(
    frame: pd.DataFrame, *, axes: Sequence[str] | None = None, most: int | None = None
) -> tuple[list[Series], int]:
    """Split into one series per set of values on `axes` (default: those that vary) and say how many there are.

    Of several rows at the same token count the last one counts. With `most`, only the first so many series are built.
    """
    frame = points(frame)
    if not len(frame):
        return [], 0
    names = [axis for axis in (varying(frame) if axes is None else axes) if axis in frame]
    identity = sorted(set(names) | set(varying(frame)), key=AXES.index)
    if not identity:
        values = {axis: frame[axis].iloc[0] for axis in AXES if axis in frame}
        return [Series(_key(values), modes_label(values) or "all", values, _rows(frame))], 1
    groups = frame.groupby(identity, sort=False, dropna=False, observed=True).ngroup()
    first = ~groups.duplicated()
    heads = frame.loc[first, identity]
    listed = sorted(
        zip(groups[first].tolist(), records(heads), strict=True),
        key=lambda pair: [rank(axis, pair[1][axis]) for axis in identity],
    )
    shown = listed[:most] if most is not None else listed
    kept = frame.assign(_group=groups)
    kept = kept[groups.isin([group for group, _ in shown])] if len(shown) < len(listed) else kept
    rows: dict[int, list[dict[str, Any]]] = {}
    for row in _rows(kept, "_group"):
        rows.setdefault(row.pop("_group"), []).append(row)
    named = label_axes(heads)
    return [
        Series(_key(values), label(values, named) or modes_label(values) or "all", values, rows[group])
        for group, values in shown
    ], len(listed)


def _rows(frame: pd.DataFrame, *group: str) -> list[dict[str, Any]]:
    keys = [*group, "num_tokens"]
    return records(frame.drop_duplicates(keys, keep="last").sort_values(keys))


def _key(values: Mapping[str, Any]) -> str:
    """Names a series by a digest, so that no text of a record stands in a figure unescaped."""
    text = repr([(axis, str(value)) for axis, value in values.items()])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def label_axes(heads: pd.DataFrame) -> list[str]:
    """The axes that a label names: all that vary, but `dynamic` only where it tells two lines apart."""
    names = list(heads.columns)
    others = [name for name in names if name != "dynamic"]
    if others and len(others) < len(names) and not heads.duplicated(others).any():
        return others
    return names


def context(frame: pd.DataFrame) -> str:
    """What all rows have in common, as a line for the title (plain text)."""
    frame = points(frame)
    words = []
    for axis in ("model", "tp_size", *MODE_AXES, "routing", "l2", "device_name"):
        if axis in frame and len(frame) and frame[axis].nunique(dropna=False) == 1:
            value = frame[axis].iloc[0]
            if (axis == "tp_size" and value == 1) or not told(axis, value):
                continue
            words.append(short(axis, value))
    return " · ".join(word for word in words if word)


def choose(frame: pd.DataFrame, chosen: Mapping[str, Iterable[object]]) -> pd.DataFrame:
    """The rows whose value on each given axis is among those chosen.

    Raises:
        InvalidInput: an axis that the frame does not have.
    """
    mask: pd.Series[bool] | None = None
    for axis, values in chosen.items():
        if axis not in frame:
            raise InvalidInput(f"{axis}: no such column; there are {choices(frame.columns)}")
        listed = list(values)
        hit = frame[axis].isin([value for value in listed if value is not None])
        if None in listed:
            hit |= frame[axis].isna()
        mask = hit if mask is None else mask & hit
    return frame if mask is None else frame[mask]
