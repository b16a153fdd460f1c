"""Latency over sizes: one line per set of modes, its noise band, and marks where nothing was measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from workbench.plots.lines import Line, assign, collect, gap_axis, height, size_ticks, traces
from workbench.plots.select import Series, at_size, context, other_time, points, size_title, split, time_title
from workbench.plots.style import SLOTS, axis, duration, figures, log_ticks, missing, number, safe, set_height, template

MAIN = [0.0, 1.0]
ABOVE_STRIP = [0.15, 1.0]


def latency_figure(
    frame: pd.DataFrame, *, axes: Sequence[str] | None = None, title: str | None = None, widget: bool = False
) -> Any:
    """Draw median latency (us) over the size, both logarithmic, with the band from p10 to p90.

    The size is `num_tokens` of layers, `batch_size` of steps; the latency of a step is that of one decode step.

    Args:
        frame: `Results.frame()`, or rows of it; of `timed(frame, "prefill")` the time of the prefill is drawn.
        axes: the axes that tell lines apart; default those on which the rows differ.
        title: a line of plain text; default what all rows have in common.
        widget: give a live `FigureWidget` (needs anywidget) instead of a `go.Figure`.

    Points that were not measured are gaps, marked in a strip below with the reason on hover; they are never drawn as 0.
    """
    import plotly.graph_objects as go

    figure = (go.FigureWidget if widget else go.Figure)(data=traces(), layout=_layout(), skip_invalid=False)
    update_latency(figure, frame, axes=axes, title=title)
    return figure


def update_latency(
    figure: Any, frame: pd.DataFrame, *, axes: Sequence[str] | None = None, title: str | None = None
) -> int:
    """Show `frame` in a figure made by `latency_figure`, in one message; returns how many lines did not fit."""
    frame = points(frame)
    series, total = split(frame, axes=axes, most=SLOTS)
    lines = latency_lines(series)
    left_out = total - len(series)
    with figure.batch_update():
        gaps = assign(figure.data, lines)
        figure.layout.title.text = headline(frame, title, left_out)
        figure.layout.xaxis.title.text = size_title(frame)
        figure.layout.yaxis.title.text = time_title(frame, "<br>")
        set_height(figure, height(lines))
        dress(figure.layout.xaxis, figure.layout.yaxis, figure.layout.yaxis2, frame, lines, gaps=gaps)
    return left_out


def latency_lines(series: Sequence[Series]) -> list[Line]:
    """The lines of the figure, as values (microseconds)."""
    return collect(series, "latency_us", _hover, low="p10_us", high="p90_us")


def dress(x: Any, y: Any, strip: Any, frame: pd.DataFrame, lines: Sequence[Line], *, gaps: bool) -> None:
    """Set ticks and the share of the height for the strip; shapes and annotations are never touched."""
    ticks, texts = size_ticks(frame)
    x.tickvals, x.ticktext = ticks or None, texts or None
    edges = [v for line in lines for store in (line.low, line.high) for v in store if v]
    if edges:
        values, labels = log_ticks(min(edges), max(edges))
        y.tickvals, y.ticktext = values, labels
    y.domain = ABOVE_STRIP if gaps else MAIN
    strip.visible = gaps


def headline(frame: pd.DataFrame, title: str | None, left_out: int) -> str:
    """The title line, escaped: what the rows share, or that there are none, and how many lines did not fit."""
    text = safe(title if title is not None else context(frame)) if len(frame) else "no results yet"
    return f"{text} (first {SLOTS} of {SLOTS + left_out} lines; narrow the choice)" if left_out else text


def _hover(series: Series, row: dict[str, Any]) -> str:
    parts = [
        f"<b>{safe(series.label)}</b>",
        f"{at_size(row)}: <b>{duration(row['latency_us'])}</b>",
    ]
    if not missing(row.get("p10_us")) and not missing(row.get("p90_us")):
        parts.append(f"p10 to p90: {duration(row['p10_us'])} to {duration(row['p90_us'])}")
    if other := other_time(row):
        parts.append(other)
    if rate := throughput(row):
        parts.append(rate)
    ratio, share, compile_s = (number(row.get(name)) for name in ("error_ratio", "floor_share", "compile_s"))
    if ratio is not None:
        parts.append(f"error: {figures(ratio, 2)} of its budget")
    if share is not None:
        parts.append(f"{share:.0%} of this device's measured roof")
    if compile_s:
        parts.append(f"compile: {compile_s:.1f} s, once")
    if str(row.get("status")) == "unchecked":
        parts.append("unchecked: imported from a tool that checks no result")
    return "<br>".join(parts)


def throughput(row: dict[str, Any]) -> str:
    """Tokens a second of the time of a step that is shown, in words; empty for a layer."""
    name = "decode" if missing(row.get("shown_time")) else str(row["shown_time"])
    rate = number(row.get(f"{name}_throughput"))
    return "" if rate is None else f"{figures(rate)} tokens/s"


def _layout() -> dict[str, Any]:
    layout = template()
    layout["margin"]["l"] = 84  # a title of two lines
    layout["xaxis"] = axis("tokens per call") | {"type": "log", "anchor": "free", "position": 0.0}
    layout["yaxis"] = axis("") | {"type": "log", "domain": MAIN}
    layout["yaxis2"] = gap_axis()
    return layout
