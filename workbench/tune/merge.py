"""Putting a new row beside those that a folder has: a row is replaced by a faster one alone. No torch here."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from moe_kernels.tuning.names import Problem
from moe_kernels.tuning.rows import Row

from workbench.tune.files import read_rows, write_rows
from workbench.tune.search import Timed


class Merged(NamedTuple):
    """What became of a row: the files that were written, none where the old row stays, and sentences to show."""

    paths: list[Path]
    notes: list[str]


def plain(row: Row) -> Row:
    """A row of a `_modes` file as `config=` takes it, without what was noted beside it."""
    return {"up": row["up"], "down": row["down"], "PDL": row.get("PDL", False)}


def merge_row(folder: Path, problem: Problem, device_name: str, shared_bytes: int, best: Timed) -> Merged:
    """Keep the fastest row of a token count; those of other counts stay as they are.

    `best` is what won when the old row was timed beside the others: where it is the old row, nothing is written. The
    file is read again here, since another run may have written to it meanwhile.

    Raises:
        InvalidInput: the folder cannot be read or written.
    """
    rows, faults = read_rows(folder, problem, device_name, shared_bytes)
    notes = [f"Left out from now on: {fault}" for fault in faults]
    old = rows.get(problem.num_tokens)
    if old is not None and plain(old) == best.config:
        return Merged([], notes)
    measured = {"hidden_size": problem.hidden_size, "top_k": problem.top_k, "us": round(best.us, 2)}
    rows[problem.num_tokens] = {**best.config, **measured}
    return Merged(write_rows(folder, problem, device_name, rows), notes)
