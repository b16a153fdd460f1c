"""What the commands print: tables, and a progress bar on a terminal or plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from workbench.report.compare import describe
from workbench.report.table import FROM_IDLE, IDLE_WORDS, environments, failures, results_table
from workbench.sweeps.planner import duration
from workbench.sweeps.results import Results
from workbench.sweeps.runner import SweepProgress


def console(*, error: bool = False) -> Console:
    """A console for the stream as it is now; off a terminal, lines are as long as they need to be."""
    stream = sys.stderr if error else sys.stdout
    made = Console(file=stream, highlight=False, soft_wrap=True)
    return made if made.is_terminal else Console(file=stream, highlight=False, soft_wrap=True, width=200)


def say(text: str, *, error: bool = False) -> None:
    """One line, no markup read from it."""
    console(error=error).print(Text(clean(text)))


def clean(text: str) -> str:
    """Text without control characters, which a file from elsewhere could use to drive the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)


def print_table(header: Sequence[str], rows: Iterable[Sequence[str]], numbers: Iterable[int] = ()) -> None:
    """A table; `numbers` are the columns to align right."""
    right = set(numbers)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for at, name in enumerate(header):
        table.add_column(Text(clean(name)), justify="right" if at in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(clean(cell)) for cell in row))
    console().print(table)


def print_results(results: Results, baseline: dict[str, object] | None = None) -> None:
    """The table of results, what was not measured and why, and the totals."""
    table = results_table(results, baseline)
    if table.rows:
        print_table(table.header, table.rows, table.numbers)
    for status, reason, names in failures(results):
        count = f"{len(names)} points" if len(names) > 1 else names[0]
        say(f"{status}: {count}: {reason}")
    if table.shared:
        say("All rows: " + ", ".join(f"{name} {value}" for name, value in table.shared.items()) + ".")
    for line in environments(results):
        say(f"Environment: {line}.")
    if table.baseline:
        say(f"Speed-up against {describe(table.baseline)}; a tie where the bands p10 to p90 overlap.")
    if FROM_IDLE in table.header:
        say(f"{FROM_IDLE.capitalize()}: {IDLE_WORDS}.")
    for note in results.notes:
        say(note)
    say(results.totals())


class Progressing:
    """Shows a sweep's progress on standard error: a bar on a terminal, a line for every point elsewhere."""

    def __init__(self) -> None:
        self._console = console(error=True)
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
            left = TextColumn("{task.fields[left]} left")
            self._bar = Progress(*columns, left, console=self._console, transient=True)
            self._bar.start()
            self._task = self._bar.add_task("starting", total=None, left="?")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, progress: SweepProgress) -> None:
        """Take in where the sweep stands."""
        left = duration(progress.remaining_s)
        text = clean(" ".join(progress.text.split()))
        if self._bar is not None and self._task is not None:
            described = f"{progress.state}: {text}"[:70]
            self._bar.update(
                self._task, description=described, completed=progress.done, total=progress.total, left=left
            )
        elif progress.record is not None:
            say(f"[{progress.done}/{progress.total}] {text} ({left} left)", error=True)
