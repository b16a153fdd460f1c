"""Winners, verdicts and repeatability, from rows with known times."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
from stand_in import failed_record, ok_record

from workbench.errors import InvalidInput
from workbench.record import Status
from workbench.report.winners import repeatability, verdicts, winners
from workbench.spec import Modes, RunSpec
from workbench.sweeps.results import Results

AMONG = ("split_k", "reduction")


def frame(times: dict[tuple[int, int, str], float], quant: str = "bf16", **resolved: Any) -> pd.DataFrame:
    """`(tokens, split_k, reduction) -> us`, each within 1 %."""
    made = []
    for (tokens, split, reduction), time in times.items():
        modes = Modes(moe_backend="triton", split_k=split, reduction=reduction, quant=quant)
        spec = RunSpec(model="mixtral-8x7b", modes=modes).replace(num_tokens=tokens)
        made.append(ok_record(spec, time, resolved=resolved))
    return Results(tuple(made)).frame()


TIMES = {
    (1, 1, "deterministic"): 100.0,
    (1, 2, "deterministic"): 80.0,
    (1, 4, "atomic"): 50.0,
    (16, 1, "deterministic"): 100.0,
    (16, 2, "deterministic"): 101.0,
    (16, 2, "atomic"): 140.0,
    (64, 1, "deterministic"): 100.0,
    (64, 2, "deterministic"): 200.0,
}


def test_the_fastest_challenger_wins_ties_or_loses() -> None:
    found = winners(frame(TIMES), {"split_k": 1}, among=AMONG)
    assert found["num_tokens"].tolist() == [1, 16, 64]
    assert found["best"].tolist() == ["split 4 · atomic", "split 2 · deterministic", "split 2 · deterministic"]
    assert found["verdict"].tolist() == ["wins", "ties", "loses"]
    assert found["speedup"].tolist() == pytest.approx([2.0, 100 / 101, 0.5])
    assert found["baseline_us"].tolist() == pytest.approx([100.0] * 3)


def test_other_problems_are_not_compared_and_gaps_are_left_out() -> None:
    both = pd.concat([frame(TIMES), frame({(1, 2, "deterministic"): 9.0}, "fp8_tensor")], ignore_index=True)
    assert winners(both, {"split_k": 1}, among=AMONG)["quant"].unique().tolist() == ["bf16"]
    spec = RunSpec(model="mixtral-8x7b", modes=Modes(moe_backend="triton", split_k=1)).replace(num_tokens=1)
    broken = Results((failed_record(spec, Status.RUNTIME_ERROR),)).frame()
    assert len(winners(broken, {"split_k": 1}, among=AMONG)) == 0


def test_verdicts_gather_token_counts() -> None:
    found = verdicts(
        winners(frame(TIMES | {(4, 1, "deterministic"): 10.0, (4, 8, "atomic"): 5.0}), {"split_k": 1}, among=AMONG)
    )
    assert found.to_dict("records") == [
        {"model": "mixtral-8x7b", "tp_size": 1, "quant": "bf16", "wins": "1, 4", "ties": "16", "loses": "64"}
    ]


def test_repeatability_counts_points_with_one_result() -> None:
    parts = [
        frame({(1, 2, "deterministic"): 1.0, (2, 2, "deterministic"): 1.0}, distinct_outputs=1),
        frame({(1, 2, "atomic"): 1.0}, distinct_outputs=7),
        frame({(2, 2, "atomic"): 1.0}, distinct_outputs=1),
        frame({(1, 1, "deterministic"): 1.0}),
    ]
    found = repeatability(pd.concat(parts, ignore_index=True))
    rows = [
        (row["reduction"], row["points"], row["same_bits"], row["most_distinct"]) for row in found.to_dict("records")
    ]
    assert rows == [("deterministic", 2, 2, 1), ("atomic", 2, 1, 7)]
    assert found["worst_error"].tolist() == [0.25, 0.25]


def test_nothing_measured_is_an_empty_table() -> None:
    empty = Results().frame()
    found = winners(empty, {"split_k": 1}, among=AMONG)
    assert (len(found), len(verdicts(found)), len(repeatability(empty))) == (0, 0, 0)
    assert list(found.columns)[:4] == ["model", "tp_size", "quant", "num_tokens"]


def test_wrong_axes_are_named() -> None:
    with pytest.raises(InvalidInput, match="colour: no such column"):
        winners(Results().frame(), {}, among=("colour",))
    with pytest.raises(InvalidInput, match="against: must name axes of split_k, not 'quant'"):
        winners(Results().frame(), {"quant": "bf16"}, among=("split_k",))
