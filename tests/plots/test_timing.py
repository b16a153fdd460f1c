"""The two times of a record: which one a figure shows, that its axis says so, and that hover texts hold both."""

from __future__ import annotations

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
    frozen_page,
    has_wall,
    latency_figure,
    latency_svg,
    results_table,
    speedup_matrix,
    speedup_table,
    timed,
    timing_of,
    update_detail,
    update_latency,
)

# Eager and graph take nearly the same time on the device; from an idle one launching makes the difference.
TIMES = {
    ("disabled", 1): (26.0, 108.0),
    ("disabled", 16): (40.0, 110.0),
    ("full", 1): (25.8, 36.0),
    ("full", 16): (32.0, 42.0),
}


@pytest.fixture
def both(make_row: Any) -> pd.DataFrame:
    """Eager and graph at 1 and 16 tokens, each with both times."""
    rows = []
    for (graph, tokens), (device, wall) in TIMES.items():
        bands = {"wall_us": wall, "wall_p10_us": wall * 0.9, "wall_p90_us": wall * 1.1}
        rows.append(make_row(device, graph=graph, num_tokens=tokens, **bands))
    return pd.DataFrame(rows)


def ys(figure: Any) -> dict[str, list[float | None]]:
    return {t.name: list(t.y) for t in figure.data if t.visible is True and t.mode == "lines+markers"}


def test_the_frame_is_changed_to_the_other_time_and_back(both: pd.DataFrame) -> None:
    wall = timed(both, "wall")
    assert (timing_of(both), timing_of(wall)) == ("device", "wall")
    assert wall["latency_us"].tolist() == [108.0, 110.0, 36.0, 42.0]
    assert wall["p10_us"].tolist() == pytest.approx([97.2, 99.0, 32.4, 37.8])
    assert wall["p90_us"].tolist() == pytest.approx([118.8, 121.0, 39.6, 46.2])
    assert wall["device_us"].tolist() == both["latency_us"].tolist()
    assert timed(wall, "wall") is wall
    pd.testing.assert_frame_equal(timed(wall, "device"), both)
    assert timed(both, "device") is both
    assert len(timed(pd.DataFrame(), "wall").columns) == 0
    with pytest.raises(InvalidInput, match="timing: must be device, wall, decode, prefill or total, not 'host'"):
        timed(both, "host")  # type: ignore[arg-type]


def test_lines_bands_and_the_axis_are_those_of_the_chosen_time(both: pd.DataFrame) -> None:
    figure = latency_figure(both)
    assert list(ys(figure).values()) == [[26.0, 40.0], [25.8, 32.0]]
    assert figure.layout.yaxis.title.text == "median latency (µs)"
    names = list(ys(figure))
    update_latency(figure, timed(both, "wall"))
    assert ys(figure) == {names[0]: [108.0, 110.0], names[1]: [36.0, 42.0]}
    assert list(figure.data[0].y) == pytest.approx([118.8, 121.0, 99.0, 97.2])
    assert figure.layout.yaxis.title.text == "median time from an idle device,<br>host launches included (µs)"
    update_latency(figure, both)
    assert figure.layout.yaxis.title.text == "median latency (µs)"


def test_the_hover_text_of_a_point_always_holds_both(both: pd.DataFrame) -> None:
    def hover(frame: pd.DataFrame) -> str:
        return str(
            next(t for t in latency_figure(frame).data if t.visible is True and t.mode == "lines+markers").text[0]
        )

    device, wall = hover(both), hover(timed(both, "wall"))
    assert "1 tokens: <b>26.0 µs</b>" in device
    assert "with host launches: 108 µs" in device
    assert "1 tokens: <b>108 µs</b>" in wall
    assert "the device's own time: 26.0 µs" in wall
    alone = hover(both.drop(columns=["wall_us", "wall_p10_us", "wall_p90_us"]))
    assert "host" not in alone


