"""Files of results beside each other in one folder, and links by which a browser takes them home."""

from __future__ import annotations

import base64
import html
import io
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path

from workbench.errors import InvalidInput
from workbench.modes import Subject
from workbench.sweeps.results import Results

FILES = {
    "records.jsonl": "jsonl",
    "records.parquet": "parquet",
    "records.csv": "csv",
    "summary.md": "md",
    "report.html": "html",
}
STEP_FILES = {"bench_one_batch.jsonl": "one_batch"}
LINK_LIMIT = 12 * 2**20
"""Bytes in one download link; larger files are only on disk."""


def results_folder(name: str, root: Path) -> Path:
    """A folder for `name` that is not there yet: `name`, `name-2`, ..."""
    folder, count = root / name, 1
    while folder.exists():
        count += 1
        folder = root / f"{name}-{count}"
    return folder


def default_root() -> Path:
    """`MOE_WORKBENCH_RESULTS`; else `results` in the current folder, or beside it when that is `notebooks`."""
    if given := os.environ.get("MOE_WORKBENCH_RESULTS"):
        return Path(given)
    here = Path.cwd()
    return (here.parent if here.name == "notebooks" else here) / "results"


def export_files(results: Results, folder: Path) -> dict[str, Path]:
    """Write every format into `folder`; returns name -> path.

    Raises:
        InvalidInput: there is nothing to export, or the folder cannot be written.
    """
    if not len(results.records):
        raise InvalidInput("export: there are no results yet")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInput(f"out: {folder} cannot be made ({error.strerror}); give another folder") from None
    written = {}
    steps = any(record.spec.subject is Subject.STEP and "prefill" in record.metrics for record in results.points)
    for name, kind in {**FILES, **(STEP_FILES if steps else {})}.items():
        path = folder / name
        # The sweep's own records are already there, one line a point: they are kept as they are.
        if not (kind == "jsonl" and path.exists() and results.folder == folder):
            results.write(path, kind)
        written[name] = path
    return written


def links(files: Mapping[str, Path], folder: Path) -> str:
    """HTML with a download link for all files in one archive and for each small one."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as out:
        for name, path in files.items():
            out.write(path, f"{folder.name}/{name}")
    parts = [_link(f"{folder.name}.zip", archive.getvalue(), "application/zip", "all files (zip)")]
    for name, path in files.items():
        if path.stat().st_size <= 2**20:
            parts.append(_link(name, path.read_bytes(), "application/octet-stream", name))
    where = f"Written to <b>{html.escape(str(folder))}</b>. Download: "
    return where + " ".join(part for part in parts if part)


def _link(name: str, content: bytes, kind: str, words: str) -> str:
    if len(content) > LINK_LIMIT:
        return f"({html.escape(words)}: {len(content) / 2**20:,.0f} MB, too large for a link)"
    data = base64.b64encode(content).decode()
    return f'<a download="{html.escape(name)}" href="data:{kind};base64,{data}">{html.escape(words)}</a>'
