"""Who wins against a baseline, at which token counts, and whether it gives the same bits again, as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from workbench.errors import InvalidInput, choices
from workbench.plots.select import points, records
from workbench.plots.style import label, missing

PROBLEM = ("model", "tp_size", "quant", "num_tokens")
WINS, TIES, LOSES = "wins", "ties", "loses"


def winners(
    frame: pd.DataFrame, against: Mapping[str, Any], *, among: Sequence[str], problem: Sequence[str] = PROBLEM
) -> pd.DataFrame:
    """The fastest challenger of every problem beside the baseline.

    Args:
        frame: `Results.frame()`; repeats of the anchor and points that were not measured are left out.
        against: the baseline, by its values on axes of `among`.
        among: the axes that tell challengers apart.
        problem: the axes that name a problem; rows are compared within one. Of steps: with `batch_size` for
            `num_tokens`.

    Returns:
        One row a problem that has both, in the order of the frame: the axes of `problem`; `best`, the fastest
        challenger in words; `best_us` and `baseline_us`, medians; `speedup`, baseline over best; `verdict`: `ties`
        where the bands p10 to p90 overlap, else `wins` or `loses`.

    Raises:
        InvalidInput: an axis that the frame does not have, or a baseline on an axis outside `among`.
    """
    for name in (*among, *problem):
        if name not in frame:
            raise InvalidInput(f"{name}: no such column; there are {choices(frame.columns)}")
    for name in against:
        if name not in among:
            raise InvalidInput(f"against: must name axes of {choices(among)}, not {name!r}")
    shown = points(frame)
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in records(shown[shown["latency_us"].notna()]):
        groups.setdefault(tuple(row[name] for name in problem), []).append(row)
    found = []
    for key, rows in groups.items():
        own = [row for row in rows if _is(row, against)]
        others = [row for row in rows if not _is(row, against)]
        if not own or not others:
            continue
        base, best = own[-1], min(others, key=lambda row: float(row["latency_us"]))
        found.append(
            {
                **dict(zip(problem, key, strict=True)),
                "best": label(best, among),
                "best_us": float(best["latency_us"]),
                "baseline_us": float(base["latency_us"]),
                "speedup": float(base["latency_us"]) / float(best["latency_us"]),
                "verdict": verdict(best, base),
            }
        )
    return pd.DataFrame(found, columns=[*problem, "best", "best_us", "baseline_us", "speedup", "verdict"])


def verdict(row: Mapping[str, Any], base: Mapping[str, Any]) -> str:
    """`ties` where the bands p10 to p90 of two rows overlap, else whether the first `wins` or `loses`."""
    if row["p10_us"] <= base["p90_us"] and base["p10_us"] <= row["p90_us"]:
        return TIES
    return WINS if row["latency_us"] < base["latency_us"] else LOSES


def lesson(found: pd.DataFrame, what: str) -> str:
    """What `winners` found, in two sentences: how often `what` wins, and how much it gains, least, at the median, most.

    `what` names the challenger.
    """
    if not len(found):
        return f"{what}: nothing was measured both with and without it."
    problem = list(found.columns[: list(found.columns).index("best")])
    counts = found["verdict"].value_counts()
    times = ", ".join(f"{word} {counts.get(word, 0)} times" for word in (WINS, TIES, LOSES))
    rows = sorted(records(found), key=lambda row: float(row["speedup"]))
    ends = [f"{row['speedup']:.2f} ({label(row, problem)})" for row in (rows[0], rows[-1])]
    return (
        f"{what} at {len(rows)} problems: {times}. "
        f"Speed-up from {ends[0]} to {ends[1]}, median {found['speedup'].median():.2f}."
    )


def verdicts(found: pd.DataFrame, by: Sequence[str] = ("model", "tp_size", "quant")) -> pd.DataFrame:
    """What `winners` found, gathered: for each problem of `by` the sizes that win, tie and lose, as text."""
    rows: dict[tuple[Any, ...], dict[str, list[str]]] = {}
    size = "batch_size" if "batch_size" in found else "num_tokens"
    for row in records(found):
        places = rows.setdefault(tuple(row[name] for name in by), {WINS: [], TIES: [], LOSES: []})
        places[row["verdict"]].append(f"{row[size]:,}")
    listed = [
        {**dict(zip(by, key, strict=True)), **{verdict: ", ".join(tokens) for verdict, tokens in places.items()}}
        for key, places in rows.items()
    ]
    return pd.DataFrame(listed, columns=[*by, WINS, TIES, LOSES])


def repeatability(frame: pd.DataFrame, by: Sequence[str] = ("quant", "split_k", "reduction")) -> pd.DataFrame:
    """How often runs of the same inputs gave the same bits, and how far from right, over points that looked.

    Returns:
        One row a set of values of `by`: `points` that were measured and ran repeatedly; `same_bits`, those whose runs
        were all equal; `most_distinct`, the most different results of one point; `worst_error`, the largest error over
        its budget.
    """
    shown = points(frame)
    shown = shown[shown["distinct_outputs"].notna() & shown["latency_us"].notna()]
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in records(shown):
        groups.setdefault(tuple(row[name] for name in by), []).append(row)
    listed = [
        {
            **dict(zip(by, key, strict=True)),
            "points": len(rows),
            "same_bits": sum(row["distinct_outputs"] == 1 for row in rows),
            "most_distinct": int(max(row["distinct_outputs"] for row in rows)),
            "worst_error": max(float(row["error_ratio"]) for row in rows),
        }
        for key, rows in groups.items()
    ]
    return pd.DataFrame(listed, columns=[*by, "points", "same_bits", "most_distinct", "worst_error"])


def _is(row: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    return all(missing(row[name]) if value is None else row[name] == value for name, value in wanted.items())
