"""Compact HTML tables of results. Every string is escaped; styles are inline, so that a cleaned notebook keeps them."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import pandas as pd

from workbench.plots.select import has_wall, of_steps, points, split, timed, timing_of
from workbench.plots.speedup import BOUND, TIME_WORDS, Matrix, speedup_matrix
from workbench.plots.style import DIVERGING, GAP, MUTED, SLOTS, duration, figures, missing, number, safe

_TABLE = "border-collapse:collapse;font-size:12px;font-variant-numeric:tabular-nums;margin:4px 0 14px"
_HEAD = "text-align:right;padding:3px 8px;border-bottom:1px solid #999;font-weight:600;white-space:nowrap"
_CELL = "text-align:right;padding:3px 8px;border-bottom:1px solid #e6e6e6;white-space:nowrap"
_NAME = _CELL.replace("right", "left")
_BELOW = f"color:{MUTED};font-weight:400"


def results_table(frame: pd.DataFrame, *, axes: Sequence[str] | None = None, most: int = 2 * SLOTS) -> str:
    """One row per set of modes, one column per size: median latency, or why there is none.

    Below a latency stands the time from an idle device, where it was recorded (of a step: that of its prefill, below
    that of one decode step); both whichever the figures show.
    The last columns give the worst error over budget, compile seconds and the bytes of the weights. The reasons
    of points that were not measured stand below, each once.
    """
    frame = timed(points(frame), "device")
    if not len(frame):
        return f'<p style="color:{MUTED}">no results yet</p>'
    series, total = split(frame, axes=axes, most=most)
    sizes = sorted({int(row["size"]) for one in series for row in one.rows})
    titles = {
        "error_ratio": "worst error / budget",
        "compile_s": "compile (s)",
        "capture_s": "capture (s)",
        "graph_bytes": "graphs (MB)",
        "weight_bytes": "weights (MB)",
        "kv_cache_bytes": "KV cache (MB)",
        "perplexity": "perplexity",
    }
    extras = [c for c in titles if c in frame and frame[c].notna().any()]
    head = "".join(_th(f"{t:,}") for t in sizes) + "".join(_th(titles[c]) for c in extras)
    body = []
    for one in series:
        rows = {int(r["size"]): r for r in one.rows}
        cells = "".join(_latency_cell(rows.get(t)) for t in sizes)
        for column in extras:
            found = [value for value in (number(row.get(column)) for row in one.rows) if value is not None]
            scale = 1e6 if column.endswith("_bytes") else 1.0
            cells += f'<td style="{_CELL}">{figures(max(found) / scale) if found else ""}</td>'
        body.append(f'<tr><td style="{_NAME}">{_escape(one.label)}</td>{cells}</tr>')
    steps = of_steps(frame)
    words = "below: the prefill" if steps else "below: from idle, host launches included"
    below = f'<br><span style="{_BELOW}">{words}</span>' if steps or has_wall(frame) else ""
    what = "median decode step at batch" if steps else "median latency at tokens"
    corner = f'<th style="{_HEAD.replace("right", "left")}">{what}{below}</th>'
    more = _note(f"first {len(series)} of {total} rows") if total > len(series) else ""
    table = f'<table style="{_TABLE}"><thead><tr>{corner}{head}</tr></thead><tbody>{"".join(body)}</tbody></table>'
    return table + more + reasons_list(frame)


def reasons_list(frame: pd.DataFrame, most: int = 12) -> str:
    """Why points were not measured, each reason once with the number of points, commonest first; empty if all were."""
    frame = timed(points(frame), "device")
    if not len(frame) or "reason" not in frame:
        return ""
    failed = frame[frame["latency_us"].isna()]
    if not len(failed):
        return ""
    counts = Counter(zip(failed["status"].tolist(), failed["reason"].tolist(), strict=True))
    items = []
    for (status, reason), count in counts.most_common(most):
        plural = "point" if count == 1 else "points"
        words = "" if missing(reason) else f": {_escape(str(reason)[:300])}"
        items.append(f"<li>{count} {plural} {_escape(str(status).replace('_', ' '))}{words}</li>")
    more = _note(f"and {len(counts) - most} more reasons") if len(counts) > most else ""
    return (
        f'<p style="margin:6px 0 2px;font-size:12px;font-weight:600">Not measured</p>'
        f'<ul style="margin:0 0 4px 18px;padding:0;font-size:12px;color:{MUTED}">{"".join(items)}</ul>{more}'
    )


def speedup_table(
    frame: pd.DataFrame, baseline: str | Mapping[str, Any] | None = None, *, axes: Sequence[str] | None = None
) -> str:
    """The speed-up matrix as a table with tinted cells; grey cells were not measured."""
    matrix = speedup_matrix(frame, baseline, axes=axes)
    if not matrix.rows:
        return f'<p style="color:{MUTED}">no results yet</p>'
    time = TIME_WORDS[timing_of(frame)]
    head = f'<th style="{_HEAD.replace("right", "left")}">speed-up against {_escape(matrix.baseline)}{time}</th>'
    head += "".join(_th(f"{t:,}") for t in matrix.sizes)
    body = "".join(_matrix_row(matrix, i) for i in range(len(matrix.rows)))
    return f'<table style="{_TABLE}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def _matrix_row(matrix: Matrix, i: int) -> str:
    cells = []
    for text, colour in zip(matrix.text[i], matrix.colour[i], strict=True):
        back, ink = (GAP, "#222222") if colour is None else tint(colour)
        cells.append(f'<td style="{_CELL};background:{back};color:{ink}">{_escape(text)}</td>')
    return f'<tr><td style="{_NAME}">{_escape(matrix.rows[i])}</td>{"".join(cells)}</tr>'


def tint(log2_ratio: float) -> tuple[str, str]:
    """Background and text colour of a speed-up, on the figure's colour scale."""
    place = (min(BOUND, max(-BOUND, log2_ratio)) + BOUND) / (2 * BOUND)
    for (low, first), (high, second) in pairwise(DIVERGING):
        if place <= high:
            part = (place - low) / (high - low)
            mixed = [round(a + (b - a) * part) for a, b in zip(_rgb(first), _rgb(second), strict=True)]
            dark = 0.299 * mixed[0] + 0.587 * mixed[1] + 0.114 * mixed[2] < 140
            return "#" + "".join(f"{c:02x}" for c in mixed), "#ffffff" if dark else "#222222"
    raise AssertionError("the colour scale covers 0 to 1")


def _rgb(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def _latency_cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return f'<td style="{_CELL}"></td>'
    if missing(row.get("latency_us")):
        status = str(row.get("status", "")).replace("_", " ")
        title = "" if missing(row.get("reason")) else f' title="{_escape(row["reason"])}"'
        return f'<td style="{_CELL};background:{GAP};color:{MUTED}"{title}>{_escape(status)}</td>'
    badge = " (unchecked)" if row.get("status") == "unchecked" else ""
    other = number(row.get("prefill_us" if str(row.get("subject")) == "step" else "wall_us"))
    below = "" if other is None else f'<br><span style="{_BELOW}">{_escape(duration(other))}</span>'
    return f'<td style="{_CELL}">{_escape(duration(row["latency_us"]))}{badge}{below}</td>'


def _th(text: str) -> str:
    return f'<th style="{_HEAD}">{_escape(text)}</th>'


def _note(text: str) -> str:
    return f'<p style="margin:2px 0;font-size:12px;color:{MUTED}">{safe(text)}</p>'


def _escape(text: object) -> str:
    return html.escape(str(text))
