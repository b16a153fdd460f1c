"""Rows of tuning files: parsed strictly, and checked before anything is launched with them.

A file maps token counts, as strings, to rows. Three kinds of row become one configuration, ``{"up": ..., "down": ...,
"PDL": ...}``: a row of an SGLang or vLLM file, which serves both GEMMs; a pair of SGLang's files, the second named
``_down``; a row of a ``_modes`` file, which is the configuration itself.

A program of theirs covers BLOCK_SIZE_N of the 2F columns of gate and up together; ours covers as many of each. So the
first GEMM's BLOCK_SIZE_N of 128 is 64 here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from moe_kernels.experts.tiles import INLINE_MAX_ROWS, INT_KEYS
from moe_kernels.formats import BLOCK, FORMATS
from moe_kernels.names import Quant
from moe_kernels.tuning.names import Part, Problem

BOOL_KEYS = ("USE_TMA", "SWAP_AB")
LAYOUTS = ("sorted", "inline", "token")
# How a row was measured, beside "up", "down" and "PDL" of a _modes row: D and K, which names do not tell, and the time.
MEASURED_KEYS = ("hidden_size", "top_k", "us")
# Keys of other projects' kernels that have no meaning here.
_FOREIGN_KEYS = ("waves_per_eu", "matrix_instr_nonkdim", "kpack")
_MAX_N = 256
_DTYPE_BITS = {"fp32": 32, "bf16": 16, "fp16": 16}

Row = dict[str, Any]


class Parsed(NamedTuple):
    """What one file holds.

    Attributes:
        rows: by token count, ascending, not checked yet.
        faults: sentences about what could not be read, each with the file and the row.
        triton_version: what the file itself says; ``""`` where it says nothing.
    """

    rows: dict[int, Row]
    faults: tuple[str, ...] = ()
    triton_version: str = ""


def parse_file(path: Path) -> Parsed:
    """Read a file. Never raises: what is wrong is told in ``faults``."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_no_twice, parse_constant=_no_constant)
    except OSError as error:
        return Parsed({}, (f"{path}: cannot be read ({error.strerror}).",))
    except ValueError as error:  # also what is no UTF-8
        return Parsed({}, (f"{path}: is no valid JSON ({error}).",))
    if not isinstance(content, dict):
        return Parsed({}, (f"{path}: must hold an object with a row for each token count.",))
    rows: dict[int, Row] = {}
    faults = []
    for key, row in content.items():
        if key == "triton_version":  # newer files of vLLM
            continue
        if not key.isascii() or not key.isdigit():
            faults.append(f"{path}: row {key!r}: must be named by a number of tokens.")
        elif not isinstance(row, dict):
            faults.append(f"{path}: row {key}: must be an object, not {_shown(row)}.")
        elif int(key) in rows:
            faults.append(f"{path}: row {key}: stands there twice.")
        else:
            rows[int(key)] = row
    version = content.get("triton_version", "")
    return Parsed(dict(sorted(rows.items())), tuple(faults), version if isinstance(version, str) else "")


