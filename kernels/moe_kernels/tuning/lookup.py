"""Which tuned configuration serves a problem, and one sentence on where it came from or why there is none.

The user's folders are read first, then the package's own. In each, a ``_modes`` file comes before a pair of SGLang's
files. A file counts for the device in its name alone; files of the same shape for other devices, files tuned with
another triton and rows that cannot be launched are named. Files are read once and again when they change.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from moe_kernels.tuning import rows
from moe_kernels.tuning.folders import PACKAGED, config_folders
from moe_kernels.tuning.names import (
    FormatWords,
    Part,
    Problem,
    TuningName,
    accepted_words,
    device_word,
    parse_name,
    parse_version_folder,
)

_MOST_NAMED = 3
# The package's rows serve up to so many times their tokens; from so many on, experts are full and tiles change no more.
_FAR, _MANY_TOKENS = 2, 1024
# A file changed less than this ago may change once more within the same tick of its clock.
_SETTLED_NS = 50_000_000


class Found(NamedTuple):
    """A configuration, in the form that ``config=`` takes and not to be changed, or None; and one sentence on it."""

    config: rows.Row | None
    source: str


class _Place(NamedTuple):
    """A folder of files, and the triton version that its name tells; ``""`` for a flat one."""

    folder: Path
    triton: str


class _Choice(NamedTuple):
    """A row that serves."""

    config: rows.Row
    path: Path
    tokens: int
    remarks: tuple[str, ...]


_Stamp = tuple[int, ...] | None


class _Visit:
    """One search: what was passed over, and every file and folder that the answer depends on."""

    def __init__(self) -> None:
        self.passed: list[str] = []
        self.stamps: dict[Path, _Stamp] = {}

    def see(self, path: Path) -> _Stamp:
        stamp = self.stamps[path] = _modified(path)
        return stamp


_answers: dict[tuple[tuple[Path, ...], Problem, str, int], tuple[Found, tuple[tuple[Path, _Stamp], ...]]] = {}


def find_config(problem: Problem, device_name: str, shared_bytes: int) -> Found:
    """Find the tuned configuration for a problem on a device.

    The row of the very token count serves; else that of the next larger count, whose layout is then legal for fewer
    rows too; else that of the largest, of the package's own unless that is far fewer. Rows in the token layout never
    serve more tokens than they were tuned for.

    Args:
        problem: the layer and its number of tokens.
        device_name: as the driver tells it, ``"NVIDIA H200"``.
        shared_bytes: shared memory that one block may take on it; 0 leaves that unchecked.
    """
    folders = config_folders()
    key = (folders, problem, device_name, shared_bytes)
    known = _answers.get(key)
    if known is not None and all(_modified(path) == stamp for path, stamp in known[1]):
        return known[0]
    visit = _Visit()
    found = _search(problem, device_word(device_name), device_name, shared_bytes, folders, visit)
    if len(_answers) >= 4096:
        _answers.clear()
    # What is installed does not change while it runs: only the user's files are looked at again.
    stamps = tuple((path, stamp) for path, stamp in visit.stamps.items() if PACKAGED not in (path, *path.parents))
    _answers[key] = (found, stamps)
    return found


def _search(
    problem: Problem, device: str, device_name: str, shared: int, folders: tuple[Path, ...], visit: _Visit
) -> Found:
    sizes = f"E={problem.num_experts}, D={problem.hidden_size}, F={problem.intermediate_size}, K={problem.top_k}"
    shape = f"{sizes}, {problem.quant}"
    choice = None
    for folder in (*folders, PACKAGED):
        if visit.see(folder) is None and folder != PACKAGED:
            visit.passed.append(f"{folder}: there is no such folder.")
        for place in _places(folder, visit):
            choice = _from_place(place, problem, device, shared, folder == PACKAGED, visit)
            if choice is not None:
                break
        if choice is not None:
            break
    passed = [text.rstrip(".") for text in visit.passed[:_MOST_NAMED]]
    if len(visit.passed) > _MOST_NAMED:
        passed.append(f"and {len(visit.passed) - _MOST_NAMED} more")
    tail = f"; not used: {'; '.join(passed)}." if passed else "."
    if choice is None:
        return Found(None, f"No tuned row for {shape} on {device_name}{tail}")
    nearest = "" if choice.tokens == problem.num_tokens else f", nearest tuned count to {problem.num_tokens}"
    count = "1 token" if choice.tokens == 1 else f"{choice.tokens} tokens"
    remarks = "".join(f", {remark}" for remark in choice.remarks)
    told = f"Tuned on {device_name} for {shape} at {count}{nearest}{remarks}: {_shown(choice.path)}"
    return Found(choice.config, told + tail)


def _from_place(
    place: _Place, problem: Problem, device: str, shared: int, packaged: bool, visit: _Visit
) -> _Choice | None:
    """The row that one folder gives, or None; whatever it passes over is noted."""
    listed = _listing(place.folder, visit.see(place.folder))
    for words in accepted_words(problem.quant, problem.group_size):
        files = listed.get((problem.num_experts, problem.intermediate_size, words), {})
        for other in sorted({name.device for name in files} - {device}):
            paths = [path for name, path in files.items() if name.device == other]
            visit.passed.append(f"{_shown(min(paths))} is for {other}, not for {device}.")
        own = {name.part: path for name, path in files.items() if name.device == device}
        for part in (Part.MODES, Part.UP):
            if part in own:
                choice = _from_file(own[part], own.get(Part.DOWN), part, place, problem, shared, packaged, visit)
                if choice is not None:
                    return choice
    return None


def _from_file(
    path: Path,
    down_path: Path | None,
    part: Part,
    place: _Place,
    problem: Problem,
    shared: int,
    packaged: bool,
    visit: _Visit,
) -> _Choice | None:
    parsed = _parsed(path, visit.see(path))
    tuned_with, running = place.triton or parsed.triton_version, running_triton()
    remarks = []
    if tuned_with and _minor(tuned_with) != _minor(running):
        if not packaged:
            visit.passed.append(f"{path} is stale: tuned with triton {tuned_with}, running {running or 'none'}.")
            return None
        remarks.append(f"tuned with triton {tuned_with}, running {running or 'none'}")
    usable: dict[int, tuple[rows.Row, list[str]]] = {}
    faults = list(parsed.faults)
    if part is Part.MODES:
        for tokens, row in parsed.rows.items():
            fault = rows.config_fault(row, problem, shared)
            if fault:
                faults.append(rows.sentence(path, "", tokens, fault))
            else:
                usable[tokens] = (row, [])
    else:
        below = rows.Parsed({})
        if down_path is not None:
            below = _parsed(down_path, visit.see(down_path))
            faults += below.faults
        for tokens, row in parsed.rows.items():
            made = rows.plain_config(row, below.rows.get(tokens))
            fault = made if isinstance(made, str) else rows.config_fault(made[0], problem, shared)
            if isinstance(made, str) or fault:
                second = down_path.name if down_path is not None and tokens in below.rows else ""
                faults.append(rows.sentence(path, second, tokens, fault))
            else:
                usable[tokens] = made
    visit.passed += faults
    return _choose(usable, path, problem, remarks, visit)


def _choose(
    usable: dict[int, tuple[rows.Row, list[str]]],
    path: Path,
    problem: Problem,
    remarks: list[str],
    visit: _Visit,
) -> _Choice | None:
    if not usable:
        return None
    larger = [tokens for tokens in usable if tokens >= problem.num_tokens]
    for tokens in sorted(larger) or [max(usable)]:
        row, left_out = usable[tokens]
        if path.is_relative_to(PACKAGED) and tokens < _MANY_TOKENS and problem.num_tokens > _FAR * tokens:
            visit.passed.append(f"{_shown(path)} ends at {tokens} tokens, too few to tell about {problem.num_tokens}.")
            continue
        fault = rows.reach_fault(row, tokens, problem)
        if fault:
            visit.passed.append(rows.sentence(path, "", tokens, fault))
            continue
        for key, now in (("hidden_size", problem.hidden_size), ("top_k", problem.top_k)):
            if row.get(key, now) != now:
                remarks.append(f"with {key} {row[key]} instead of {now}")
        if left_out:
            remarks.append(f"without its {', '.join(left_out)}")
        config = {"up": row["up"], "down": row["down"], "PDL": row.get("PDL", False)}
        return _Choice(config, path, tokens, tuple(remarks))
    return None


def _places(folder: Path, visit: _Visit) -> Iterator[_Place]:
    """The folders with files, those of the running triton first, then flat ones, then other versions', newest first."""
    running = _numbers(running_triton())
    versions, flat = [], []
    for base in (folder, folder / "configs"):
        if base != folder and visit.see(base) is None:
            continue
        flat.append(_Place(base, ""))
        for path in _subfolders(base, visit.see(base)):
            found = parse_version_folder(path.name)
            if found is not None:
                versions.append(_Place(path, found))
    versions.sort(key=lambda place: _numbers(place.triton), reverse=True)
    versions.sort(key=lambda place: _numbers(place.triton) != running)
    near = [place for place in versions if _numbers(place.triton)[:2] == running[:2]]
    yield from (*near, *flat, *(place for place in versions if place not in near))


