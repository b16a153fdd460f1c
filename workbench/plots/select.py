"""From a frame of results to the lines of a figure: which axes vary, one series per set of modes, filters."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pandas as pd

from workbench.errors import InvalidInput, choices
from workbench.modes import (
    ATTENTION_BACKENDS,
    BACKENDS,
    ActivationScale,
    Compile,
    CompileScope,
    Fusion,
    Graph,
    Mla,
    Quant,
    Reduction,
    RoutingKind,
    Subject,
)
from workbench.plots.style import AXES, MODE_AXES, duration, label, missing, modes_label, number, short, told

Timing = Literal["device", "wall", "decode", "prefill", "total"]
STEP_TIMINGS: tuple[Timing, ...] = ("decode", "prefill", "total")
TIMINGS: tuple[Timing, ...] = ("device", "wall", *STEP_TIMINGS)
# Shown column -> how the column of another time is called, and where the device's own stands while it is shown.
_TIMES = {"latency_us": "us", "p10_us": "p10_us", "p90_us": "p90_us"}
_SHOWN = "shown_time"
_TITLES: dict[str, tuple[str, ...]] = {
    "device": ("median latency (µs)",),
    "wall": ("median time from an idle device,", "host launches included (µs)"),
    "decode": ("median time of one decode step (µs)",),
    "prefill": ("median time of the prefill (µs)",),
    "total": ("median time of the prefill", "and all decode steps (µs)"),
}
_ORDER: dict[str, list[str]] = {
    "compile": [str(v) for v in Compile],
    "graph": [str(v) for v in Graph],
    "quant": [str(v) for v in Quant],
    "routing": [str(v) for v in RoutingKind],
    "activation_scale": [str(v) for v in ActivationScale],
    "reduction": [str(v) for v in Reduction],
    "moe_backend": list(BACKENDS),
    "attention_backend": list(ATTENTION_BACKENDS),
    "mla_prefill": [str(v) for v in Mla],
    "mla_decode": [str(v) for v in Mla],
    "fusion": [str(v) for v in Fusion],
    "compile_scope": [str(v) for v in CompileScope],
    "subject": [str(v) for v in Subject],
}


@dataclass(frozen=True)
class Series:
    """One line: `values` on the varying axes, a `label` (plain text), and `rows`, one per size, ascending."""

    key: str
    label: str
    values: dict[str, Any]
    rows: list[dict[str, Any]]


def points(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows that figures show: all but repeats of the anchor point. `size` is what they have along x.

    Raises:
        InvalidInput: a frame of another kind.
    """
    if len(frame) and ("num_tokens" not in frame or "latency_us" not in frame):
        raise InvalidInput("frame: must have the columns of Results.frame(), num_tokens and latency_us among them")
    if len(frame) and "size" not in frame:
        frame = frame.assign(size=frame["num_tokens"])
    if "anchor" not in frame or not len(frame):
        return frame
    anchors = frame["anchor"].to_numpy(dtype=bool)
    return frame[~anchors] if anchors.any() else frame


def timed(frame: pd.DataFrame, timing: Timing) -> pd.DataFrame:
    """The frame with the chosen time in `latency_us`, `p10_us` and `p90_us`, which is what figures and matrices read.

    Args:
        frame: `Results.frame()`, or what this gave.
        timing: `device`, the record's own latency (of a step: of one decode step); `wall`, a layer's time from an
            idle device, host launches included; `decode`, `prefill` and `total`, times of a step. NaN where that was
            not recorded. The record's own latency then stands in `device_us`.

    Raises:
        InvalidInput: another word.
    """
    if timing not in TIMINGS:
        raise InvalidInput(f"timing: must be {choices(TIMINGS)}, not {timing!r}")
    if not len(frame) or timing == timing_of(frame):
        return frame
    if timing_of(frame) != "device":
        kept = frame.drop(columns=[_SHOWN, *(f"device_{name}" for name in _TIMES.values())])
        frame = kept.assign(**{shown: frame[f"device_{name}"] for shown, name in _TIMES.items()})
        if timing == "device":
            return frame
    old = {f"device_{name}": frame[shown] for shown, name in _TIMES.items()}
    new = {shown: frame.get(f"{timing}_{name}", math.nan) for shown, name in _TIMES.items()}
    return frame.assign(**old, **new, **{_SHOWN: timing})


def timing_of(frame: pd.DataFrame) -> Timing:
    """Which time `latency_us` of this frame holds."""
    found: Timing = frame[_SHOWN].iloc[0] if _SHOWN in frame and len(frame) else "device"
    return found


def subjects(frame: pd.DataFrame) -> tuple[str, ...]:
    """The subjects of the rows, in the order of the vocabulary; a frame without that column is of layers."""
    if not len(frame) or "subject" not in frame:
        return (str(Subject.MOE_LAYER),) if len(frame) else ()
    return tuple(sorted({str(value) for value in frame["subject"].unique()}, key=_ORDER["subject"].index))


def of_steps(frame: pd.DataFrame) -> bool:
    """Whether all rows are of whole steps."""
    return subjects(frame) == (str(Subject.STEP),)


def size_title(frame: pd.DataFrame) -> str:
    """The title of the axis that `size` is on."""
    titles = {str(Subject.MOE_LAYER): "tokens per call", str(Subject.STEP): "sequences in a batch"}
    return ", ".join(titles[name] for name in subjects(frame)) or titles[str(Subject.MOE_LAYER)]


def at_size(row: Mapping[str, Any], size: int | None = None) -> str:
    """Where a row was measured: `16 tokens`, `batch 8`; `size` instead of the row's own."""
    at = int(row["size"]) if size is None else size
    if str(row.get("subject")) == str(Subject.STEP):
        return f"batch {at:,}"
    return f"{at:,} tokens"


def has_wall(frame: pd.DataFrame) -> bool:
    """Whether any row has a time from an idle device."""
    return "wall_us" in frame and bool(frame["wall_us"].notna().any())


def time_title(frame: pd.DataFrame, line_break: str = " ") -> str:
    """The title, with its unit, of the axis that shows `latency_us` of this frame."""
    timing = timing_of(frame)
    return line_break.join(_TITLES["decode" if timing == "device" and of_steps(frame) else timing])


def other_time(row: Mapping[str, Any], base: Mapping[str, Any] | None = None) -> str:
    """The time of a row that is not the shown one, in words (against that of `base`); empty where there is none."""
    if str(row.get("subject")) == str(Subject.STEP):
        shown = "decode" if missing(row.get(_SHOWN)) else str(row[_SHOWN])
        others = [(f"{name}_us", str(name)) for name in STEP_TIMINGS if name != shown]
    elif "device_us" in row:
        others = [("device_us", "the device's own time")]
    else:
        others = [("wall_us", "with host launches")]
    said = []
    for name, words in others:
        values = [number(one.get(name)) for one in (row, base) if one is not None]
        known = [duration(value) for value in values if value is not None]
        said += [f"{words}: {' against '.join(known)}"] if len(known) == len(values) else []
    return "; ".join(said)


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

    Of several rows at the same size the last one counts. With `most`, only the first so many series are built.
    """
    frame = points(frame)
    if not len(frame):
        return [], 0
    differ = varying(frame)
    names = differ if axes is None else [axis for axis in axes if axis in frame]
    identity = sorted({*names, *differ}, key=AXES.index)
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
    keys = [*group, "size"]
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
    where = ("input_len", "output_len") if of_steps(frame) else ("routing", "l2")
    for axis in ("model", "num_layers", "tp_size", *MODE_AXES, *where, "device_name"):
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
