"""Candidates from what is known already: rows tuned for other formats, shapes and token counts. No torch here.

A quick search tries these alone: a dozen for each GEMM instead of hundreds. What is best for an expert depends first on
the rows it gets, then on how its weights and activations are stored, and on its size least; so the rows of the package
and of the user's folders are taken in that order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from moe_kernels.experts.tiles import INLINE_MAX_ROWS
from moe_kernels.formats import FORMATS
from moe_kernels.names import Quant
from moe_kernels.tuning.folders import PACKAGED, config_folders
from moe_kernels.tuning.names import Part, Problem, TuningName, device_word, parse_name, quant_of
from moe_kernels.tuning.rows import Row, fit_fault, gemm_fault, parse_file

from workbench.tune.candidates import TOKEN_LAYOUT_TOKENS, Grid

MOST_NEIGHBOURS = 10


class _Known(NamedTuple):
    """A row of one GEMM, and how far the problem that it was tuned for is from the one in hand."""

    far: tuple[float, float, float]
    row: Row


def neighbours(which: str, problem: Problem, shared_bytes: int, device_name: str, most: int = MOST_NEIGHBOURS) -> Grid:
    """The nearest rows for `which` GEMM, `up` or `down`, that may be launched for the problem; nearest first."""
    skipped: dict[str, int] = {}
    kept: list[Row] = []
    for known in sorted(_known(which, problem, device_name), key=lambda known: known.far):
        if known.row in kept:
            continue
        fault = (
            gemm_fault(known.row) or fit_fault(known.row, which, problem, shared_bytes) or _reach(known.row, problem)
        )
        if fault:
            skipped[fault] = skipped.get(fault, 0) + 1
        elif len(kept) < most:
            kept.append(known.row)
    return Grid(kept, skipped)


def _reach(row: Row, problem: Problem) -> str:
    if row["LAYOUT"] == "inline" and problem.num_tokens * problem.top_k > INLINE_MAX_ROWS:
        return f"inline is for up to {INLINE_MAX_ROWS} routed rows"
    if row["LAYOUT"] == "token" and problem.num_tokens > TOKEN_LAYOUT_TOKENS:
        return f"token is for up to {TOKEN_LAYOUT_TOKENS} tokens"
    return ""


def _known(which: str, problem: Problem, device_name: str) -> Iterator[_Known]:
    for folder in (*config_folders(), PACKAGED):
        for path in sorted([*folder.glob("*.json"), *folder.glob("triton_*/*.json")]):
            name = parse_name(path.name)
            if name is None or name.part is not Part.MODES or name.device != device_word(device_name):
                continue
            found = quant_of(name.words)
            if found is not None:
                yield from _of_file(path, name, found[0], which, problem)


def _of_file(path: Path, name: TuningName, quant: Quant, which: str, problem: Problem) -> Iterator[_Known]:
    wanted = problem.num_tokens * problem.top_k / problem.num_experts
    for tokens, config in parse_file(path).rows.items():
        row, top_k = config.get(which), config.get("top_k")
        if not isinstance(row, dict) or not isinstance(top_k, int) or "LAYOUT" not in row:
            continue
        rows = tokens * top_k / name.num_experts
        shape = abs(math.log2(name.intermediate_size / problem.intermediate_size))
        whole = {"SWAP_AB": False, "USE_TMA": False, "SPLIT_K": 1, **row}  # older files leave out what is off
        yield _Known((round(abs(math.log2(rows / wanted))), _format_far(quant, Quant(problem.quant)), shape), whole)


def _format_far(one: Quant, other: Quant) -> float:
    """0 for the same format, 1 where rows and weights are stored alike, more where they are not."""
    if one is other:
        return 0.0
    a, b = FORMATS[one], FORMATS[other]
    return 1.0 + 2.0 * (bool(a.activation) != bool(b.activation)) + abs(a.bits - b.bits) / 8