@functools.cache
def running_triton() -> str:
    """Version of the triton that compiles here; ``""`` where there is none. Does not import it."""
    loaded = sys.modules.get("triton")
    if loaded is not None and hasattr(loaded, "__version__"):
        return str(loaded.__version__)
    try:
        return version("triton")
    except PackageNotFoundError:
        return ""


def _numbers(triton_version: str) -> tuple[int, ...]:
    return tuple(int(word) for word in triton_version.partition("+")[0].split(".") if word.isdigit())


def _minor(triton_version: str) -> tuple[int, ...]:
    return _numbers(triton_version)[:2]


def _shown(path: Path) -> str:
    return f"packaged {path.relative_to(PACKAGED)}" if path.is_relative_to(PACKAGED) else str(path)


def _modified(path: Path) -> _Stamp:
    """What differs once it has changed; None where it is not there."""
    try:
        found = path.stat()
    except OSError:
        return None
    now = time.time_ns()
    unsettled = now if now - found.st_mtime_ns < _SETTLED_NS else 0
    return found.st_mtime_ns, found.st_ino, found.st_size, unsettled


# The stamp is part of the key, so that what has changed is read again.
@functools.lru_cache(maxsize=256)
def _parsed(path: Path, stamp: _Stamp) -> rows.Parsed:
    return rows.parse_file(path)


@functools.lru_cache(maxsize=64)
def _subfolders(folder: Path, stamp: _Stamp) -> tuple[Path, ...]:
    return tuple(path for path in sorted(folder.iterdir()) if path.is_dir()) if stamp is not None else ()


@functools.lru_cache(maxsize=64)
def _listing(folder: Path, stamp: _Stamp) -> dict[tuple[int, int, FormatWords], dict[TuningName, Path]]:
    """The tuning files of a folder by E, N and format."""
    listed: dict[tuple[int, int, FormatWords], dict[TuningName, Path]] = {}
    if stamp is None:
        return listed
    for path in sorted(folder.iterdir()):
        name = parse_name(path.name)
        if name is not None:
            shape = (name.num_experts, name.intermediate_size, name.words)
            listed.setdefault(shape, {})[name] = path
    return listed
