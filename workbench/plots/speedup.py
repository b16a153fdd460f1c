"""Speed-up of every set of modes against a chosen baseline, per size; a difference within the noise is a tie."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from workbench.errors import InvalidInput, choices
from workbench.plots.lines import failure
from workbench.plots.select import (
    Series,
    at_size,
    context,
    label_axes,
    other_time,
    points,
    records,
    size_title,
    split,
    timing_of,
)
from workbench.plots.style import (
    DIVERGING,
    GAP,
    MODE_AXES,
    PROBLEM_AXES,
    SLOTS,
    axis,
    duration,
    label,
    missing,
    modes_label,
    safe,
    template,
)

TIME_WORDS = {
    "device": "",
    "wall": ", host launches included",
    "decode": ", one decode step",
    "prefill": ", prefill",
    "total": ", prefill and decode together",
}
BOUND = 3.0
"""log2 of the speed-up at which the colour is full: 8x."""


@dataclass
class Matrix:
    """Rows are sets of modes, columns sizes: token counts of layers, batches of steps.

    `ratio` is baseline over latency: above 1 is faster, None where either was not measured; `tie` where the bands from
    p10 to p90 overlap. `hover` is escaped, `rows` not.
    """

    baseline: str
    rows: list[str] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    ratio: list[list[float | None]] = field(default_factory=list)
    tie: list[list[bool]] = field(default_factory=list)
    text: list[list[str]] = field(default_factory=list)
    hover: list[list[str]] = field(default_factory=list)
    left_out: int = 0

    @property
    def colour(self) -> list[list[float | None]]:
        """log2 of the ratio, 0 for a tie, None for a gap."""
        return [
            [None if r is None else 0.0 if t else math.log2(r) for r, t in zip(ratios, ties, strict=True)]
            for ratios, ties in zip(self.ratio, self.tie, strict=True)
        ]


def baselines(frame: pd.DataFrame, axes: Sequence[str] | None = None) -> dict[str, dict[str, Any]]:
    """The sets of modes that can be the baseline: label -> values of the mode axes, the plainest first."""
    frame = points(frame)
    if not len(frame):
        return {}
    held = [axis for axis in MODE_AXES if axis in frame]
    heads = frame.drop_duplicates(held)[held]
    kept = [axis for axis in held if heads[axis].nunique(dropna=False) > 1 or axis in (axes or ())]
    named = label_axes(heads[kept]) if kept else held
    found = {label(row, named) or modes_label(row) or "all": row for row in records(heads)}
    return dict(sorted(found.items(), key=lambda item: _plainness(item[1])))


def _plainness(values: Mapping[str, Any]) -> tuple[bool, ...]:
    return (
        values.get("compile") != "none",
        values.get("graph") != "disabled",
        values.get("quant") != "bf16",
        values.get("moe_backend") != "torch_grouped_mm",
        not missing(values.get("split_k")) and values.get("split_k") != 1,
        values.get("reduction") == "atomic",
    )


def speedup_matrix(
    frame: pd.DataFrame,
    baseline: str | Mapping[str, Any] | None = None,
    *,
    axes: Sequence[str] | None = None,
    most: int = SLOTS,
) -> Matrix:
    """Compute the matrix. `baseline` is a label of `baselines(frame)` or values of mode axes; default the plainest.

    A row is compared with the baseline on the same problem: same device, model, routing and cache state. The times
    compared are those in `latency_us`: of `timed(frame, "prefill")` those of the prefill.

    Raises:
        InvalidInput: the baseline is not among the sets of modes in the frame.
    """
    frame = points(frame)
    if not len(frame):
        return Matrix(baseline="")
    known = baselines(frame, axes)
    if baseline is None:
        baseline = next(iter(known))
    if isinstance(baseline, str):
        if baseline not in known:
            raise InvalidInput(f"baseline: must be {choices(known)}, not {baseline!r}")
        name, wanted = baseline, known[baseline]
    else:
        wanted = dict(baseline)
        hits = [text for text, values in known.items() if all(_same(values.get(a), v) for a, v in wanted.items())]
        if len(hits) != 1:
            raise InvalidInput(f"baseline: {wanted} fits {len(hits)} sets of modes, must fit one of {choices(known)}")
        name, wanted = hits[0], known[hits[0]]
    series, total = split(frame, axes=axes, most=most)
    sizes = sorted({int(t) for one in series for t in (row["size"] for row in one.rows)})
    bases = _base_rows(frame, wanted)
    matrix = Matrix(baseline=name, sizes=sizes, left_out=total - len(series))
    for one in series:
        rows = {int(row["size"]): row for row in one.rows}
        cells = [_cell(one, rows.get(t), bases.get((_problem(rows.get(t)), t)), name, t) for t in sizes]
        matrix.rows.append(one.label)
        matrix.ratio.append([cell[0] for cell in cells])
        matrix.tie.append([cell[1] for cell in cells])
        matrix.text.append([cell[2] for cell in cells])
        matrix.hover.append([cell[3] for cell in cells])
    return matrix


def _same(left: object, right: object) -> bool:
    return (missing(left) and missing(right)) or str(left) == str(right)


def _problem(row: Mapping[str, Any] | None) -> tuple[str, ...]:
    return () if row is None else tuple(str(row.get(axis)) for axis in PROBLEM_AXES)


def _base_rows(frame: pd.DataFrame, wanted: Mapping[str, Any]) -> dict[tuple[tuple[str, ...], int], dict[str, Any]]:
    mask = pd.Series(True, index=frame.index)
    for name, value in wanted.items():
        mask &= frame[name].isna() if missing(value) else frame[name] == value
    return {(_problem(row), int(row["size"])): row for row in records(frame[mask])}


def _cell(
    series: Series, row: dict[str, Any] | None, base: dict[str, Any] | None, name: str, size: int
) -> tuple[float | None, bool, str, str]:
    """Ratio, whether it is a tie, the text in the cell, and the escaped hover text."""
    place = at_size(row or (series.rows[0] if series.rows else {}), size)
    head = f"<b>{safe(series.label)}</b> at {place}"
    if row is None:
        return None, False, "", f"{head}<br>not part of this sweep"
    if missing(row.get("latency_us")):
        return None, False, "", failure(series, row)
    if base is None or missing(base.get("latency_us")):
        why = f"no baseline here: {safe(name)} was not measured at {place}"
        return None, False, "", f"{head}<br>{duration(row['latency_us'])}<br>{why}"
    ratio = float(base["latency_us"]) / float(row["latency_us"])
    own = all(str(row.get(axis)) == str(base.get(axis)) for axis in (*MODE_AXES, *PROBLEM_AXES))
    lines = [head, f"{duration(row['latency_us'])} against {duration(base['latency_us'])}"]
    if own:
        words = [head, f"{duration(row['latency_us'])}: the baseline", other_time(row)]
        return 1.0, True, "base", "<br>".join(word for word in words if word)
    tie = _overlap(row, base)
    lines.append("tie: the bands from p10 to p90 overlap" if tie else f"{_times(ratio)} the speed of {safe(name)}")
    lines += [other] if (other := other_time(row, base)) else []
    return ratio, tie, "tie" if tie else _times(ratio), "<br>".join(lines)


def _times(ratio: float) -> str:
    digits = 0 if ratio >= 99.5 else 1 if ratio >= 9.95 else 2
    return f"{ratio:,.{digits}f}x"


def _overlap(row: Mapping[str, Any], base: Mapping[str, Any]) -> bool:
    def edge(one: Mapping[str, Any], name: str) -> float:
        return float(one["latency_us"] if missing(one.get(name)) else one[name])

    return edge(row, "p10_us") <= edge(base, "p90_us") and edge(base, "p10_us") <= edge(row, "p90_us")


def heatmaps() -> list[dict[str, Any]]:
    """The empty traces of a matrix: its cells, and the grey cells that were not measured.

    Grey cells are a trace and not the background of the plot, so that they have a hover text, and so that another
    plot can share the figure.
    """
    common = {
        "type": "heatmap",
        "x": [],
        "y": [],
        "z": [],
        "hovertext": [],
        "hovertemplate": "%{hovertext}<extra></extra>",
        "hoverongaps": False,
        "xgap": 2,
        "ygap": 2,
        "visible": False,
    }
    grey = {"uid": "speedup-gaps", "showscale": False, "colorscale": [[0, GAP], [1, GAP]], "zmin": 0, "zmax": 1}
    cells = {
        "uid": "speedup",
        "text": [],
        "texttemplate": "%{text}",
        "textfont": {"size": 12},
        "colorscale": [list(stop) for stop in DIVERGING],
        "zmin": -BOUND,
        "zmax": BOUND,
        "colorbar": {
            "title": {"text": "speed-up", "side": "top", "font": {"size": 12}},
            "tickvals": [-3, -1, 0, 1, 3],
            "ticktext": ["1/8x", "1/2x", "1x", "2x", "8x"],
            "thickness": 12,
            "outlinewidth": 0,
            "lenmode": "pixels",
            "len": 150,
            "y": 1.0,
            "yanchor": "top",
            "tickfont": {"size": 11},
            "ticks": "outside",
            "ticklen": 3,
        },
    }
    return [common | grey, common | cells]


def matrix_axes(layout: dict[str, Any]) -> None:
    """Turn the axes of a layout into those of a matrix: categories, first row on top, room for long names."""
    # Restyled data makes the page guess the type anew: strict, so that "16" stays the name of a column.
    plain = {
        "type": "category",
        "autotypenumbers": "strict",
        "showgrid": False,
        "showline": False,
        "ticks": "",
        "fixedrange": True,
    }
    layout["xaxis"] = axis("tokens per call") | plain
    layout["yaxis"] = axis("") | plain | {"autorange": "reversed", "automargin": True}


def assign_matrix(traces: Sequence[Any], matrix: Matrix, *, show: bool = True) -> None:
    """Write a matrix into the traces made by `heatmaps()`."""
    gaps = [[1.0 if cell is None else None for cell in row] for row in matrix.colour]
    for trace, values in zip(traces, (gaps, matrix.colour), strict=True):
        trace.x = [f"{t:,}" for t in matrix.sizes]
        trace.y = [safe(row) for row in matrix.rows]
        trace.z = [list(row) for row in values]
        trace.hovertext = [list(row) for row in matrix.hover]
        trace.visible = show and bool(matrix.rows)
    traces[1].text = [list(row) for row in matrix.text]


def matrix_title(matrix: Matrix, frame: pd.DataFrame) -> str:
    """The title line, escaped."""
    if not matrix.rows:
        return "no results yet"
    more = f"; first {len(matrix.rows)} of {len(matrix.rows) + matrix.left_out} rows" if matrix.left_out else ""
    shared = context(frame)
    time = TIME_WORDS[timing_of(frame)]
    return f"speed-up against {safe(matrix.baseline)}{time}" + (f", {safe(shared)}" if shared else "") + more


def matrix_height(matrix: Matrix) -> int:
    """Pixels that keep every row readable."""
    return max(230, 110 + 30 * len(matrix.rows))


def speedup_figure(
    frame: pd.DataFrame, baseline: str | Mapping[str, Any] | None = None, *, axes: Sequence[str] | None = None
) -> Any:
    """Draw `speedup_matrix` as a `go.Figure`: blue is faster, white a tie, grey not measured (hover says why)."""
    import plotly.graph_objects as go

    matrix = speedup_matrix(frame, baseline, axes=axes)
    layout = template()
    matrix_axes(layout)
    figure = go.Figure(data=heatmaps(), layout=layout, skip_invalid=False)
    assign_matrix(figure.data, matrix)
    figure.layout.title.text = matrix_title(matrix, frame)
    figure.layout.xaxis.title.text = size_title(points(frame))
    figure.layout.height = matrix_height(matrix)
    return figure


__all__ = ["Matrix", "baselines", "speedup_figure", "speedup_matrix"]
