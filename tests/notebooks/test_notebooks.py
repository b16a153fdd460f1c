"""The committed notebooks: thin, without outputs, in step with their `.py`; they run to their end without a screen."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jupytext
import nbformat
import pytest

import workbench
from workbench.sweeps.loader import RECORDINGS

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
ENVIRONMENT = os.environ | {
    "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
}


def headless(notebook: Path, out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "workbench.widgets.headless", str(notebook), "--out", str(out), *options]
    return subprocess.run(command, env=ENVIRONMENT, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


def write(path: Path, *cells: str) -> Path:
    document = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbformat.write(document, path)
    return path


def test_there_are_notebooks() -> None:
    assert [path.name for path in NOTEBOOKS] == [
        "00_workbench.ipynb",
        "cuda_graph_attention.ipynb",
        "fused_moe_splitk.ipynb",
        "moe_torch_compile.ipynb",
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_committed_notebook_has_no_outputs_and_short_cells(path: Path) -> None:
    document = nbformat.read(path, as_version=4)
    nbformat.validate(document)
    for cell in document.cells:
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None
            assert len(cell.source.splitlines()) <= 8
    assert set(document.metadata) <= {"jupytext", "kernelspec"}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_in_step_with_its_py_file(path: Path) -> None:
    def contents(document: Any) -> list[tuple[str, str]]:
        return [(cell.cell_type, cell.source) for cell in document.cells]

    paired = jupytext.read(path.with_suffix(".py"))
    assert contents(paired) == contents(nbformat.read(path, as_version=4))


@pytest.mark.slow
def test_the_workbench_notebook_runs_to_its_end_and_leaves_its_exports(tmp_path: Path) -> None:
    done = headless(ROOT / "notebooks" / "00_workbench.ipynb", tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    names = {path.name for path in (tmp_path / "quick").iterdir()}
    assert {"records.jsonl", "records.parquet", "records.csv", "summary.md", "report.html"} <= names
    results = workbench.load(tmp_path / "quick")
    assert len([record for record in results.records if record.status == "ok"]) >= 12, results.totals()
    copy = nbformat.read(tmp_path / "00_workbench-executed" / "00_workbench.ipynb", as_version=4)
    outputs = [output for cell in copy.cells for output in cell.get("outputs", [])]
    assert not [output for output in outputs if output.output_type == "error"]
    frozen = [output.data for output in outputs if "application/vnd.plotly.v1+json" in output.get("data", {})]
    assert len(frozen) == 3
    assert any("12 ok" in output.get("text", "") for output in outputs)


@pytest.mark.parametrize(
    ("name", "recorded", "words"),
    [
        ("fused_moe_splitk", "h200-splitk", ("speedup", "same_bits")),
        ("moe_torch_compile", "h200-moe-torch-compile", ("claimed_ms", "7.35", "speedup", "Compiling the MoE layers")),
        (
            "cuda_graph_attention",
            "h200-cuda-graph-attention",
            ("claimed_ms", "24.53", "room_lost", "The same at batch"),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_experiment_runs_to_its_end_with_or_without_its_recording(
    name: str, recorded: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    done = headless(ROOT / "notebooks" / f"{name}.ipynb", tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    copy = nbformat.read(tmp_path / f"{name}-executed" / f"{name}.ipynb", as_version=4)
    said = "".join(str(output) for cell in copy.cells for output in cell.get("outputs", []))
    held = (RECORDINGS / f"{recorded}.parquet").is_file()
    assert (f"{recorded} is not among the recorded sweeps." in said) == (not held)
    for word in words:
        assert word in said


def test_a_cell_that_fails_gives_a_failing_status_and_a_copy_to_read(tmp_path: Path) -> None:
    notebook = write(tmp_path / "broken.ipynb", "1 + 1", "raise ValueError('the reason')", "print('never')")
    done = headless(notebook, tmp_path / "out")
    assert done.returncode == 1
    assert "the reason" in done.stderr
    copy = nbformat.read(tmp_path / "out" / "broken-executed" / "broken.ipynb", as_version=4)
    assert [cell.execution_count for cell in copy.cells] == [1, 2, None]


def test_a_cell_that_hangs_is_ended(tmp_path: Path) -> None:
    notebook = write(tmp_path / "slow.ipynb", "import time; time.sleep(60)")
    done = headless(notebook, tmp_path / "out", "--timeout", "3")
    assert done.returncode == 1
    assert "timed out" in done.stderr.lower()


def test_a_notebook_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    done = headless(tmp_path / "none.ipynb", tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("notebook: ")
    assert "Traceback" not in done.stderr
    (tmp_path / "bad.ipynb").write_text("not json")
    assert headless(tmp_path / "bad.ipynb", tmp_path).returncode == 2
