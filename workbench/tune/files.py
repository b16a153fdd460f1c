"""Reading and writing the files that `moe_kernels.tuning` looks up. No torch here."""

from __future__ import annotations

import json
import os
import tempfile
from contextlib import suppress
from pathlib import Path

from moe_kernels.tuning.lookup import running_triton
from moe_kernels.tuning.names import Part, Problem, build_name, problem_name, version_folder
from moe_kernels.tuning.rows import Parsed, Row, config_fault, parse_file, plain_rows

from workbench.errors import InvalidInput


def version_place(out: Path, triton_version: str = "") -> Path:
    """The folder below `out` that a triton's files are in; of the running one where no version is given."""
    return out / version_folder(triton_version or running_triton())


def file_path(folder: Path, problem: Problem, device_name: str, part: Part) -> Path:
    """The file that holds rows for the shape and format of `problem`."""
    return folder / build_name(problem_name(problem, device_name, part))


def read_rows(folder: Path, problem: Problem, device_name: str, shared_bytes: int) -> tuple[dict[int, Row], list[str]]:
    """The configurations that were tuned before, by token count, and sentences about those that cannot be used.

    Raises:
        InvalidInput: there is a file and it cannot be read.
    """
    path = file_path(folder, problem, device_name, Part.MODES)
    parsed = _parse(path)
    rows, faults = {}, list(parsed.faults)
    for tokens, row in parsed.rows.items():
        fault = config_fault(row, problem, shared_bytes)
        if fault:
            faults.append(f"{path}: row {tokens}: {fault}.")
        else:
            rows[tokens] = row
    return rows, faults


def write_rows(folder: Path, problem: Problem, device_name: str, rows: dict[int, Row]) -> list[Path]:
    """Write the `_modes` file and, where a row has the sorted layout's form, SGLang's two files beside it.

    SGLang's files keep the rows of other token counts that they have. Each file is replaced as a whole: a reader sees
    the old one or the new one.

    Returns:
        The files written.

    Raises:
        InvalidInput: the folder cannot be written to, or SGLang's files there cannot be read.
    """
    ups = dict(_parse(file_path(folder, problem, device_name, Part.UP)).rows)
    downs = dict(_parse(file_path(folder, problem, device_name, Part.DOWN)).rows)
    for tokens, row in rows.items():
        pair = plain_rows(row)
        if pair is not None:
            ups[tokens], downs[tokens] = pair
    for tokens, up in ups.items():  # the nearest row is looked up in each file: they must have the same counts
        downs.setdefault(tokens, {**up, "USE_TMA": False})
    written = {Part.MODES: rows, **({Part.UP: ups, Part.DOWN: downs} if ups else {})}
    paths = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for part, content in written.items():
            path = file_path(folder, problem, device_name, part)
            _write(path, content)
            paths.append(path)
    except OSError as error:
        raise InvalidInput(f"out: {folder} cannot be written ({error.strerror}); give another folder") from None
    return paths


def _parse(path: Path) -> Parsed:
    if not path.exists():
        return Parsed({})
    parsed = parse_file(path)
    if not parsed.rows and parsed.faults:  # nothing of it would survive
        raise InvalidInput(f"out: {parsed.faults[0].rstrip('.')}; give another folder")
    return parsed


def _write(path: Path, content: dict[int, Row]) -> None:
    text = json.dumps({str(tokens): content[tokens] for tokens in sorted(content)}, indent=4) + "\n"
    file, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
    try:
        with os.fdopen(file, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise
