"""Figures show what is in the frame, and nothing that was not measured."""

from __future__ import annotations

import json
import math
import time
from typing import Any

import pandas as pd
import pytest

from workbench.errors import InvalidInput
from workbench.plots import (
    choose,
    correctness_figure,
    detail_figure,
    latency_figure,
    latency_svg,
    results_table,
    speedup_figure,
    speedup_table,
    update_detail,
    update_latency,
)
from workbench.plots.style import SLOTS, duration, figures, label, log_ticks


def lines(figure: Any) -> dict[str, Any]:
    """Visible lines by their name."""
    return {t.name: t for t in figure.data if t.type == "scatter" and t.visible is True and t.mode == "lines+markers"}


def gaps(figure: Any) -> Any:
    return next(trace for trace in figure.data if trace.name == "not measured")


def strict(figure: Any) -> str:
    """The figure as strict JSON; raises for NaN."""

    def reject(name: str) -> None:
        raise AssertionError(f"{name} in the figure's JSON")

    text = figure.to_json()
    json.loads(text, parse_constant=reject)
    return str(text)


def test_latency_has_one_line_per_set_of_modes_with_its_values_and_band(frame: pd.DataFrame) -> None:
    figure = latency_figure(frame)
    found = lines(figure)
    assert list(found) == ["reference · fp32", "reference · bf16", "grouped_mm · fp32", "grouped_mm · bf16"]
    assert list(found["reference · bf16"].x) == [1, 16, 128]
    assert list(found["reference · bf16"].y) == [102.0, 132.0, 356.0]
    band = figure.data[list(figure.data).index(found["reference · bf16"]) - 1]
    assert list(band.x) == [1, 16, 128, 128, 16, 1]
    assert list(band.y) == pytest.approx(
        [v * f for f, vs in ((1.02, (102, 132, 356)), (0.98, (356, 132, 102))) for v in vs]
    )
    assert (figure.layout.xaxis.type, figure.layout.yaxis.type) == ("log", "log")
    assert "(µs)" in figure.layout.yaxis.title.text


def test_a_failed_point_is_a_gap_with_its_reason_and_no_number(frame: pd.DataFrame) -> None:
    figure = latency_figure(frame)
    broken = lines(figure)["grouped_mm · fp32"]
    assert list(broken.y) == [101.5, None, 292.0]
    mark = gaps(figure)
    assert list(mark.x) == [16]
    assert "runtime error" in mark.text[0]
    assert "the kernel raised &lt;b&gt;Error&lt;/b&gt;" in mark.text[0]
    assert "NaN" not in strict(figure)
    band = figure.data[list(figure.data).index(broken) - 1]
    assert not band.visible  # two single points have no band between them


def test_all_points_failed_and_no_points_at_all(frame: pd.DataFrame) -> None:
    nothing = frame.assign(latency_us=math.nan, p10_us=math.nan, p90_us=math.nan, error_ratio=math.nan)
    for figure in (latency_figure(nothing), speedup_figure(nothing), correctness_figure(nothing)):
        assert "NaN" not in strict(figure)
    assert len(gaps(latency_figure(nothing)).x) == len(frame)
    empty = latency_figure(pd.DataFrame())
    assert lines(empty) == {}
    assert empty.layout.title.text == "no results yet"
    assert "no results yet" in results_table(pd.DataFrame())


def test_what_all_rows_share_is_the_title_and_what_varies_the_names(frame: pd.DataFrame) -> None:
    assert latency_figure(frame).layout.title.text == "smollm2-135m · eager · balanced · L2 cold · Test CPU"
    one = frame[(frame.quant == "bf16") & (frame.moe_backend == "reference")]
    assert list(lines(latency_figure(one))) == ["reference · bf16 · eager"]
    named = latency_figure(one, axes=["moe_backend", "quant"])
    assert list(lines(named)) == ["reference · bf16"]


def test_markup_in_names_and_reasons_is_text_everywhere(make_row: Any) -> None:
    evil = '<img src=x onerror="alert(1)">'
    frame = pd.DataFrame(
        [
            make_row(10.0, moe_backend=evil, num_tokens=1),
            make_row(None, moe_backend=evil, num_tokens=2, reason=evil),
            make_row(20.0, moe_backend="other", num_tokens=1),
        ]
    )
    for figure in (latency_figure(frame), speedup_figure(frame), correctness_figure(frame)):
        assert "<img" not in strict(figure).replace("\\u003c", "<")
    for page in (results_table(frame), speedup_table(frame), latency_svg(frame)):
        assert "<img" not in page
        assert "&lt;img" in page


def test_anchor_repeats_are_not_drawn_and_the_latest_of_two_counts(make_row: Any) -> None:
    frame = pd.DataFrame([make_row(10.0), make_row(12.0), make_row(99.0, anchor=True)])
    assert [list(line.y) for line in lines(latency_figure(frame)).values()] == [[12.0]]


def test_more_lines_than_can_be_told_apart_are_counted(make_row: Any) -> None:
    frame = pd.DataFrame([make_row(10.0 + i, seed=i) for i in range(SLOTS + 6)])
    figure = latency_figure(frame)
    assert len(lines(figure)) == SLOTS
    assert f"first {SLOTS} of {SLOTS + 6} lines" in figure.layout.title.text


def test_an_update_keeps_every_trace_and_a_series_keeps_its_colour(frame: pd.DataFrame) -> None:
    figure = latency_figure(frame, widget=True)
    before, colour = list(figure.data), lines(figure)["grouped_mm · bf16"].line.color
    update_latency(figure, frame[frame.moe_backend == "torch_grouped_mm"], axes=["moe_backend", "quant"])
    assert [id(t) for t in figure.data] == [id(t) for t in before]
    assert sorted(trace.line.color for trace in lines(figure).values())
    update_latency(figure, frame)
    assert lines(figure)["grouped_mm · bf16"].line.color == colour
    assert len({(t.line.color, t.line.dash, t.marker.symbol) for t in lines(figure).values()}) == 4


def test_one_refresh_of_a_live_figure_is_one_message(frame: pd.DataFrame, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = latency_figure(frame.head(3), widget=True)
    sent: list[str] = []
    for name in ("_send_update_msg", "_send_restyle_msg", "_send_relayout_msg", "_send_addTraces_msg"):
        monkeypatch.setattr(figure, name, lambda *a, name=name, **k: sent.append(name))
    update_latency(figure, frame)
    assert sent == ["_send_update_msg"]


def test_correctness_has_the_budget_at_one_and_exact_answers_on_the_floor(frame: pd.DataFrame) -> None:
    frame = frame.copy()
    frame.loc[0, ["error_ratio", "mode_error"]] = [0.0, 1e-4]
    frame.loc[1, ["error_ratio", "status", "reason"]] = [7.0, "incorrect", "kernel error 7 times its budget"]
    figure = correctness_figure(frame)
    line = lines(figure)["reference · bf16"]
    assert list(line.y) == [1e-3, 7.0, 0.5]
    assert "exact, bit for bit" in line.text[0]
    assert "of compile or graph: 1.00e-04" in line.text[0]
    assert "kernel error 7 times its budget" in line.text[1]
    assert "against the unquantised model: 3.00e-03" in line.text[2]
    budget = next(trace for trace in figure.data if trace.name == "budget")
    assert list(budget.y) == [1.0, 1.0]
    assert figure.layout.yaxis.range[0] < -3 < 0.84 < figure.layout.yaxis.range[1]


def test_one_detail_figure_shows_either_view(frame: pd.DataFrame) -> None:
    figure = detail_figure()
    update_detail(figure, frame, "speed-up", baseline="reference · bf16")
    assert [t.visible for t in figure.data if t.type == "heatmap"] == [True, True]
    assert lines(figure) == {}
    update_detail(figure, frame, "correctness")
    assert [t.visible for t in figure.data if t.type == "heatmap"] == [False, False]
    assert len(lines(figure)) == 4
    strict(figure)


def test_a_toggle_on_ten_thousand_records_redraws_in_under_200_ms(large_frame: pd.DataFrame) -> None:
    assert len(large_frame) >= 10_000
    latency, detail = latency_figure(large_frame.head(1), widget=True), detail_figure(widget=True)
    update_detail(detail, large_frame.head(1), "speed-up")
    took = []
    for quant in ("bf16", "fp16", "fp32", "bf16"):
        began = time.perf_counter()
        chosen = choose(large_frame, {"quant": [quant], "model": ["model-0"]})
        update_latency(latency, chosen)
        update_detail(detail, chosen, "speed-up")
        took.append(time.perf_counter() - began)
        assert len(chosen) == 700
    assert min(took) < 0.2, took


def test_the_static_picture_has_the_lines_and_the_reasons(frame: pd.DataFrame) -> None:
    picture = latency_svg(frame)
    assert picture.count("<circle") == 11
    assert picture.count("<polyline") == 3  # the series with a gap has no two points beside each other
    assert "grouped_mm · fp32" in picture
    table = results_table(frame)
    assert "132 µs" in table
    assert "1 point runtime error: the kernel raised &lt;b&gt;Error" in table


def test_a_frame_of_another_kind_is_one_sentence() -> None:
    with pytest.raises(InvalidInput, match=r"frame: must have the columns of Results\.frame"):
        latency_figure(pd.DataFrame({"a": [1]}))
    with pytest.raises(InvalidInput, match="shape: no such column"):
        choose(pd.DataFrame({"a": [1]}), {"shape": [1]})


@pytest.mark.parametrize(
    ("us", "words"), [(0.87, "870 ns"), (12.34, "12.3 µs"), (4567.0, "4.57 ms"), (1.2e6, "1.20 s"), (999.6, "1,000 µs")]
)
def test_durations_read_well(us: float, words: str) -> None:
    assert duration(us) == words


def test_numbers_and_ticks_are_plain() -> None:
    assert [figures(v) for v in (0, 0.1234, 12.34, 1234.0)] == ["0", "0.123", "12.3", "1,234"]
    assert log_ticks(90, 700)[1] == ["50", "100", "200", "500", "1,000"]
    assert len(log_ticks(1, 1e6)[0]) <= 9
    assert (
        label({"compile": "none", "graph": "full", "dynamic": False}, ["compile", "dynamic", "graph"])
        == "eager · graph"
    )
