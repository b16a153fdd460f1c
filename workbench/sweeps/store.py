"""The results folder: records.jsonl, to which one line is added and forced to disk for every point, and sweep.json."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from workbench.errors import InvalidInput, sentence
from workbench.record import RECORD_VERSION, Record
from workbench.sweeps.spec import SweepSpec

RECORDS = "records.jsonl"
BROKEN = "records.broken.jsonl"
SWEEP = "sweep.json"
MAX_LINE = 64 * 2**20


class StoreError(OSError):
    """The folder cannot be written; `str(error)` is one sentence. What was written before is still there."""


def reason_of(error: OSError) -> str:
    """The system's own words for an error: `No space left on device`."""
    return error.strerror or str(error)


@contextmanager
def no_collection() -> Iterator[None]:
    """Pause the collector of cycles while thousands of records are made, none of which is in a cycle: twice as fast."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def parse_record(text: str) -> Record:
    """Read one record of strict JSON. Raises `InvalidInput` with one sentence; NaN and infinity are refused."""
    if len(text) > MAX_LINE:
        raise InvalidInput(f"record: must be at most {MAX_LINE >> 20} MiB, not {len(text) >> 20} MiB")
    try:
        record = Record.model_validate_json(text)
        if record.extra:  # the one field of any content; an infinite number in it could not be written again
            json.dumps(record.extra, allow_nan=False)
    except ValidationError as error:
        raise InvalidInput(_sentence(error)) from None
    except ValueError:
        raise InvalidInput("extra: numbers must be finite") from None
    return record


def _sentence(error: ValidationError) -> str:
    found = error.errors(include_url=False)
    if found[0]["type"] == "json_invalid":
        return f"not valid JSON ({found[0]['ctx']['error']})"
    version = next((item for item in found if item["loc"] == ("version",)), None)
    if version is not None:  # alone: the other fields of an unknown version mean nothing
        return f"version: must be {RECORD_VERSION}, not {repr(version['input'])[:60]}"
    return sentence(error)


@dataclass(frozen=True, slots=True)
class Lines:
    """What a records file holds: records, the bytes of a broken last line, and how many bytes before it are good."""

    records: tuple[Record, ...]
    broken: bytes = b""
    good_bytes: int = 0
    ends_with_newline: bool = True


@no_collection()
def read_lines(path: Path) -> Lines:
    """Read a records file. A broken last line (a process killed while writing) is set aside, any other is an error.

    Raises:
        InvalidInput: cannot be read, or a line before the last is no record; the sentence holds its number.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InvalidInput(f"{path}: cannot be read ({reason_of(error)})") from None
    records: list[Record] = []
    lines = content.split(b"\n")
    whole = not lines[-1]  # the file ends with a newline
    if whole:
        lines.pop()
    good = 0
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                records.append(parse_record(line.decode("utf-8")))
            except (InvalidInput, UnicodeDecodeError) as error:
                if number == len(lines) and _cut_short(line, whole):
                    return Lines(tuple(records), line, good)
                what = error if isinstance(error, InvalidInput) else "not UTF-8 text"
                raise InvalidInput(f"{path.name}, line {number}: {what}") from None
        good += len(line) + 1
    return Lines(tuple(records), b"", min(good, len(content)), whole or not lines)


def _cut_short(line: bytes, whole: bool) -> bool:
    """Whether a last line was cut off, rather than whole and of another kind (another version, say)."""
    try:
        return not isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return True


def latest(records: Iterable[Record]) -> tuple[Record, ...]:
    """Leave out what a later try in the same environment replaced: records whose status is not final."""
    kept = list(records)
    last = {(r.key, r.environment.fingerprint): i for i, r in enumerate(kept) if not r.anchor}
    return tuple(
        r for i, r in enumerate(kept) if r.anchor or r.status.final or last[r.key, r.environment.fingerprint] == i
    )


class Store:
    """A results folder that is being written. One process at a time: a lock on the records file holds others off."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file: int | None = None

    @property
    def path(self) -> Path:
        """The records file."""
        return self.folder / RECORDS

    def create(self, sweep: SweepSpec) -> None:
        """Make the folder, write sweep.json and open an empty records file. Raises `StoreError`."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / SWEEP).write_text(sweep.to_json(indent=1) + "\n", encoding="utf-8")
            self._open(os.O_CREAT | os.O_EXCL)
            _sync_folder(self.folder)
        except OSError as error:
            raise StoreError(
                f"out: {self.folder} cannot be written ({reason_of(error)}); give another folder"
            ) from None

    def reopen(self) -> tuple[tuple[Record, ...], tuple[str, ...]]:
        """Open the records of an earlier run to add to them: the records, and sentences on what was set aside.

        Raises:
            InvalidInput: a line before the last is broken, or another process writes here.
            StoreError: cannot be written.
        """
        try:
            self._open(os.O_CREAT)
            lines = read_lines(self.path)
            notes: tuple[str, ...] = ()
            assert self._file is not None
            if lines.broken:
                with (self.folder / BROKEN).open("ab") as aside:
                    aside.write(lines.broken + b"\n")
                    aside.flush()
                    os.fsync(aside.fileno())
                os.ftruncate(self._file, lines.good_bytes)
                notes = (f"The last line of {RECORDS} was broken and is kept in {BROKEN}.",)
            elif not lines.ends_with_newline:
                self._write(b"\n")
        except StoreError:
            raise
        except OSError as error:
            raise StoreError(
                f"out: {self.folder} cannot be written ({reason_of(error)}); give another folder"
            ) from None
        return latest(lines.records), notes

    def append(self, record: Record) -> None:
        """Add one line and force it to disk; one that does not fit leaves no part behind. Raises `StoreError`."""
        if self._file is None:
            raise StoreError(f"out: {self.folder} is not open")
        try:
            self._write(record.to_json().encode() + b"\n")
        except OSError as error:
            raise StoreError(f"out: {self.path} cannot be written ({reason_of(error)})") from None

    def close(self) -> None:
        """Close the file and let go of the lock; more than once does no harm."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _open(self, flags: int) -> None:
        self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | flags, 0o666)
        try:
            import fcntl
        except ImportError:  # Windows has no such lock
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise InvalidInput(f"out: {self.folder} is being written by another sweep; give another name") from None

    def _write(self, data: bytes) -> None:
        assert self._file is not None
        size = os.fstat(self._file).st_size
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(self._file, view) :]
            os.fsync(self._file)
        except OSError:
            os.ftruncate(self._file, size)
            raise


def _sync_folder(folder: Path) -> None:
    if os.name == "nt":  # folders cannot be synced there
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def free_folder(wanted: Path) -> Path:
    """`wanted` where nothing is there yet (or an empty folder), else the first free of `wanted-2`, `wanted-3`, ..."""
    number = 1
    while True:
        folder = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        if not os.path.lexists(folder) or (folder.is_dir() and not any(folder.iterdir())):
            return folder
        number += 1
