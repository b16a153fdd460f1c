"""Keeps every record of a sweep in memory and, where a folder was given, on disk; a full disk never loses one."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path

from workbench.errors import InvalidInput
from workbench.record import Record
from workbench.sweeps.results import Results
from workbench.sweeps.spec import SweepSpec
from workbench.sweeps.store import RECORDS, SWEEP, Store, StoreError, free_folder, latest, reason_of

EXPORTS = {"parquet": "records.parquet", "md": "summary.md", "html": "report.html"}


class Keeper:
    """Where a sweep's records go. `notes` says where that differs from what was asked."""

    def __init__(self, sweep: SweepSpec, out: Path | None, *, resume: bool) -> None:
        """Open `out` for writing.

        Raises:
            InvalidInput: the folder cannot be written, holds another sweep, or is being written by another process.
        """
        self.sweep = sweep
        self.notes: list[str] = []
        self.records: list[Record] = []
        self._store: Store | None = None
        if out is None:
            if resume:
                raise InvalidInput("out: must be the folder of the sweep to resume, not None")
            return
        try:
            self._store = self._reopen(out) if resume and (out / RECORDS).is_file() else self._create(out, resume)
        except StoreError as error:
            raise InvalidInput(str(error)) from None

    @property
    def folder(self) -> Path | None:
        """Where records are written now; None where they are only in memory."""
        return self._store.folder if self._store else None

    def _create(self, out: Path, resume: bool) -> Store:
        if resume:
            self.notes.append(f"There was nothing to resume in {out}; the sweep starts anew.")
        try:
            folder = free_folder(out)
        except OSError as error:
            raise StoreError(f"out: {out} cannot be used ({reason_of(error)}); give another folder") from None
        if folder != out:
            self.notes.append(f"{out} exists and is left as it is; this sweep is in {folder}.")
        store = Store(folder)
        store.create(self.sweep)
        return store

    def _reopen(self, out: Path) -> Store:
        if (out / SWEEP).is_file():
            earlier = SweepSpec.from_file(out / SWEEP)
            if (earlier.axes, earlier.base) != (self.sweep.axes, self.sweep.base):
                raise InvalidInput(f"resume: {out} holds another sweep ({earlier.command}); give another name")
        store = Store(out)
        try:
            kept, notes = store.reopen()
        except BaseException:
            store.close()
            raise
        self.records += kept
        self.notes += notes
        return store

    def add(self, record: Record) -> None:
        """Keep a record; on disk before this returns. A disk that refuses is said in `notes`, once."""
        text = record.to_json()
        if not text.isascii() and text != (plain := text.encode("utf-8", "replace").decode()):
            record = Record.from_json(plain)  # a lone surrogate, from a file's name say, could not be written
        self.records.append(record)
        if self._store is None:
            return
        try:
            self._store.append(record)
        except StoreError as error:
            self._fall_back(error)

    def _fall_back(self, error: StoreError) -> None:
        if self._store is not None:
            self._store.close()
        try:
            spare = Store(Path(tempfile.mkdtemp(prefix=f"workbench-{self.sweep.name}-")))
            spare.create(self.sweep)
            self._store = spare
            for record in self.records:
                spare.append(record)
        except OSError:
            self._store = None
            self.notes.append(f"{error}; the records are kept in memory only: save them with results.to_jsonl(PATH).")
            return
        self.notes.append(f"{error}; all records of this sweep are kept in {spare.folder}.")

    def close(self) -> None:
        """Close the files."""
        if self._store is not None:
            self._store.close()

    def results(self, *, interrupted: bool = False) -> Results:
        """What has been kept, each point once: a later answer replaces one that was cancelled or crashed."""
        return Results(
            latest(self.records), tuple(self.notes), self.folder, interrupted=interrupted, command=self.sweep.command
        )

    def export(self, kinds: Collection[str] = tuple(EXPORTS)) -> list[Path]:
        """Write the exports beside the records; one that cannot be written is said in `notes` and stops no other."""
        if self.folder is None:
            return []
        results = self.results()
        return write_exports(results, self.folder, kinds, self.notes)


def write_exports(results: Results, folder: Path, kinds: Collection[str], notes: list[str]) -> list[Path]:
    """Write `results` into `folder` in these formats; failures become sentences in `notes`."""
    written = []
    for kind in kinds:
        try:
            written.append(results.write(folder / EXPORTS[kind], kind))
        except Exception as error:  # the records are safe; what fails here must not end the sweep
            notes.append(f"{EXPORTS[kind]} was not written: {type(error).__name__}: {error}")
    return written


def final_keys(records: Sequence[Record], fingerprint: str) -> set[str]:
    """Keys of the points that a resumed sweep leaves alone: final, and run in an equal environment."""
    return {
        record.key
        for record in records
        if record.status.final and not record.anchor and record.environment.fingerprint == fingerprint
    }
