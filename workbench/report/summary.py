"""Results as Markdown, ready to paste into a pull request. Every string of a record is escaped."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from workbench.report.compare import describe
from workbench.report.table import FROM_IDLE, IDLE_WORDS, environments, failures, heading, results_table
from workbench.sweeps.results import Results

MOST_ROWS = 40  # more are folded away, so that a pull request stays readable
MOST_NAMES = 8
# An underscore between letters or digits marks nothing up, and a name stays legible in the source without a backslash.
_MARKUP = re.compile(r"([\\`*{}\[\]|~#!]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9]))")


def escape(text: str) -> str:
    """Text that shows as it is: no markup, no mention of people, no line break."""
    plain = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _MARKUP.sub(r"\\\1", plain).replace("@", "&#64;").replace("://", "&#58;//")


def code(text: str) -> str:
    """Text as code: fenced by one more backtick than it holds in a row; a line break becomes a space."""
    flat = " ".join(text.split())
    ticks = "`" * (max((len(run) for run in re.findall("`+", flat)), default=0) + 1)
    pad = " " if flat.startswith("`") or flat.endswith("`") else ""
    return f"{ticks}{pad}{flat}{pad}{ticks}"


def summary(results: Results, *, baseline: Mapping[str, Any] | None = None, title: str = "") -> str:
    """A heading, where and how it was run, the table, what failed and why.

    Args:
        results: anchor repeats are left out of the table.
        baseline: mode axes and values that speed-ups are against; default the plainest set of modes measured.
        title: heading; default names what was run.
    """
    table = results_table(results, baseline)
    lines = [f"### {escape(title or heading(results))}", ""]
    lines += [f"- environment: {escape(line)}" for line in environments(results)]
    lines += [f"- command: {code(results.command)}"] if results.command else []
    if table.shared:
        lines.append("- all rows: " + ", ".join(f"{name} {escape(value)}" for name, value in table.shared.items()))
    lines.append(f"- result: {results.totals()}")
    if table.baseline:
        lines.append(f"- speed-up against {escape(describe(table.baseline))}; a tie where the bands p10 to p90 overlap")
    lines += [f"- {FROM_IDLE}: {IDLE_WORDS}"] if FROM_IDLE in table.header else []
    lines += [f"- {escape(note)}" for note in results.notes]
    rows = [_line(row) for row in table.rows]
    if rows:
        rule = "|" + "|".join("---:" if at in table.numbers else "---" for at in range(len(table.header))) + "|"
        head = [_line(table.header), rule]
        lines += ["", *head, *rows[:MOST_ROWS]]
        if len(rows) > MOST_ROWS:
            lines += ["", *_fold(f"{len(rows) - MOST_ROWS} more rows", [*head, *rows[MOST_ROWS:]])]
    missed = failures(results)
    if missed:
        said = []
        for status, reason, names in missed:
            more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
            points = "; ".join(escape(name) for name in names[:MOST_NAMES])
            said.append(f"- **{escape(status)}**, {len(names)}: {escape(reason)}<br>{points}{more}")
        lines += ["", *_fold(f"Not measured: {sum(len(names) for _, _, names in missed)} points, and why", said)]
    return "\n".join(lines) + "\n"


def _line(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(escape(cell) for cell in cells) + " |"


def _fold(head: str, lines: list[str]) -> list[str]:
    return ["<details>", f"<summary>{escape(head)}</summary>", "", *lines, "", "</details>"]
