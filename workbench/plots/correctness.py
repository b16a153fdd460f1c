"""How right each point is: error over its budget, with the budget at 1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from workbench.plots import style
from workbench.plots.latency import dress, headline
from workbench.plots.lines import Line, assign, collect, gap_axis, height, traces
from workbench.plots.select import Series, at_size, points, size_title, split
from workbench.plots.style import INK, SLOTS, figures, missing, number, safe, set_height, template, wrap

FLOOR = 1e-3
"""Ratios below this, exact answers among them, are drawn here: 0 has no place on a log axis."""
TICKS = [1e-3, 1e-2, 0.1, 1.0, 10.0, 100.0, 1e3]
TEXTS = ["exact or < 0.001", "0.01", "0.1", "1 = budget", "10", "100", "1,000"]


def correctness_lines(series: Sequence[Series]) -> list[Line]:
    """The lines of the figure, as values (error over budget; `FLOOR` for smaller ones)."""
    return collect(series, "error_ratio", _hover, floor=FLOOR)


def correctness_figure(frame: pd.DataFrame, *, axes: Sequence[str] | None = None, title: str | None = None) -> Any:
    """Draw error over budget, logarithmic, over the size: below the line at 1 is right, above it wrong.

    The hover text gives the error against the unquantised model (total), of the kernel, and of compile or graph (mode);
    of a step how its logits and its layers compare.
    """
    import plotly.graph_objects as go

    frame = points(frame)
    layout = template()
    correctness_axes(layout)
    figure = go.Figure(data=[*traces(band=False), budget_line()], layout=layout, skip_invalid=False)
    series, total = split(frame, axes=axes, most=SLOTS)
    lines = correctness_lines(series)
    gaps = assign(figure.data, lines, bands=False)
    span_budget(figure.data[-1], frame)
    dress(figure.layout.xaxis, figure.layout.yaxis, figure.layout.yaxis2, frame, [], gaps=gaps)
    set_height(figure, height(lines))
    figure.layout.yaxis.range = ratio_range(lines)
    figure.layout.xaxis.title.text = size_title(frame)
    figure.layout.title.text = headline(frame, title, total - len(series))
    return figure


def correctness_axes(layout: dict[str, Any], axis: str = "") -> None:
    """Turn the axes `axis` of a layout into those of this figure."""
    strip = int(axis or 1) + 1
    layout[f"xaxis{axis}"] = style.axis("tokens per call") | {"type": "log", "anchor": "free", "position": 0.0}
    ticks = {"type": "log", "tickvals": TICKS, "ticktext": TEXTS, "automargin": True}
    layout[f"yaxis{axis}"] = style.axis("error / budget (ratio)") | ticks
    layout[f"yaxis{strip}"] = gap_axis(f"x{axis}")


def budget_line(axis: str = "") -> dict[str, Any]:
    """The trace of the budget. A trace and no shape: shapes of a live figure cannot be cleared reliably."""
    return {
        "type": "scatter",
        "x": [],
        "y": [],
        "mode": "lines",
        "line": {"color": INK, "width": 1.5, "dash": "longdash"},
        "name": "budget",
        "hoverinfo": "skip",
        "showlegend": False,
        "visible": False,
        "uid": f"budget{axis}",
        "xaxis": f"x{axis}",
        "yaxis": f"y{axis}",
    }


def span_budget(trace: Any, frame: pd.DataFrame, *, show: bool = True) -> None:
    """Draw the budget from the smallest size to the largest, and a little beyond."""
    if not len(frame):
        trace.visible = False
        return
    trace.x = [float(frame["size"].min()) / 1.25, float(frame["size"].max()) * 1.25]
    trace.y = [1.0, 1.0]
    trace.visible = show


def ratio_range(lines: Sequence[Line]) -> list[float]:
    """Powers of ten that hold the floor or the lowest value, the budget, and the highest value."""
    from math import ceil, log10

    values = [v for line in lines for v in line.values if v is not None]
    low = -3.2 if any(v <= FLOOR * 1.5 for v in values) else min([-1.2, *(log10(v) - 0.2 for v in values)])
    return [max(low, -3.2), max([0.5, *(ceil(log10(v) * 2) / 2 + 0.2 for v in values)])]


def _hover(series: Series, row: dict[str, Any]) -> str:
    ratio = float(row["error_ratio"])
    parts = [
        f"<b>{safe(series.label)}</b> at {at_size(row)}",
        f"error / budget: <b>{figures(ratio, 3)}</b>" if ratio else "exact, bit for bit",
    ]
    names = {
        "total_error": "against the unquantised model",
        "kernel_error": "of the kernel",
        "mode_error": "of compile or graph",
    }
    for column, words in names.items():
        value = number(row.get(column))
        if value is not None:
            parts.append(f"{words}: {value:.2e} relative L2")
    parts += step_words(row)
    if str(row.get("status")) == "incorrect" and not missing(row.get("reason")):
        parts.append(wrap(str(row["reason"])))
    return "<br>".join(parts)


def step_words(row: dict[str, Any]) -> list[str]:
    """How the logits and the layers of a step compare with their oracle, in sentences; none for a layer."""
    top, kl, worst = (number(row.get(name)) for name in ("top1_agreement", "kl", "worst_layer_error"))
    parts = [] if top is None else [f"same most likely token: {top:.1%} of positions"]
    parts += [] if kl is None else [f"divergence from the oracle: {kl:.2e} nats"]
    layer, bad = number(row.get("worst_layer")), number(row.get("first_bad_layer"))
    if worst is not None and layer is not None:
        parts.append(f"worst layer: {layer:.0f}, {worst:.2e} relative L2")
    parts += [] if bad is None else [f"first layer above its budget: {bad:.0f}"]
    return parts
