"""Lines over sizes on traces allocated once: shared by the latency and the correctness figure.

A size is a layer's number of tokens, or a step's batch. A live figure is never rebuilt: it has a fixed number of slots
(a band and a line each) and one trace of marks for points that were not measured, and an update assigns data, names
and visibility inside one batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from workbench.plots.select import Series, at_size
from workbench.plots.style import DASHES, MUTED, PALETTE, SLOTS, SYMBOLS, missing, safe, wrap

HEIGHT = 380
"""Pixels of a figure of lines whose legend is short."""
STRIP = 0.11
"""Share of the height that the strip of points not measured takes when there are any."""


NOT_RECORDED = {
    "wall": "Its time from an idle device was not recorded apart from its latency.",
    "decode": "No decode step follows its prefill.",
}
"""Why a measured point has no such time."""


@dataclass(frozen=True)
class Line:
    """What one slot shows: one value per row, None where there is none; `low` and `high` bound the noise band."""

    series: Series
    sizes: list[int]
    values: list[float | None]
    low: list[float | None]
    high: list[float | None]
    hover: list[str]
    failed: list[tuple[int, str]]


def style(slot: int) -> dict[str, Any]:
    """Colour, dash and symbol of a slot; every slot of a figure has its own combination."""
    return {
        "color": PALETTE[slot % len(PALETTE)],
        "dash": DASHES[slot // len(PALETTE) % len(DASHES)],
        "symbol": SYMBOLS[slot % len(SYMBOLS)],
    }


def traces(axis: str = "", *, band: bool = True) -> list[dict[str, Any]]:
    """The empty traces of a figure of lines: for each slot a band (if wanted) and a line, then the marks of failures.

    `axis` is the suffix of the axes they live on: `""` for x and y with marks on `y2`, `"3"` for x3 and y3 with `y4`.
    """
    made: list[dict[str, Any]] = []
    where = {"xaxis": f"x{axis}", "yaxis": f"y{axis}"}
    for slot in range(SLOTS):
        look = style(slot)
        if band:
            made.append(
                {
                    "type": "scatter",
                    "x": [],
                    "y": [],
                    "mode": "lines",
                    "fill": "toself",
                    "fillcolor": _rgba(look["color"], 0.16),
                    "line": {"width": 0},
                    "hoverinfo": "skip",
                    "showlegend": False,
                    "legendgroup": f"slot{slot}",
                    "visible": False,
                    "uid": f"band{axis}-{slot}",
                    **where,
                }
            )
        made.append(
            {
                "type": "scatter",
                "x": [],
                "y": [],
                "mode": "lines+markers",
                "connectgaps": False,
                "line": {"color": look["color"], "dash": look["dash"], "width": 2},
                "marker": {"symbol": look["symbol"], "size": 7, "color": look["color"]},
                "hovertemplate": "%{text}<extra></extra>",
                "text": [],
                "legendgroup": f"slot{slot}",
                "visible": False,
                "uid": f"line{axis}-{slot}",
                **where,
            }
        )
    made.append(
        {
            "type": "scatter",
            "x": [],
            "y": [],
            "mode": "markers",
            "marker": {"symbol": "x-thin", "size": 9, "line": {"width": 2, "color": []}},
            "hovertemplate": "%{text}<extra></extra>",
            "text": [],
            "showlegend": False,
            "name": "not measured",
            "visible": False,
            "uid": f"gaps{axis}",
            "xaxis": f"x{axis}",
            "yaxis": f"y{int(axis or 1) + 1}",
        }
    )
    return made


def gap_axis(x: str = "x") -> dict[str, Any]:
    """The axis of the strip in which points that were not measured are marked."""
    return {
        "domain": [0.0, STRIP],
        "anchor": x,
        "range": [0, 1],
        "fixedrange": True,
        "showgrid": False,
        "showline": False,
        "zeroline": False,
        "ticks": "",
        "tickvals": [0.5],
        "ticktext": ["not<br>measured"],
        "tickfont": {"size": 11, "color": MUTED},
        "visible": False,
    }


def collect(
    series: Sequence[Series],
    value: str,
    hover: Callable[[Series, dict[str, Any]], str],
    *,
    low: str | None = None,
    high: str | None = None,
    floor: float | None = None,
) -> list[Line]:
    """Read `value` (and its band) of every row; a row without one becomes a gap with its reason.

    On a log axis 0 has no place: values below `floor` are drawn at it, without a floor they are gaps.
    """
    lines = []
    for one in series:
        line = Line(one, [], [], [], [], [], [])
        for row in one.rows:
            number = None if missing(row.get(value)) else float(row[value])
            if number is not None and floor is not None and 0 <= number < floor:
                number = floor
            drawn = number if number is not None and 0 < number < float("inf") else None
            line.sizes.append(int(row["size"]))
            line.values.append(drawn)
            for bound, store in ((low, line.low), (high, line.high)):
                edge = row.get(bound) if bound else None
                store.append(drawn if missing(edge) or drawn is None else float(edge))  # type: ignore[arg-type]
            line.hover.append("" if drawn is None else hover(one, row))
            if drawn is None:
                line.failed.append((int(row["size"]), failure(one, row)))
        lines.append(line)
    return lines


def failure(series: Series, row: dict[str, Any]) -> str:
    """Hover text of a point without a value, escaped."""
    status = "" if missing(row.get("status")) else str(row["status"]).replace("_", " ")
    reason = "" if missing(row.get("reason")) else str(row["reason"])
    if missing(row.get("latency_us")) and not missing(row.get("device_us")):
        status, reason = "not recorded", NOT_RECORDED.get(str(row.get("shown_time")), "")
    head = f"<b>{safe(series.label)}</b> at {at_size(row)}"
    return f"{head}<br>{safe(status) or 'not measured'}" + (f"<br>{wrap(reason)}" if reason else "")


def band(line: Line) -> tuple[list[float | None], list[float | None]]:
    """The outline of the noise band, one closed piece between gaps, with None between pieces."""
    xs: list[float | None] = []
    ys: list[float | None] = []
    piece: list[int] = []
    for i in range(len(line.sizes) + 1):
        if i < len(line.sizes) and line.values[i] is not None:
            piece.append(i)
            continue
        if len(piece) > 1:
            xs += [*(line.sizes[j] for j in piece), *(line.sizes[j] for j in reversed(piece)), None]
            ys += [*(line.high[j] for j in piece), *(line.low[j] for j in reversed(piece)), None]
        piece = []
    return xs[:-1], ys[:-1]


def assign(traces: Sequence[Any], lines: Sequence[Line], *, bands: bool = True, show: bool = True) -> bool:
    """Write lines into traces made by `traces()`; a series keeps its slot, and so its colour. True when there are gaps.

    Only data, text, names and visibility are assigned. Call it inside `batch_update` on a live figure.
    """
    step = 2 if bands else 1
    mains = [traces[slot * step + step - 1] for slot in range(SLOTS)]
    held = {trace.meta: slot for slot, trace in enumerate(mains) if trace.meta}
    taken = {line.series.key: held[line.series.key] for line in lines if line.series.key in held}
    free = iter(slot for slot in range(SLOTS) if slot not in set(taken.values()))
    used: dict[int, tuple[int, Line]] = {}
    for order, line in enumerate(lines[:SLOTS]):
        used[taken[line.series.key] if line.series.key in taken else next(free)] = (order, line)
    marks: list[tuple[int, str, str]] = []
    for slot, main in enumerate(mains):
        if slot not in used:
            if main.visible:
                main.visible = False
                if bands:
                    traces[slot * step].visible = False
            continue
        order, here = used[slot]
        _set(main, x=here.sizes, y=here.values, text=here.hover, name=safe(here.series.label))
        _set(main, meta=here.series.key, legendrank=order + 1, visible=show)
        if bands:
            xs, ys = band(here)
            _set(traces[slot * step], x=xs, y=ys, visible=show and bool(xs))
        marks += [(size, text, style(slot)["color"]) for size, text in here.failed]
    gaps = traces[SLOTS * step]
    _set(gaps, x=[m[0] for m in marks], y=_stack(marks), text=[m[1] for m in marks], visible=show and bool(marks))
    gaps.marker.line.color = [m[2] for m in marks]
    return bool(marks)


def _set(trace: Any, **values: Any) -> None:
    for name, value in values.items():
        old = getattr(trace, name)
        if (list(old) if isinstance(old, tuple) else old) != value:
            setattr(trace, name, value)


def _stack(marks: Sequence[tuple[int, str, str]]) -> list[float]:
    """Heights in the strip: marks at the same size stand above each other."""
    counts: dict[int, int] = {}
    for size, _, _ in marks:
        counts[size] = counts.get(size, 0) + 1
    seen: dict[int, int] = {}
    heights = []
    for size, _, _ in marks:
        seen[size] = seen.get(size, 0) + 1
        heights.append(seen[size] / (counts[size] + 1))
    return heights


def height(lines: Sequence[Line]) -> int:
    """Pixels that show the whole legend."""
    return max(HEIGHT, 110 + 19 * len(lines))


def size_ticks(frame: pd.DataFrame, most: int = 14) -> tuple[list[int], list[str]]:
    """The sizes that occur, thinned evenly when there are many."""
    found = sorted({int(t) for t in frame["size"]}) if len(frame) else []
    step = -(-len(found) // most) if found else 1
    return found[::step], [f"{t:,}" for t in found[::step]]


def _rgba(colour: str, alpha: float) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha})"