def test_a_graph_that_ties_on_the_device_is_faster_with_its_launches(both: pd.DataFrame) -> None:
    device = speedup_matrix(both, {"graph": "disabled"})
    wall = speedup_matrix(timed(both, "wall"), {"graph": "disabled"})
    assert device.text[1] == ["tie", "1.25x"]
    assert wall.text[1] == ["3.00x", "2.62x"]
    assert wall.ratio[1] == pytest.approx([108 / 36, 110 / 42])
    assert "with host launches: 36.0 µs against 108 µs" in device.hover[1][0]
    assert "the device's own time: 25.8 µs against 26.0 µs" in wall.hover[1][0]
    assert "with host launches: 108 µs" in device.hover[0][0]
    figure = detail_figure()
    update_detail(figure, timed(both, "wall"), "speed-up", baseline=device.baseline)
    assert list(figure.data[1].text[1]) == ["3.00x", "2.62x"]
    assert f"against {device.baseline}, host launches included" in figure.layout.title.text
    update_detail(figure, timed(both, "wall"), "correctness")
    assert list(ys(figure).values()) == list(ys(correctness_figure(both)).values()) == [[0.5, 0.5]] * 2


def test_a_point_without_the_time_is_a_gap_that_says_so(both: pd.DataFrame) -> None:
    frame = both.copy()
    frame.loc[0, ["wall_us", "wall_p10_us", "wall_p90_us"]] = math.nan
    assert has_wall(frame)
    figure = latency_figure(timed(frame, "wall"))
    assert next(iter(ys(figure).values())) == [None, 110.0]
    mark = next(trace for trace in figure.data if trace.name == "not measured")
    assert "not recorded<br>Its time from an idle device was not recorded" in mark.text[0]
    none = timed(both.drop(columns=["wall_us", "wall_p10_us", "wall_p90_us"]), "wall")
    assert not has_wall(none)
    assert none["latency_us"].isna().all()


def test_static_pictures_follow_and_the_table_has_both(both: pd.DataFrame) -> None:
    wall = timed(both, "wall")
    picture = latency_svg(wall)
    assert "median time from an idle device, host launches included (µs)" in picture
    assert "108 µs, the device&#x27;s own time: 26.0 µs</title>" in picture
    assert "median latency (µs)" in latency_svg(both)
    assert "3.00x" in speedup_table(wall, {"graph": "disabled"})
    assert "3.00x" not in speedup_table(both, {"graph": "disabled"})
    table = results_table(wall)
    assert table == results_table(both)
    assert "below: from idle" in table
    assert ">26.0 µs<br><span" in table
    assert ">108 µs</span></td>" in table
    alone = results_table(both.drop(columns=["wall_us", "wall_p10_us", "wall_p90_us"]))
    assert "from idle" not in alone
    assert "108 µs" not in alone
    page = frozen_page(wall, code="c", command="d", baseline={"graph": "disabled"})
    assert all(words in page for words in ("3.00x", "108 µs", "host launches included"))


def test_changing_the_time_of_ten_thousand_records_redraws_in_under_200_ms(large_frame: pd.DataFrame) -> None:
    walls = {
        f"wall_{name}": large_frame[name if name != "us" else "latency_us"] * 3 for name in ("us", "p10_us", "p90_us")
    }
    frame = large_frame.assign(**walls)
    assert len(frame) >= 10_000
    latency, detail = latency_figure(frame.head(1), widget=True), detail_figure(widget=True)
    update_detail(detail, frame.head(1), "speed-up")
    took = []
    for timing in ("wall", "device", "wall", "device"):
        began = time.perf_counter()
        chosen = choose(timed(frame, timing), {"quant": ["bf16"], "model": ["model-0"]})  # type: ignore[arg-type]
        update_latency(latency, chosen)
        update_detail(detail, chosen, "speed-up")
        took.append(time.perf_counter() - began)
        first = next(iter(ys(latency).values()))
        assert first[0] == (303.0 if timing == "wall" else 101.0)
    assert min(took) < 0.2, took
