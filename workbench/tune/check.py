"""Which rows of tuning files could be launched, and why others could not. No torch here."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from moe_kernels.tuning.lookup import running_triton
from moe_kernels.tuning.names import Part, Problem, TuningName, parse_name, parse_version_folder, quant_of
from moe_kernels.tuning.rows import Row, config_fault, parse_file, plain_config

from workbench.errors import InvalidInput

# Shared memory, in bytes, that a block may take, by words of the device's name.
_SHARED = {"H100": 232448, "H200": 232448, "H800": 232448, "H20": 232448, "GH200": 232448, "B200": 232448}
_SHARED |= {"A100": 166912, "A800": 166912, "L40S": 101376}


class RowState(NamedTuple):
    """One row: its file, its token count or an empty text for the file as a whole, and why not; empty where legal."""

    path: Path
    row: str
    fault: str
    remark: str


def check_path(path: Path) -> list[RowState]:
    """Look at a file, or at all tuning files of a folder and of those in it.

    Raises:
        InvalidInput: there is no such file or folder, or no tuning file in it.
    """
    if path.is_dir():
        files = [file for file in sorted(path.rglob("*.json")) if parse_name(file.name) is not None]
        if not files:
            raise InvalidInput(f"check: {path} holds no tuning file, such as E=8,N=14336,device_name=NVIDIA_H200.json")
        return [state for file in files for state in _check_file(file)]
    if not path.is_file():
        raise InvalidInput(f"check: {path} does not exist; must be a tuning file or a folder of them")
    return _check_file(path)


def _check_file(path: Path) -> list[RowState]:
    name = parse_name(path.name)
    if name is None:
        why = "is not named as a tuning file is: E=...,N=...,device_name=...[,dtype=...][,block_shape=[n, k]].json"
        return [RowState(path, "", why, "")]
    format_ = quant_of(name.words)
    if format_ is None:
        return [RowState(path, "", f"is for a format that there is not here ({name.words.dtype or 'none'})", "")]
    parsed = parse_file(path)
    states = [RowState(path, "", fault.removeprefix(f"{path}: ").rstrip("."), "") for fault in parsed.faults]
    partner = _partner(path, name)
    shared = next((size for word, size in _SHARED.items() if word in name.device.split("_")), 0)
    remark = _stale(path, parsed.triton_version)
    for tokens, row in parsed.rows.items():
        fp32 = name.words.dtype == "float32"
        problem = Problem(
            tokens, name.num_experts, 0, name.intermediate_size, 1, format_[0], "fp32" if fp32 else "bf16", format_[1]
        )
        states.append(
            RowState(path, str(tokens), _row_fault(name.part, row, partner.get(tokens), problem, shared), remark)
        )
    return states


def _row_fault(part: Part, row: Row, other: Row | None, problem: Problem, shared: int) -> str:
    if part is Part.MODES:
        return config_fault(row, problem, shared)
    if part is Part.DOWN and other is None:
        return "the file beside it has no row for the first GEMM"
    up, down = (other, row) if part is Part.DOWN else (row, other)
    assert up is not None
    made = plain_config(up, down)
    return made if isinstance(made, str) else config_fault(made[0], problem, shared)


def _partner(path: Path, name: TuningName) -> dict[int, Row]:
    """The rows of the file that makes a pair with this one."""
    if name.part is Part.MODES:
        return {}
    other = path.name.removesuffix("_down.json") + ".json" if name.part is Part.DOWN else f"{path.stem}_down.json"
    file = path.with_name(other)
    return parse_file(file).rows if file.exists() else {}


def _stale(path: Path, own: str) -> str:
    version, running = parse_version_folder(path.parent.name) or own, running_triton()
    if not version or not running or version.split(".")[:2] == running.split(".")[:2]:
        return ""
    return f"tuned with triton {version}, running {running}"
