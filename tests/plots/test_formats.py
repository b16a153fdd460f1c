"""Formats, splits and reductions in labels, titles and matrices: named where they differ, else unsaid."""

from __future__ import annotations

from typing import Any

import pandas as pd

from workbench.plots import baselines, context, latency_figure, results_table, speedup_matrix, split
from workbench.plots.style import MODE_AXES, modes_label, short, told
from workbench.spec import RunSpec


def frame_of(make_row: Any, *fields: dict[str, Any]) -> pd.DataFrame:
    frame = pd.DataFrame(
        [make_row(row.pop("us", 100.0), **{"moe_backend": "triton", **row}) for row in map(dict, fields)]
    )
    frame["split_k"] = pd.array(frame["split_k"].tolist(), dtype="Int64")
    return frame


def names(frame: pd.DataFrame) -> list[str]:
    return [series.label for series in split(frame)[0]]


def test_every_mode_of_a_spec_is_an_axis() -> None:
    assert set(MODE_AXES) | {"routing", "zipf_exponent"} == set(RunSpec().modes.model_dump())


def test_splits_and_reductions_are_named_in_order(make_row: Any) -> None:
    frame = frame_of(
        make_row,
        {"split_k": 8, "reduction": "atomic"},
        {"split_k": 2},
        {"split_k": None},
        {"split_k": 8},
    )
    assert names(frame) == [
        "split as tuned · deterministic",
        "split 2 · deterministic",
        "split 8 · deterministic",
        "split 8 · atomic",
    ]


def test_int4_groups_and_zero_points_are_named(make_row: Any) -> None:
    frame = frame_of(
        make_row,
        {"quant": "int4", "group_size": 128},
        {"quant": "int4", "group_size": 32, "zero_points": True},
        {"quant": "nvfp4"},
    )
    assert names(frame) == ["int4 · g32 · zero points", "int4 · g128", "nvfp4 · g128"]
    assert short("activation_scale", "static") == "fixed scale"


def test_what_is_plain_is_left_unsaid_where_all_rows_have_it(make_row: Any) -> None:
    frame = frame_of(make_row, {"num_tokens": 1}, {"num_tokens": 16})
    assert context(frame) == "smollm2-135m · triton · bf16 · eager · balanced · L2 cold · Test CPU"
    assert names(frame) == ["triton · bf16 · eager"]
    said = frame_of(make_row, {"quant": "int4", "group_size": 64, "split_k": 4, "reduction": "atomic"})
    assert "triton · split 4 · atomic · int4 · g64 · eager" in context(said)
    assert not told("split_k", None)
    assert told("split_k", 1)
    assert modes_label({"quant": "bf16", "moe_backend": "triton"}) == "triton · bf16"


def test_one_part_is_the_plainest_baseline(make_row: Any) -> None:
    frame = frame_of(
        make_row,
        {"split_k": 4, "us": 50.0},
        {"split_k": 1, "us": 100.0},
        {"split_k": 4, "reduction": "atomic", "us": 200.0},
    )
    assert next(iter(baselines(frame))) == "split 1 · deterministic"
    matrix = speedup_matrix(frame)
    assert matrix.text == [["base"], ["2.00x"], ["0.50x"]]
    assert speedup_matrix(frame, {"split_k": 1}).ratio == matrix.ratio


def test_figures_and_tables_take_missing_splits(make_row: Any) -> None:
    frame = frame_of(make_row, {"split_k": None, "us": 50.0}, {"split_k": 2, "us": 60.0})
    shown = [trace.name for trace in latency_figure(frame).data if trace.visible is True and trace.name]
    assert "split as tuned" in shown
    assert "split 2" in results_table(frame)
