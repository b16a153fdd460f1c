"""Which tile configurations are tried for one GEMM of a layer. No torch here.

Shapes: T tokens, E experts, K experts per token, F ffn; N = T*K routed rows.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

from moe_kernels.experts.tiles import INLINE_MAX_ROWS
from moe_kernels.formats import FORMATS
from moe_kernels.names import Quant
from moe_kernels.tuning.names import Problem
from moe_kernels.tuning.rows import Row, fit_fault, gemm_fault

MOST = 96
# Tokens up to which a program a row is worth trying: beyond, tensor cores share the weights they read.
TOKEN_LAYOUT_TOKENS = 4
# Programs that fill a GPU of some 132 processors twice over; below that, splitting the sum is tried.
FULL_GPU = 264


class Grid(NamedTuple):
    """Candidates for one GEMM, and why others are none.

    Attributes:
        kept: in an order in which any beginning of the list holds all kinds.
        skipped: reason to number of candidates.
    """

    kept: list[Row]
    skipped: dict[str, int]


def candidates(which: str, problem: Problem, shared_bytes: int, most: int = MOST, seed: int = 0) -> Grid:
    """Candidates for `which` GEMM, `up` or `down`.

    Args:
        which: the GEMM.
        problem: the layer, its format and number of tokens.
        shared_bytes: shared memory that a block may take.
        most: beyond it, a seeded choice is made that leaves every kind in.
        seed: of that choice.
    """
    skipped: Counter[str] = Counter()
    groups: dict[tuple[Any, ...], list[Row]] = {}
    seen = set()
    for row in _grid(which, problem):
        key = tuple(sorted(row.items()))
        if key in seen:
            continue
        seen.add(key)
        fault = gemm_fault(row) or fit_fault(row, which, problem, shared_bytes)
        if fault:
            skipped["too large for the shared memory" if "shared memory" in fault else fault] += 1
        else:
            kind = (row["LAYOUT"], row["BLOCK_SIZE_M"], row["SWAP_AB"], row["SPLIT_K"] > 1, row["USE_TMA"])
            groups.setdefault(kind, []).append(row)
    shuffle = random.Random(seed)
    for rows in groups.values():
        shuffle.shuffle(rows)
    kept = [row for turn in range(most) for rows in groups.values() for row in rows[turn : turn + 1]]
    if len(kept) > most:
        skipped[f"more than {most}"] = sum(map(len, groups.values())) - most
    return Grid(kept[:most], dict(skipped))


def compatible(up: Row, down: Row) -> bool:
    """Whether two rows can make one configuration: where both are sorted they share their blocks of rows."""
    both = up["LAYOUT"] == down["LAYOUT"] == "sorted"
    return not both or bool(up["BLOCK_SIZE_M"] == down["BLOCK_SIZE_M"])


def partner(which: str, row: Row, others: list[Row]) -> Row | None:
    """The row of the other GEMM beside which `row` is timed, the same for all rows of its kind; None where none fits.

    It has the same layout and blocks where there is such a one, and middling tiles.
    """
    middling = {"BLOCK_SIZE_N": 64 if which == "up" else 32, "BLOCK_SIZE_K": 128, "num_stages": 4, "num_warps": 4}

    def far(other: Row) -> tuple[float, ...]:
        kind = other["LAYOUT"] != row["LAYOUT"] or other["BLOCK_SIZE_M"] != row["BLOCK_SIZE_M"]
        plain = other["SWAP_AB"] + other["USE_TMA"] + (other["SPLIT_K"] > 1)
        return kind, plain, sum(abs(math.log2(other[key] / value)) for key, value in middling.items())

    fitting = [other for other in others if (compatible(row, other) if which == "up" else compatible(other, row))]
    return min(fitting, key=far, default=None)


def _grid(which: str, problem: Problem) -> Iterator[Row]:
    quant = Quant(problem.quant)
    rows = problem.num_tokens * problem.top_k
    a_expert = rows / problem.num_experts
    up = which == "up"
    depth = problem.hidden_size if up else problem.intermediate_size
    if problem.num_tokens <= TOKEN_LAYOUT_TOKENS:
        yield from _token(up, depth, FORMATS[quant].bits)
    if problem.dtype == "fp32":
        yield from _fp32(rows)
        return
    k_tiles = [k for k in ((64, 128) if quant is Quant.FP8_BLOCK else (64, 128, 256)) if k <= max(64, depth)]
    if rows <= INLINE_MAX_ROWS and a_expert <= 16:
        yield from _few(up, problem, rows, k_tiles)
    if rows > 64 and a_expert <= 64:
        yield from _some(up, rows, a_expert, k_tiles)
    if a_expert > 64 or (rows > INLINE_MAX_ROWS and a_expert > 24):
        yield from _many(up, k_tiles)


def _token(up: bool, depth: int, bits: int) -> Iterator[Row]:
    """One row or token a program: what counts is how many bytes each thread has on their way."""
    parts = 2 if up else 1
    for n, k, warps, stages in product((1, 2, 4, 8, 16), (256, 512, 1024, 2048), (1, 2, 4, 8), (1, 2, 3, 4)):
        a_thread = parts * n * k / (32 * warps)
        if k < 2 * depth and 16 <= a_thread <= 64 * 16 / min(bits, 16):
            yield _row("token", 1, n, k, 1, warps, stages)


def _fp32(rows: int) -> Iterator[Row]:
    """No tensor cores: small tiles."""
    for m, n, k, warps, stages in product((16, 32, 64), (32, 64), (32, 64), (4, 8), (2, 3)):
        yield _row("sorted", m, n, k, 8, warps, stages)
        if rows <= INLINE_MAX_ROWS and m == 16:
            yield _row("inline", m, n, k, 1, warps, stages)


def _few(up: bool, problem: Problem, rows: int, k_tiles: list[int]) -> Iterator[Row]:
    """At most a few rows an expert: the weights pass once, and each program works out its rows itself."""
    width = problem.intermediate_size if up else problem.hidden_size
    for n, k, stages in product((16, 32, 64) if up else (32, 64, 128), k_tiles, (3, 4, 5, 6)):
        yield _row("inline", 16, n, k, 1, 4, stages)
        if rows > 64 and stages <= 4:
            yield _row("sorted", 16, n, k, 16, 4, stages)
        programs = min(rows, problem.num_experts) * -(-width // n)
        if programs < FULL_GPU and stages in (3, 4):
            for parts in (2, 4):
                yield _row("inline", 16, n, k, 1, 4, stages, split_k=parts)
    for n, k, stages, layout in product((64, 128), k_tiles, (3, 4, 5), ("inline", "sorted")):
        if layout == "inline" or rows > 64:
            yield _row(layout, 16, n, k, 1 if layout == "inline" else 16, 4, stages, swap=True)


def _some(up: bool, rows: int, a_expert: float, k_tiles: list[int]) -> Iterator[Row]:
    """Up to some blocks of rows an expert."""
    blocks = (16, 32) if a_expert <= 24 else (16, 32, 64)
    widths = (32, 64, 128) if up else (64, 128, 256)
    for m, n, k, stages, group in product(blocks, widths, k_tiles, (3, 4, 5), (1, 16)):
        if group == 1 and stages != 4:
            continue
        yield _row("sorted", m, n, k, group, 8 if n == widths[-1] and m >= 32 else 4, stages)
        if rows <= INLINE_MAX_ROWS and a_expert > 16 and group == 16:
            yield _row("inline", m, n, k, 1, 4, stages)
    for m, n, k, stages in product(blocks, (64, 128), k_tiles, (3, 4)):
        yield _row("sorted", m, n, k, 16, 4 if n == 64 else 8, stages, swap=True)


def _many(up: bool, k_tiles: list[int]) -> Iterator[Row]:
    """Enough rows that arithmetic is what takes time."""
    parts = 2 if up else 1
    widths = (64, 128) if up else (64, 128, 256)
    for m, n, k, stages, group, tma in product((64, 128), widths, k_tiles, (3, 4), (8, 32), (False, True)):
        columns = parts * n
        if m * columns <= 128 * 256:
            yield _row("sorted", m, n, k, group, 8 if m * columns >= 128 * 128 else 4, stages, tma=tma)


def _row(
    layout: str,
    m: int,
    n: int,
    k: int,
    group: int,
    warps: int,
    stages: int,
    *,
    tma: bool = False,
    swap: bool = False,
    split_k: int = 1,
) -> Row:
    return {
        "BLOCK_SIZE_M": m,
        "BLOCK_SIZE_N": n,
        "BLOCK_SIZE_K": k,
        "GROUP_SIZE_M": group,
        "num_warps": warps,
        "num_stages": stages,
        "LAYOUT": layout,
        "USE_TMA": tma,
        "SWAP_AB": swap,
        "SPLIT_K": split_k,
    }
