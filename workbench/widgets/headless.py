"""Run a notebook to its end without a screen: `python -m workbench.widgets.headless notebooks/00_workbench.ipynb`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from workbench.errors import InvalidInput
from workbench.widgets.export import results_folder

CELL_TIMEOUT_S = 900


def execute(notebook: Path, out: Path, *, timeout_s: float = CELL_TIMEOUT_S) -> Path:
    """Execute every cell in a fresh kernel and write the executed copy below `out`; returns its path.

    The kernel runs in the folder above `notebooks`, with `MOE_WORKBENCH_HEADLESS=1`. The copy is written also when a
    cell fails, so that its traceback can be read.

    Raises:
        InvalidInput: the notebook is not there or cannot be read.
        nbclient.exceptions.CellExecutionError: a cell failed. CellTimeoutError: one took longer than `timeout_s`.
    """
    import nbformat
    from nbclient import NotebookClient

    try:
        document = nbformat.read(notebook, as_version=4)
    except (OSError, ValueError, nbformat.reader.NotJSONError) as error:
        raise InvalidInput(f"notebook: {notebook} cannot be read ({error})") from None
    folder = notebook.resolve().parent
    work = folder.parent if folder.name == "notebooks" else folder
    environment = os.environ | {"MOE_WORKBENCH_HEADLESS": "1", "MOE_WORKBENCH_RESULTS": str(out.resolve())}
    client = NotebookClient(
        document, timeout=timeout_s, kernel_name="python3", resources={"metadata": {"path": str(work)}}
    )
    copy = results_folder(f"{notebook.stem}-executed", out) / notebook.name
    copy.parent.mkdir(parents=True)
    try:
        client.execute(env=environment)
    finally:
        nbformat.write(document, copy)
    return copy


def main(argv: list[str] | None = None) -> int:
    """The command; its exit status is 0 only where every cell ran."""
    parser = argparse.ArgumentParser(description="Run a notebook to its end without a screen.")
    parser.add_argument("notebook", type=Path)
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder for exports and the executed copy")
    parser.add_argument("--timeout", type=float, default=CELL_TIMEOUT_S, help="seconds that one cell may take")
    given = parser.parse_args(argv)
    from nbclient.exceptions import CellControlSignal, CellExecutionError, DeadKernelError

    try:
        copy = execute(given.notebook, given.out, timeout_s=given.timeout)
    except InvalidInput as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except (CellExecutionError, CellControlSignal, DeadKernelError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{copy}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
