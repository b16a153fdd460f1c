"""The tree's shape and what may be imported from where."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RANK = {
    "errors": 0, "modes": 0, "parts": 0, "spec": 0, "step_record": 0, "record": 0, "devices": 0, "arithmetic": 0,
    "models": 1, "peers": 1, "support": 2, "step_support": 2, "runtime": 2, "measure": 3, "check": 3, "engines": 4,
    "sweeps": 5, "tune": 5, "plots": 6, "report": 7, "lab": 7, "widgets": 8, "cli": 8, "__main__": 9,
}  # fmt: skip


def run(code: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, check=False)


def test_no_folder_shadows_the_public_kernels_package() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert not list((ROOT / "tests").rglob("__init__.py"))
    result = run("import importlib.util as u; s = u.find_spec('kernels'); print(s is None or s.origin is None)")
    assert result.stdout.strip() == "True", result.stderr


@pytest.mark.parametrize("cwd", [ROOT, Path("/")], ids=["checkout", "elsewhere"])
def test_packages_import_from_anywhere(cwd: Path) -> None:
    result = run("import moe_kernels, workbench; print(workbench.__version__)", cwd)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "0.1.0"


def test_top_level_is_fixed() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    folders = {line.split("/")[0] for line in listed.stdout.splitlines() if "/" in line}
    assert folders <= {"workbench", "notebooks", "kernels", "tests", ".ci"}


def imports_of(path: Path) -> set[str]:
    """Second parts of every `workbench.X` import in a file, lazy ones inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names = [node.module] if node.module != "workbench" else [f"workbench.{a.name}" for a in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("workbench.")}
    return found


@pytest.mark.parametrize(
    "path", sorted((ROOT / "workbench").rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT / "workbench"))
)
def test_a_storey_imports_only_from_below(path: Path) -> None:
    own = path.relative_to(ROOT / "workbench").parts[0].removesuffix(".py")
    if own == "__init__":
        return
    above = {name for name in imports_of(path) if name in RANK and RANK[name] > RANK[own]}
    assert not above, f"{own} imports {above}"


def test_moe_kernels_knows_nothing_above() -> None:
    for path in (ROOT / "kernels").rglob("*.py"):
        assert not imports_of(path), path


def test_widgets_never_import_torch() -> None:
    for folder in ("widgets", "plots"):
        for path in (ROOT / "workbench" / folder).rglob("*.py"):
            modules = {
                n.name
                for node in ast.walk(ast.parse(path.read_text()))
                if isinstance(node, ast.Import)
                for n in node.names
            }
            modules |= {
                node.module or "" for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)
            }
            assert not {m for m in modules if m.split(".")[0] in ("torch", "triton", "moe_kernels")}, path


def test_no_module_has_the_name_of_a_public_function() -> None:
    names = {path.stem for path in (ROOT / "workbench").iterdir()}
    assert not names & {"sweep", "run", "load", "supports", "recordings"}