def plain_config(up: Mapping[str, Any], down: Mapping[str, Any] | None = None) -> tuple[Row, list[str]] | str:
    """Make a configuration of rows in SGLang's or vLLM's form.

    Args:
        up: the row of the first GEMM, or of both.
        down: the row of the second.

    Returns:
        The configuration and the keys that were left out because they mean nothing here; or what is wrong.
    """
    left_out: list[str] = []
    gemms: Row = {}
    for which, row in (("up", up), ("down", up if down is None else down)):
        gemm = {key: value for key, value in row.items() if key not in _FOREIGN_KEYS}
        left_out += [key for key in _FOREIGN_KEYS if key in row and key not in left_out]
        if "SPLIT_K_SIZE" in gemm:
            gemm["SPLIT_K"] = gemm.pop("SPLIT_K_SIZE")
        for key in ("LAYOUT", "SWAP_AB"):
            if key in gemm:
                return f"{which}: {key} is for _modes files"
        wide = which == "up"
        fault = gemm_fault(gemm, 2 * _MAX_N if wide else _MAX_N)
        if fault:
            return f"{which}: {fault}"
        if wide:
            gemm["BLOCK_SIZE_N"] = max(16, gemm["BLOCK_SIZE_N"] // 2)
            if down is None:
                gemm.pop("USE_TMA", None)  # their key is about the second GEMM
        gemms[which] = gemm
    return {**gemms, "PDL": False}, left_out


def plain_rows(config: Mapping[str, Any]) -> tuple[Row, Row] | None:
    """The rows of SGLang's two files that are nearest to a configuration; None where it has no such rows.

    Those know the sorted layout alone, and one BLOCK_SIZE_M for both.
    """
    up, down = config["up"], config["down"]
    if "token" in (up.get("LAYOUT"), down.get("LAYOUT")) or up["BLOCK_SIZE_M"] != down["BLOCK_SIZE_M"]:
        return None
    up_row, down_row = ({key: gemm[key] for key in INT_KEYS} for gemm in (up, down))
    up_row["BLOCK_SIZE_N"] *= 2
    return up_row, {**down_row, "USE_TMA": bool(down.get("USE_TMA", False))}


def config_fault(config: Mapping[str, Any], problem: Problem, shared_bytes: int) -> str:
    """Say why a configuration of the own form cannot be launched for a problem; empty where it can.

    ``shared_bytes`` is the shared memory that one block may take; 0 leaves that unchecked.
    """
    for key in config:
        if key not in ("up", "down", "PDL", *MEASURED_KEYS):
            return f"{key} is unknown; allowed: up, down, PDL, {', '.join(MEASURED_KEYS)}"
    for which in ("up", "down"):
        gemm = config.get(which)
        if not isinstance(gemm, Mapping):
            return f"{which} is missing" if gemm is None else f"{which} must be an object, not {_shown(gemm)}"
        fault = gemm_fault(gemm) or fit_fault(gemm, which, problem, shared_bytes)
        if fault:
            return f"{which}: {fault}"
    if not isinstance(config.get("PDL", False), bool):
        return f"PDL must be true or false, not {_shown(config['PDL'])}"
    up, down = config["up"], config["down"]
    both_sorted = up.get("LAYOUT", "sorted") == down.get("LAYOUT", "sorted") == "sorted"
    if both_sorted and up["BLOCK_SIZE_M"] != down["BLOCK_SIZE_M"]:
        sizes = f"{up['BLOCK_SIZE_M']} and {down['BLOCK_SIZE_M']}"
        return f"up and down must share BLOCK_SIZE_M where both are sorted, not {sizes}"
    return ""


def gemm_fault(gemm: Mapping[str, Any], max_n: int = _MAX_N) -> str:
    """Say what is wrong with one GEMM's row whatever it is for; empty where nothing is."""
    allowed = (*INT_KEYS, *BOOL_KEYS, "LAYOUT", "SPLIT_K")
    for key in gemm:
        if key not in allowed:
            return f"{key} is unknown; allowed: {', '.join(allowed)}"
    for key in INT_KEYS:
        if key not in gemm:
            return f"{key} is missing"
    layout = gemm.get("LAYOUT", "sorted")
    if layout not in LAYOUTS:
        return f"LAYOUT must be {', '.join(LAYOUTS[:-1])} or {LAYOUTS[-1]}, not {_shown(layout)}"
    token = layout == "token"
    if token and not _in_range(gemm["BLOCK_SIZE_M"], 1, 1):
        return f"BLOCK_SIZE_M must be 1 where LAYOUT is token, not {_shown(gemm['BLOCK_SIZE_M'])}"
    for key, low, high in (
        ("BLOCK_SIZE_M", 1 if token else 16, 256),
        ("BLOCK_SIZE_N", 1 if token else 16, max_n),
        ("BLOCK_SIZE_K", 16, 2048),
        ("num_warps", 1, 16),
    ):
        if not _in_range(gemm[key], low, high) or gemm[key] & (gemm[key] - 1):
            return f"{key} must be a power of two from {low} to {high}, not {_shown(gemm[key])}"
    for key, high in (("GROUP_SIZE_M", 1024), ("num_stages", 16), ("SPLIT_K", 64)):
        if not _in_range(gemm.get(key, 1), 1, high):
            return f"{key} must be a whole number from 1 to {high}, not {_shown(gemm[key])}"
    for key in BOOL_KEYS:
        if not isinstance(gemm.get(key, False), bool):
            return f"{key} must be true or false, not {_shown(gemm[key])}"
    if token:
        for key in BOOL_KEYS:
            if gemm.get(key):
                return f"{key} must be false where LAYOUT is token"
        if gemm.get("SPLIT_K", 1) != 1:
            return f"SPLIT_K must be 1 where LAYOUT is token, not {gemm['SPLIT_K']}"
    return ""


def fit_fault(gemm: Mapping[str, Any], which: str, problem: Problem, shared_bytes: int) -> str:
    """Say why a row that is right in itself does not serve this format, width or device; empty where it does."""
    quant = Quant(problem.quant)
    form = FORMATS[quant]
    k, token = gemm["BLOCK_SIZE_K"], gemm.get("LAYOUT") == "token"
    if quant is Quant.FP8_BLOCK and token and k % BLOCK:
        return f"BLOCK_SIZE_K must be a multiple of {BLOCK} for fp8_block where LAYOUT is token, not {k}"
    if quant is Quant.FP8_BLOCK and token and gemm["BLOCK_SIZE_N"] > BLOCK:
        return f"BLOCK_SIZE_N must be at most {BLOCK} for fp8_block where LAYOUT is token, not {gemm['BLOCK_SIZE_N']}"
    if quant is Quant.FP8_BLOCK and not token and k not in (BLOCK // 2, BLOCK):
        return f"BLOCK_SIZE_K must be {BLOCK // 2} or {BLOCK} for fp8_block, whose scales cover {BLOCK}, not {k}"
    if form.quantized and k < 32:
        return f"BLOCK_SIZE_K must be at least 32 for {quant}, not {k}"
    width = problem.hidden_size if which == "up" else problem.intermediate_size
    if gemm.get("USE_TMA") and not form.packed and width * form.bits // 8 % 16:
        return f"USE_TMA needs weight rows that are multiples of 16 bytes, not {width} columns of {quant}"
    needed = shared_estimate(gemm, which, problem, shared_bytes)
    if shared_bytes and needed > shared_bytes:
        return f"its tiles need {needed:,} bytes of shared memory and a block may take {shared_bytes:,}"
    return ""


def shared_estimate(gemm: Mapping[str, Any], which: str, problem: Problem, shared_bytes: int) -> int:
    """Bytes of shared memory that the kernel needs at the least: its tiles in flight.

    Measured on compiled kernels: warpgroup instructions, which take at least 64 rows on the left and which devices
    with more than 200 KiB have, hold ``num_stages`` tiles; others hold one less. The token layout has none.
    """
    if gemm.get("LAYOUT") == "token":
        return 0
    form = FORMATS[Quant(problem.quant)]
    x_bits = 8 if form.activation else _DTYPE_BITS[problem.dtype]
    w_tiles = 2 if which == "up" else 1  # gate and up
    bits = gemm["BLOCK_SIZE_M"] * x_bits + w_tiles * gemm["BLOCK_SIZE_N"] * form.bits
    left = gemm["BLOCK_SIZE_N"] if gemm.get("SWAP_AB") else gemm["BLOCK_SIZE_M"]
    wide = left >= 64 and gemm["num_warps"] >= 4 and x_bits < 32 and shared_bytes > 200 * 1024
    tiles = gemm["num_stages"] - (0 if wide else 1)
    return int(tiles * gemm["BLOCK_SIZE_K"] * bits // 8)


def reach_fault(config: Mapping[str, Any], tuned_tokens: int, problem: Problem) -> str:
    """Say why a row tuned for ``tuned_tokens`` does not reach the problem's token count; empty where it does."""
    layouts = {config[which].get("LAYOUT", "sorted") for which in ("up", "down")}
    tokens, rows = problem.num_tokens, problem.num_tokens * problem.top_k
    if "token" in layouts and tokens > tuned_tokens:
        return f"its token layout is for up to {tuned_tokens} tokens, not {tokens}"
    if "inline" in layouts and rows > INLINE_MAX_ROWS:
        return f"its inline layout is for up to {INLINE_MAX_ROWS} routed rows, not {rows}"
    return ""


def sentence(path: Path, part: Part | str, tokens: int, fault: str) -> str:
    """A fault with its file and row; ``part`` names the second file of a pair where it is in that one."""
    return f"{path}{part and f' with {part}'}: row {tokens}: {fault}."


def _in_range(value: Any, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _no_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} stands there twice")
        found[key] = value
    return found


def _no_constant(word: str) -> Any:
    raise ValueError(f"{word} is no number of JSON")
