"""Read results again: a folder, JSON lines, Parquet, or a glob of them. Nothing that is read is executed."""

from __future__ import annotations

from glob import glob, has_magic
from pathlib import Path

from workbench.errors import InvalidInput
from workbench.record import Record
from workbench.sweeps.anchor import drift_note
from workbench.sweeps.exports import RECORD_COLUMN
from workbench.sweeps.results import Results
from workbench.sweeps.spec import SweepSpec
from workbench.sweeps.store import RECORDS, SWEEP, latest, no_collection, parse_record, read_lines

KINDS = "a results folder, a .jsonl or a .parquet file"
RECORDINGS = Path(__file__).parent.parent / "recorded"


def _folder(path: Path) -> Results:
    file = path / RECORDS
    if not file.is_file():
        other = path / "records.parquet"
        if other.is_file():
            return _parquet(other)
        raise InvalidInput(f"path: {path} holds no {RECORDS}; must be {KINDS}")
    found = _jsonl(file)
    command = ""
    if (path / SWEEP).is_file():
        try:
            command = SweepSpec.from_file(path / SWEEP).command
        except InvalidInput as error:
            found = found + Results((), (f"The sweep's description was left out: {error}.",))
    records = latest(found.records)
    drift = drift_note(records)
    return Results(records, (*found.notes, *((drift,) if drift else ())), path, command=command)


def _jsonl(path: Path) -> Results:
    lines = read_lines(path)
    notes = (f"The last line of {path} is broken and was left out.",) if lines.broken else ()
    return Results(lines.records, notes)


@no_collection()
def _parquet(path: Path) -> Results:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            if RECORD_COLUMN not in file.schema_arrow.names:
                raise InvalidInput(f"path: {path} has no column {RECORD_COLUMN}: it was written by another tool")
            texts = file.read(columns=[RECORD_COLUMN])[RECORD_COLUMN].to_pylist()
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        what = str(error).splitlines()[0]
        raise InvalidInput(f"path: {path} cannot be read as Parquet ({what})") from None
    records: list[Record] = []
    for number, text in enumerate(texts, 1):
        if not isinstance(text, str):
            raise InvalidInput(f"{path.name}, row {number}: {RECORD_COLUMN} must be text, not {type(text).__name__}")
        try:
            records.append(parse_record(text))
        except InvalidInput as error:
            raise InvalidInput(f"{path.name}, row {number}: {error}") from None
    return Results(tuple(records))


def _kind(path: Path) -> str:
    """What a file is by its first bytes, whatever its name: parquet, jsonl, sweep, or empty for anything else."""
    try:
        with path.open("rb") as file:
            head = file.read(4096)
    except OSError as error:
        raise InvalidInput(f"path: {path} cannot be read ({error.strerror or error})") from None
    if head.startswith(b"PAR1"):
        return "parquet"
    text = head.lstrip()
    if path.name == SWEEP or (text.startswith(b"{") and path.suffix == ".json" and b'"axes"' in text):
        return "sweep"
    if text.startswith(b"{") or (not text and path.suffix == ".jsonl"):
        return "jsonl"
    return ""


def _file(path: Path) -> Results:
    kind = _kind(path)
    if kind == "parquet":
        return _parquet(path)
    if kind == "jsonl":
        return _jsonl(path)
    if kind == "sweep":
        raise InvalidInput(f"path: {path} describes a sweep and holds no results; must be {KINDS}")
    if path.suffix in (".csv", ".md", ".html"):
        raise InvalidInput(f"path: {path} is an export for people; must be {KINDS}")
    raise InvalidInput(f"path: {path} is no file of results; must be {KINDS}")


def load(path: str | Path) -> Results:
    """Read stored results.

    Args:
        path: a results folder, a `.jsonl` or `.parquet` file, or a glob of them. Files that a glob meets and that hold
            no results are left out and said; equal records found in two files are kept once.

    Raises:
        InvalidInput: nothing there, another kind of file, another version, a broken record; the sentence says which.
    """
    if not isinstance(path, str | Path):
        raise InvalidInput(f"path: must be {KINDS}, or a glob of them, not {type(path).__name__}")
    given = Path(path)
    if given.is_dir():
        return _folder(given)
    if given.exists():
        return _file(given)
    if not has_magic(str(path)):
        raise InvalidInput(f"path: {path} does not exist; must be {KINDS}")
    found = [Path(name) for name in sorted(glob(str(path), recursive=True))]
    if not found:
        raise InvalidInput(f"path: nothing matches {path}; must be {KINDS}")
    parts: list[Results] = []
    notes: list[str] = []
    for item in found:
        if item.is_dir():
            holds = any((item / name).is_file() for name in (RECORDS, "records.parquet"))
        else:
            holds = _kind(item) in ("parquet", "jsonl")
        if holds:
            parts.append(_folder(item) if item.is_dir() else _file(item))
        else:
            notes.append(f"{item} holds no results and was left out.")
    if not parts:
        raise InvalidInput(f"path: nothing that matches {path} holds results; must be {KINDS}")
    if len(parts) == 1:
        kept = parts[0].records
    else:  # a folder and its own parquet, say
        kept = tuple({record.to_json(): record for part in parts for record in part.records}.values())
    folder = parts[0].folder if len(parts) == 1 else None
    return Results(kept, (*(note for part in parts for note in part.notes), *notes), folder)


def recording(name: str) -> Results:
    """One recorded sweep that comes with the package, by name; where it does not, nothing and a note that says so."""
    path = RECORDINGS / f"{name}.parquet"
    return _parquet(path) if path.is_file() else Results((), (f"{name} is not among the recorded sweeps.",))


def recordings() -> Results:
    """The recorded sweeps that come with the package; empty where none does."""
    total = Results()
    for path in sorted(RECORDINGS.glob("*.parquet")):
        total = total + _parquet(path)
    return total
