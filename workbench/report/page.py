"""Results as one HTML page that opens offline: figures where plotly is installed, tables always; all text escaped."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from importlib.util import find_spec
from typing import Any

from workbench.errors import InvalidInput
from workbench.modes import Subject
from workbench.plots.select import Timing
from workbench.report.compare import describe
from workbench.report.table import FROM_IDLE, IDLE_WORDS, Table, environments, failures, heading, name_of, results_table
from workbench.sweeps.results import Results

MOST_PROFILES = 4
STEP_TIMES: tuple[tuple[str, Timing], ...] = (("decode step", "decode"), ("prefill", "prefill"))
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #222; background: #fff; margin: 2rem auto; max-width: 84rem;
  padding: 0 1rem; }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2rem } code { background: #f4f4f4; padding: .1em .3em;
  overflow-wrap: anywhere }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .85rem }
th, td { padding: .2rem .45rem; border-bottom: 1px solid #e6e6e6; text-align: left; vertical-align: top }
th { position: sticky; top: 0; background: #fff } .n { text-align: right; white-space: nowrap }
.scroll { overflow-x: auto } .bad { color: #a33000 } li { margin: .2rem 0 }
"""


def page(results: Results, *, baseline: Mapping[str, Any] | None = None, title: str = "", figures: bool = True) -> str:
    """A self-contained page: nothing is fetched when it is opened.

    Args:
        results: what to show.
        baseline: mode axes and values that speed-ups are against; default the plainest set of modes measured.
        title: heading; default names what was run.
        figures: whether to draw them (plotly's library, 5 MB, is then inside the page once).
    """
    table = results_table(results, baseline)
    name = escape(title or heading(results))
    facts = [f"Environment: {escape(line)}" for line in environments(results)]
    facts += [f"Command: <code>{escape(results.command)}</code>"] if results.command else []
    if table.shared:
        facts.append("All rows: " + escape(", ".join(f"{key} {value}" for key, value in table.shared.items())))
    facts.append(f"Result: <b>{escape(results.totals())}</b>")
    if table.baseline:
        facts.append(f"Speed-up against {escape(describe(table.baseline))}; a tie where the bands p10 to p90 overlap.")
    facts += [f"{FROM_IDLE.capitalize()}: {IDLE_WORDS}."] if FROM_IDLE in table.header else []
    facts += [escape(note) for note in results.notes]
    body = [f"<h1>{name}</h1>", "<ul>", *(f"<li>{fact}</li>" for fact in facts), "</ul>"]
    body += _figures(results, table) if figures else []
    body += _profiles(results) if figures else []
    body += ["<h2>Points</h2>", _table(table)]
    missed = failures(results)
    if missed:
        body += ["<h2>Not measured, and why</h2>", "<ul>"]
        for status, reason, names in missed:
            points = "".join(f"<li>{escape(point)}</li>" for point in names)
            body.append(
                f'<li><b class="bad">{escape(status)}</b>: {escape(reason)}'
                f"<details><summary>{len(names)} points</summary><ul>{points}</ul></details></li>"
            )
        body.append("</ul>")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{name}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n" + "\n".join(body) + "\n</body>\n</html>\n"
    )


def _table(table: Table) -> str:
    def cells(row: tuple[str, ...], tag: str) -> str:
        marks = (' class="n"' if at in table.numbers else "" for at in range(len(row)))
        return "".join(f"<{tag}{mark}>{escape(cell)}</{tag}>" for mark, cell in zip(marks, row, strict=True))

    rows = "\n".join(f"<tr>{cells(row, 'td')}</tr>" for row in table.rows)
    head = f"<thead><tr>{cells(table.header, 'th')}</tr></thead>"
    return f'<div class="scroll"><table>{head}\n<tbody>\n{rows}\n</tbody></table></div>'


def _profiles(results: Results) -> list[str]:
    """Where the time of the steps goes that were profiled, the first few of them."""
    from workbench.plots.profile import PHASES, profile_svg

    held = [record for record in results.points if record.profile]
    parts = []
    for record in held[:MOST_PROFILES]:
        parts.append(f"<h2>Where the time goes: {escape(name_of(record))}</h2>")
        for phase in PHASES:
            if any(row.phase == phase for row in record.profile):
                parts += [f"<p>{phase}</p>", profile_svg(record, phase)]
    if len(held) > MOST_PROFILES:
        parts.append(f"<p>{len(held) - MOST_PROFILES} more profiles are in the records.</p>")
    return parts


def _figures(results: Results, table: Table) -> list[str]:
    if find_spec("plotly") is None:
        return ["<p>No figures: plotly is not installed (pip install 'moe-workbench[lab]').</p>"]
    if not any(record.status.measured for record in results.points):
        return []
    from workbench.plots import correctness_figure, has_wall, latency_figure, speedup_figure, subjects, timed

    frame = results.frame()
    found = subjects(frame)
    made: dict[str, Any] = {}
    parts: list[str] = []
    for subject in found:
        own = frame[frame["subject"] == subject]
        of = f" of {'steps' if subject == Subject.STEP else 'layers'}" if len(found) > 1 else ""
        if subject == Subject.STEP:
            times = {
                f", {word}": timed(own, timing) for word, timing in STEP_TIMES if own[f"{timing}_us"].notna().any()
            }
        else:
            times = {"": own} | ({", host launches included": timed(own, "wall")} if has_wall(own) else {})
        made |= {f"Latency{of}{time}": latency_figure(shown) for time, shown in times.items()}
        made[f"Error against budget{of}"] = correctness_figure(own)
        if table.baseline:
            name = f"Speed-up{of} against {describe(table.baseline)}"
            try:
                made |= {f"{name}{time}": speedup_figure(shown, table.baseline) for time, shown in times.items()}
            except InvalidInput:  # a matrix has one baseline for all rows, the table may have one for each
                parts.append(f"<h2>{escape(name)}</h2><p>Rows have different baselines: see the table.</p>")
    for at, (name, figure) in enumerate(made.items()):
        parts.append(f"<h2>{escape(name)}</h2>")
        parts.append(figure.to_html(full_html=False, include_plotlyjs=at == 0, div_id=f"figure-{at}"))
    return parts
