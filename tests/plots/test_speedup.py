"""The speed-up matrix: ratios against a chosen baseline, ties within the noise, blanks with a reason."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from workbench.errors import InvalidInput
from workbench.plots import baselines, speedup_figure, speedup_matrix, speedup_table


def test_ratios_are_baseline_over_latency_at_the_same_tokens(frame: pd.DataFrame) -> None:
    matrix = speedup_matrix(frame, "reference · bf16")
    assert matrix.sizes == [1, 16, 128]
    assert matrix.rows == ["reference · fp32", "reference · bf16", "grouped_mm · fp32", "grouped_mm · bf16"]
    grouped = matrix.rows.index("grouped_mm · bf16")
    assert matrix.ratio[grouped] == pytest.approx([102 / 101, 132 / 116, 356 / 228])
    assert matrix.text[grouped] == ["tie", "1.14x", "1.56x"]
    assert matrix.colour[grouped][0] == 0.0
    assert matrix.text[matrix.rows.index("reference · bf16")] == ["base", "base", "base"]


def test_a_difference_within_the_bands_is_a_tie_and_beyond_them_not(make_row: Any) -> None:
    def cell(noise: float) -> str:
        rows = [make_row(100.0, noise=noise), make_row(110.0, noise=noise, moe_backend="triton")]
        return speedup_matrix(pd.DataFrame(rows), {"moe_backend": "reference"}).text[1][0]

    assert cell(0.06) == "tie"
    assert cell(0.04) == "0.91x"


def test_what_was_not_measured_is_blank_with_its_reason(frame: pd.DataFrame) -> None:
    matrix = speedup_matrix(frame, "reference · bf16")
    broken = matrix.rows.index("grouped_mm · fp32")
    assert matrix.ratio[broken][1] is None
    assert matrix.text[broken][1] == ""
    assert "the kernel raised &lt;b&gt;Error" in matrix.hover[broken][1]
    figure = speedup_figure(frame, "reference · bf16")
    grey, cells = figure.data
    assert grey.z[broken][1] == 1.0
    assert cells.z[broken][1] is None
    assert list(figure.layout.xaxis.ticktext or cells.x) == ["1", "16", "128"]
    assert figure.layout.xaxis.autotypenumbers == "strict"


def test_a_baseline_that_failed_leaves_its_column_blank(frame: pd.DataFrame) -> None:
    matrix = speedup_matrix(frame, "grouped_mm · fp32")
    assert [row[1] for row in matrix.ratio] == [None] * 4
    other = matrix.rows.index("reference · bf16")
    assert "no baseline here" in matrix.hover[other][1]
    assert matrix.ratio[other][0] == pytest.approx(101.5 / 102)


def test_each_model_is_compared_with_its_own_baseline(make_row: Any) -> None:
    times = {("a", "reference"): 100.0, ("a", "triton"): 50.0, ("b", "reference"): 900.0, ("b", "triton"): 100.0}
    rows = [make_row(time, model=model, moe_backend=backend) for (model, backend), time in times.items()]
    matrix = speedup_matrix(pd.DataFrame(rows), "reference")
    assert dict(zip(matrix.rows, [row[0] for row in matrix.ratio], strict=True)) == pytest.approx(
        {"a · reference": 1.0, "a · triton": 2.0, "b · reference": 1.0, "b · triton": 9.0}
    )


def test_the_default_baseline_is_the_plainest_and_a_wrong_one_lists_the_right_ones(frame: pd.DataFrame) -> None:
    assert next(iter(baselines(frame))) == "grouped_mm · bf16"
    assert speedup_matrix(frame).baseline == "grouped_mm · bf16"
    with pytest.raises(InvalidInput, match=r"baseline: must be grouped_mm · bf16, .* not 'fast'"):
        speedup_matrix(frame, "fast")
    with pytest.raises(InvalidInput, match="fits 2 sets of modes"):
        speedup_matrix(frame, {"quant": "bf16"})
    assert speedup_matrix(pd.DataFrame()).rows == []


def test_dynamic_is_named_only_where_it_tells_lines_apart(make_row: Any) -> None:
    rows = [make_row(100.0), make_row(80.0, compile="default", dynamic=True)]
    assert speedup_matrix(pd.DataFrame(rows)).rows == ["eager", "compile"]
    rows.append(make_row(90.0, compile="default", dynamic=False))
    assert speedup_matrix(pd.DataFrame(rows)).rows == ["eager", "compile", "compile · dynamic"]


def test_the_table_tints_faster_and_slower_cells_apart(frame: pd.DataFrame) -> None:
    table = speedup_table(frame, "reference · bf16")
    assert "1.56x" in table
    assert table.count("background:#F4F4F4") == 1
    slower = table.split("reference · fp32")[1].split("</tr>")[0]
    faster = table.split("grouped_mm · bf16")[1].split("</tr>")[0]
    assert "background:#ffffff" in faster
    assert slower != faster
