"""One live figure that shows the speed-up matrix or the correctness: a notebook holds two figures and not three."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import pandas as pd

from workbench.plots.correctness import (
    budget_line,
    correctness_axes,
    correctness_lines,
    ratio_range,
    span_budget,
)
from workbench.plots.latency import dress, headline
from workbench.plots.lines import assign, height, traces
from workbench.plots.select import points, size_title, split, timed
from workbench.plots.speedup import assign_matrix, heatmaps, matrix_axes, matrix_height, matrix_title, speedup_matrix
from workbench.plots.style import SLOTS, set_height, template

View = Literal["speed-up", "correctness"]
VIEWS: tuple[View, ...] = ("speed-up", "correctness")


def detail_figure(*, widget: bool = False) -> Any:
    """An empty figure with the traces of both views; fill it with `update_detail`."""
    import plotly.graph_objects as go

    layout = template()
    matrix_axes(layout)
    correctness_axes(layout, "3")
    for name in ("xaxis3", "yaxis3", "xaxis", "yaxis"):
        layout[name]["visible"] = False
    layout["yaxis3"]["anchor"], layout["yaxis"]["anchor"], layout["xaxis"]["anchor"] = "x3", "x", "y"
    data = [*heatmaps(), *traces("3", band=False), budget_line("3")]
    return (go.FigureWidget if widget else go.Figure)(data=data, layout=layout, skip_invalid=False)


def update_detail(
    figure: Any,
    frame: pd.DataFrame,
    view: View,
    *,
    baseline: str | Mapping[str, Any] | None = None,
    axes: Sequence[str] | None = None,
) -> None:
    """Show one view of `frame` in a figure made by `detail_figure`, in one message."""
    frame = points(frame)
    layout = figure.layout
    right = view == "correctness"
    with figure.batch_update():
        for axis in (layout.xaxis, layout.yaxis):
            axis.visible = not right
        layout.yaxis.automargin = not right  # a hidden axis keeps its room
        for axis in (layout.xaxis3, layout.yaxis3):
            axis.visible = right
        if right:
            frame = timed(frame, "device")
            series, total = split(frame, axes=axes, most=SLOTS)
            lines = correctness_lines(series)
            gaps = assign(figure.data[2:-1], lines, bands=False)
            span_budget(figure.data[-1], frame)
            dress(layout.xaxis3, layout.yaxis3, layout.yaxis4, frame, [], gaps=gaps)
            layout.yaxis3.range = ratio_range(lines)
            layout.xaxis3.title.text = size_title(frame)
            layout.title.text = headline(frame, None, total - len(series))
            set_height(figure, height(lines))
            for trace in figure.data[:2]:
                trace.visible = False
            return
        matrix = speedup_matrix(frame, baseline, axes=axes)
        assign_matrix(figure.data[:2], matrix)
        for trace in figure.data[2:]:
            if trace.visible:
                trace.visible = False
        layout.yaxis4.visible = False
        layout.xaxis.title.text = size_title(frame)
        layout.title.text = matrix_title(matrix, frame)
        set_height(figure, matrix_height(matrix))
