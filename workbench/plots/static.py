"""Frozen results that need no script and no network: an SVG of the latency figure, and a page around it."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from workbench.plots.latency import latency_lines
from workbench.plots.lines import Line, style
from workbench.plots.select import at_size, context, other_time, points, size_title, split, time_title
from workbench.plots.style import FONT, GRID, INK, MUTED, SLOTS, duration, log_ticks
from workbench.plots.table import results_table, speedup_table

_DASH = {"solid": "", "dash": ' stroke-dasharray="7 4"', "dot": ' stroke-dasharray="2 3"'}
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 960, 400, 70, 300, 16, 52


def latency_svg(frame: pd.DataFrame, *, axes: Sequence[str] | None = None) -> str:
    """The latency figure as one `<svg>` element: lines, noise bands, crosses where nothing was measured, a legend."""
    frame = points(frame)
    series, _ = split(frame, axes=axes, most=SLOTS)
    lines = latency_lines(series)
    edges = [v for line in lines for store in (line.low, line.high) for v in store if v]
    if not edges:
        return f'<p style="color:{MUTED}">nothing was measured</p>'
    sizes = sorted({t for line in lines for t in line.sizes})
    failures = any(line.failed for line in lines)
    floor = HEIGHT - BOTTOM - (26 if failures else 0)
    low, high = min(edges) / 1.15, max(edges) * 1.15
    first, last = math.log(sizes[0] / 1.2), math.log(sizes[-1] * 1.2)

    def x(value: float) -> float:
        return LEFT + (math.log(value) - first) / (last - first) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return floor - (math.log(value / low)) / math.log(high / low) * (floor - TOP)

    title, along = time_title(frame), size_title(frame)
    parts = _frame(sizes, low, high, x, y, floor, title, along)
    height = max(HEIGHT, TOP + 18 * len(lines) + 10)
    for slot, line in enumerate(lines):
        parts += _line(slot, line, x, y)
        for count, _ in line.failed:
            cx, cy = x(count), floor + 12 + 10 * slot / max(1, len(lines))
            colour = style(slot)["color"]
            parts.append(f'<path d="M{cx - 4:.1f} {cy - 4:.1f}l8 8m0-8l-8 8" stroke="{colour}" stroke-width="1.6"/>')
        parts += _legend(slot, line)
    if failures:
        for row, word in enumerate(("not", "measured")):
            place = f'x="{LEFT - 8}" y="{floor + 13 + 11 * row}" text-anchor="end" font-size="10"'
            parts.append(f'<text {place} fill="{MUTED}">{word}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="100%" role="img" '
        f'style="max-width:{WIDTH}px;background:white" font-family="{FONT}" font-size="12" '
        f'aria-label="{title} over {along}">{"".join(parts)}</svg>'
    )


def _frame(
    sizes: list[int], low: float, high: float, x: Any, y: Any, floor: float, title: str, along: str
) -> list[str]:
    right = WIDTH - RIGHT
    parts = []
    for value, text in zip(*log_ticks(low, high), strict=True):
        if low <= value <= high:
            parts.append(f'<path d="M{LEFT} {y(value):.1f}H{right}" stroke="{GRID}"/>')
            parts.append(f'<text x="{LEFT - 8}" y="{y(value) + 4:.1f}" text-anchor="end" fill="{INK}">{text}</text>')
    place = -99.0
    for count in sizes:
        parts.append(f'<path d="M{x(count):.1f} {TOP}V{floor}" stroke="{GRID}"/>')
        if x(count) - place > 34:
            place = x(count)
            parts.append(f'<text x="{place:.1f}" y="{HEIGHT - 34}" text-anchor="middle" fill="{INK}">{count:,}</text>')
    parts.append(f'<path d="M{LEFT} {TOP}V{floor}H{right}" fill="none" stroke="#999"/>')
    middle = (TOP + floor) / 2
    parts.append(f'<text x="{(LEFT + right) / 2}" y="{HEIGHT - 12}" text-anchor="middle">{along}</text>')
    parts.append(f'<text transform="translate(16 {middle})rotate(-90)" text-anchor="middle">{title}</text>')
    return parts


def _line(slot: int, line: Line, x: Any, y: Any) -> list[str]:
    look = style(slot)
    parts, piece = [], []
    for i in range(len(line.sizes) + 1):
        if i < len(line.sizes) and line.values[i] is not None:
            piece.append(i)
            continue
        if len(piece) > 1:
            top = [f"{x(line.sizes[j]):.1f},{y(line.high[j]):.1f}" for j in piece]
            bottom = [f"{x(line.sizes[j]):.1f},{y(line.low[j]):.1f}" for j in reversed(piece)]
            middle = " ".join(f"{x(line.sizes[j]):.1f},{y(line.values[j]):.1f}" for j in piece)
            parts.append(f'<polygon points="{" ".join(top + bottom)}" fill="{look["color"]}" fill-opacity="0.16"/>')
            parts.append(
                f'<polyline points="{middle}" fill="none" stroke="{look["color"]}" '
                f'stroke-width="2"{_DASH[look["dash"]]}/>'
            )
        for j in piece:
            value = line.values[j] or 0.0
            times = ", ".join(word for word in (duration(value), other_time(line.series.rows[j])) if word)
            place = at_size(line.series.rows[j])
            parts.append(
                f'<circle cx="{x(line.sizes[j]):.1f}" cy="{y(value):.1f}" r="3.2" fill="{look["color"]}">'
                f"<title>{html.escape(line.series.label)}, {place}: {html.escape(times)}</title>"
                "</circle>"
            )
        piece = []
    return parts


def _legend(slot: int, line: Line) -> list[str]:
    look, left, top = style(slot), WIDTH - RIGHT + 18, TOP + 8 + 18 * slot
    return [
        f'<path d="M{left} {top}h26" stroke="{look["color"]}" stroke-width="2"{_DASH[look["dash"]]}/>',
        f'<text x="{left + 34}" y="{top + 4}" fill="{INK}">{html.escape(line.series.label)}</text>',
    ]


def frozen_page(
    frame: pd.DataFrame,
    *,
    code: str,
    command: str,
    baseline: str | Mapping[str, Any] | None = None,
    axes: Sequence[str] | None = None,
    notes: Sequence[str] = (),
    whole: bool = True,
    figure: bool = True,
    more: str = "",
) -> str:
    """Everything that is shown, as HTML without scripts: figure, speed-up, table, and what repeats it.

    Args:
        code, command: the code cell and the shell line that give these results again.
        notes: sentences to show under the title.
        whole: a page of its own; else a fragment to put into a panel.
        figure: whether the latency figure is drawn.
        more: HTML to put below the table, already escaped.
    """
    shared = html.escape(context(frame))
    lines = "".join(f'<p style="margin:2px 0;color:{MUTED}">{html.escape(note)}</p>' for note in notes)
    pre = 'style="background:#f6f6f6;padding:8px 10px;font-size:12px;white-space:pre-wrap;overflow-wrap:anywhere"'
    drawn = latency_svg(frame, axes=axes) if figure else ""
    body = (
        f'<p style="margin:2px 0;color:{MUTED}">{shared}</p>{lines}{drawn}'
        f"{speedup_table(frame, baseline, axes=axes)}{results_table(frame, axes=axes)}{more}"
        f"<pre {pre}>{html.escape(code)}</pre><pre {pre}>{html.escape(command)}</pre>"
    )
    if not whole:
        return f'<div style="overflow-x:auto;line-height:1.35">{body}</div>'
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>MoE workbench, frozen results</title>'
        f'</head><body style="font-family:{FONT};color:{INK};max-width:1100px;margin:24px auto;padding:0 16px">'
        f'<h1 style="font-size:20px">Frozen results</h1>{body}</body></html>\n'
    )
