"""`Results`: records with the sentences said about them; a table, filters and exports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from workbench.errors import InvalidInput, choices
from workbench.record import Record, Status
from workbench.spec import FIELDS
from workbench.sweeps.frame import COLUMNS, build_frame

if TYPE_CHECKING:
    import pandas as pd

# Format -> its writer, by name: pages and tables are made by a storey above, which this one does not import.
WRITERS = {
    "jsonl": "workbench.sweeps.exports:jsonl",
    "parquet": "workbench.sweeps.exports:parquet",
    "csv": "workbench.sweeps.exports:csv_text",
    "md": "workbench.report.summary:summary",
    "html": "workbench.report.page:page",
    "one_batch": "workbench.report.one_batch:one_batch_jsonl",
}


def writer(kind: str) -> Callable[..., Any]:
    """The function that turns `Results` into text or bytes of that format. Raises `InvalidInput`."""
    if kind not in WRITERS:
        raise InvalidInput(f"format: must be {choices(WRITERS)}, not {kind!r}")
    found: Callable[..., Any] = resolve_name(WRITERS[kind])
    return found


@dataclass(frozen=True)
class Results:
    """Records and what was said about them.

    Attributes:
        records: in the order in which they were made; anchor repeats carry `anchor=True`.
        notes: sentences: what was set aside, drift, where files could not be written.
        folder: where they are stored; None in memory.
        interrupted: whether the sweep was stopped before its end.
        command: the shell line that makes them again; empty where unknown.
    """

    records: tuple[Record, ...] = ()
    notes: tuple[str, ...] = ()
    folder: Path | None = None
    interrupted: bool = False
    command: str = ""
    _cache: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Any:
        return iter(self.records)

    def __bool__(self) -> bool:
        return True

    def __add__(self, other: object) -> Results:
        """Records of both, notes of both once each."""
        if not isinstance(other, Results):
            return NotImplemented
        return Results(
            self.records + other.records,
            tuple(dict.fromkeys(self.notes + other.notes)),
            interrupted=self.interrupted or other.interrupted,
            command=self.command if self.command == other.command else "",
        )

    def __repr__(self) -> str:
        return f"<Results: {self.totals()}>"

    @property
    def points(self) -> tuple[Record, ...]:
        """The records without the anchor's repeats."""
        return tuple(record for record in self.records if not record.anchor)

    @cached_property
    def _frame(self) -> pd.DataFrame:
        return build_frame(self.records)

    def frame(self) -> pd.DataFrame:
        """The flat table, one row a record, built once; do not write to it (`to_pandas` gives a copy)."""
        return self._frame

    def to_pandas(self) -> pd.DataFrame:
        """A copy of the flat table."""
        return self._frame.copy()

    def filter(self, **wanted: Any) -> Results:
        """Records whose columns have these values: `results.filter(quant="bf16", num_tokens=[1, 16])`.

        Raises:
            InvalidInput: no such column.
        """
        import pandas as pd

        frame = self._frame
        keep = pd.Series(True, index=frame.index)
        for name, value in wanted.items():
            if name not in FIELDS and name not in COLUMNS:
                raise InvalidInput(f"{name}: no such column; there are {choices((*FIELDS, *COLUMNS))}")
            allowed = value if isinstance(value, Collection) and not isinstance(value, str | bytes) else (value,)
            some = [str(v) if isinstance(v, str) else v for v in allowed if v is not None]
            match = frame[name].isin(some) if some else pd.Series(False, index=frame.index)
            keep &= match | frame[name].isna() if None in allowed else match
        records = tuple(self.records[i] for i in keep.to_numpy().nonzero()[0])
        kept = Results(records, self.notes, self.folder, self.interrupted, self.command)
        kept.__dict__["_frame"] = frame[keep].reset_index(drop=True)  # the cached property's own slot
        return kept

    def counts(self) -> dict[Status, int]:
        """Number of points of each status that occurs."""
        return dict(Counter(record.status for record in self.points))

    def totals(self) -> str:
        """`n ok, m failed, k unsupported`, and what else there is."""
        counts = self.counts()
        ok, unsupported = counts.pop(Status.OK, 0), counts.pop(Status.UNSUPPORTED, 0)
        others = {s: counts.pop(s, 0) for s in (Status.UNCHECKED, Status.SKIPPED, Status.CANCELLED)}
        text = f"{ok} ok, {sum(counts.values())} failed, {unsupported} unsupported"
        return text + "".join(f", {n} {status}" for status, n in others.items() if n)

    def to_jsonl(self, path: str | Path | None = None) -> str:
        """One record a line, strict JSON; written to `path` where given."""
        return self._text("jsonl", path)

    def to_csv(self, path: str | Path | None = None) -> str:
        """The flat table; missing values are empty, numbers keep every digit."""
        return self._text("csv", path)

    def to_markdown(self, path: str | Path | None = None, **options: Any) -> str:
        """A summary ready to paste into a pull request (`baseline={"compile": "none"}`)."""
        return self._text("md", path, **options)

    def to_html(self, path: str | Path | None = None, **options: Any) -> str:
        """A page that opens offline, with tables and figures."""
        return self._text("html", path, **options)

    def to_parquet(self, path: str | Path, *, samples: bool = True) -> Path:
        """The flat table with each whole record as JSON beside it; `samples=False` leaves single samples out."""
        return self.write(path, "parquet", samples=samples)

    def _text(self, kind: str, path: str | Path | None, **options: Any) -> str:
        text: str = writer(kind)(self, **options)
        if path is not None:
            _replace(Path(path), text.encode("utf-8"))
        return text

    def write(self, path: str | Path, kind: str, **options: Any) -> Path:
        """Export to a file, whole or not at all. Raises `InvalidInput` where it cannot be written."""
        made: str | bytes = writer(kind)(self, **options)
        return _replace(Path(path), made.encode("utf-8") if isinstance(made, str) else made)


def _replace(path: Path, content: bytes) -> Path:
    part = path.with_name(path.name + ".part")
    try:
        part.write_bytes(content)
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True) if part.is_file() else None
        raise InvalidInput(f"out: {path} cannot be written ({error.strerror or error}); give another path") from None
    return path
