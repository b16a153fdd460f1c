"""Figures of whole steps: the prefill and the decode step against the batch, and where their time goes."""

from __future__ import annotations

import math
import re
from typing import Any

import pandas as pd
import pytest

from workbench.engines.fake import FakeEngine
from workbench.plots import (
    correctness_figure,
    latency_figure,
    latency_svg,
    profile_layers,
    profile_parts,
    profile_svg,
    profile_table,
    results_table,
    speedup_matrix,
    subjects,
    timed,
    timing_of,
)
from workbench.record import ProfileRow, Record
from workbench.spec import RunSpec
from workbench.sweeps.results import Results

STEP = RunSpec.from_flat({"subject": "step", "quant": "fp32"})


def lines(figure: Any) -> dict[str, Any]:
    return {t.name: t for t in figure.data if t.type == "scatter" and t.visible is True and t.mode == "lines+markers"}


@pytest.fixture(scope="module")
def frame() -> pd.DataFrame:
    engine = FakeEngine(latency=lambda spec: 1000.0 * spec.size / (2 if spec.modes.attention_backend == "sdpa" else 1))
    points = [STEP.replace(attention_backend=a, batch_size=b) for a in ("reference", "sdpa") for b in (1, 8, 32)]
    return Results(tuple(engine.run(spec) for spec in points)).frame()


def test_decode_prefill_and_total_are_drawn_against_the_batch(frame: pd.DataFrame) -> None:
    decode = lines(latency_figure(frame))
    assert list(decode) == ["reference attention", "sdpa attention"]
    assert list(decode["sdpa attention"].x) == [1, 8, 32]
    assert list(decode["sdpa attention"].y) == pytest.approx([500, 4000, 16000])
    prefill = latency_figure(timed(frame, "prefill"))
    assert list(lines(prefill)["sdpa attention"].y) == pytest.approx([500 * 4.125, 4000 * 4.125, 16000 * 4.125])
    assert prefill.layout.yaxis.title.text == "median time of the prefill (µs)"
    assert prefill.layout.xaxis.title.text == "sequences in a batch"
    total = lines(latency_figure(timed(frame, "total")))["sdpa attention"]
    assert list(total.y) == pytest.approx([500 * 11.125, 4000 * 11.125, 16000 * 11.125])
    text = prefill.data[1].text[0]
    assert "batch 1" in text
    assert "decode: " in text
    assert "tokens/s" in text
    assert "128" in prefill.layout.title.text


def test_times_are_changed_from_one_to_another_and_back(frame: pd.DataFrame) -> None:
    prefill = timed(frame, "prefill")
    assert (timing_of(frame), timing_of(prefill)) == ("device", "prefill")
    assert timed(prefill, "total")["latency_us"].tolist() == frame["total_us"].tolist()
    assert timed(timed(prefill, "decode"), "decode")["latency_us"].tolist() == frame["decode_us"].tolist()
    pd.testing.assert_frame_equal(timed(prefill, "device")[frame.columns], frame)


def test_a_step_without_decode_has_a_gap_that_says_so() -> None:
    engine = FakeEngine()
    points = [STEP.replace(output_len=1, batch_size=b) for b in (1, 4)]
    figure = latency_figure(timed(Results(tuple(map(engine.run, points))).frame(), "decode"))
    gaps = next(trace for trace in figure.data if trace.name == "not measured")
    assert list(gaps.x) == [1, 4]
    assert "No decode step follows its prefill." in gaps.text[0]


def test_speedups_are_of_the_shown_time_and_of_equal_lengths(frame: pd.DataFrame) -> None:
    matrix = speedup_matrix(timed(frame, "prefill"), {"attention_backend": "reference"})
    assert matrix.sizes == [1, 8, 32]
    assert matrix.ratio[1] == pytest.approx([2.0, 2.0, 2.0])
    longer = frame.assign(input_len=[128] * 3 + [256] * 3)
    assert speedup_matrix(longer, {"attention_backend": "reference"}).ratio[1] == [None] * 3


def test_the_correctness_of_a_step_says_what_it_compares(frame: pd.DataFrame) -> None:
    wrong = frame.assign(first_bad_layer=[3.0] + [math.nan] * 5, top1_agreement=[0.5] * 6)
    figure = correctness_figure(wrong)
    text = lines(figure)["reference attention"].text
    assert "same most likely token: 50.0% of positions" in text[0]
    assert "first layer above its budget: 3" in text[0]
    assert "first layer above" not in text[1]
    assert figure.layout.xaxis.title.text == "sequences in a batch"


def test_table_and_svg_of_steps(frame: pd.DataFrame) -> None:
    table = results_table(frame)
    assert "median decode step at batch" in table
    assert "KV cache (MB)" in table
    assert table.count("2.06 ms") == 1  # the prefill of batch 1 with sdpa
    assert "sequences in a batch" in latency_svg(frame)
    assert subjects(frame) == ("step",)
    assert subjects(pd.DataFrame()) == ()


def row(part: str, kind: Any, time: float, layer: int | None = 0, floor: int | None = None) -> ProfileRow:
    return ProfileRow(phase="decode", layer=layer, part=part, kind=kind, time_us=time, floor_bytes=floor)


@pytest.fixture
def record() -> Record:
    made = FakeEngine().run(STEP)
    rows = (
        *(row("moe", "moe", 60.0, layer, 4_000_000) for layer in range(2)),
        *(row("moe", "elementwise", 10.0, layer) for layer in range(2)),
        row("attention", "attention", 30.0, 1, 1_000_000),
        row("lm_head", "gemm", 25.0, None),
    )
    roofs = made.environment.model_copy(update={"roofs": {"read": 1e11}})
    return made.model_copy(update={"profile": rows, "environment": roofs})


def test_a_profile_adds_up_by_part_and_by_layer(record: Record) -> None:
    parts = profile_parts(record.profile, "decode")
    assert [(p.name, p.time_us, p.count, p.floor_bytes) for p in parts] == [
        ("moe", 140.0, 4, 8_000_000),
        ("attention", 30.0, 1, 1_000_000),
        ("lm_head", 25.0, 1, None),
    ]
    assert [(p.name, p.time_us, p.floor_bytes) for p in profile_layers(record.profile, "decode")] == [
        ("0", 70.0, 4_000_000),
        ("1", 100.0, 5_000_000),
    ]
    assert profile_parts(record.profile, "prefill") == []


def test_the_largest_rows_come_first_with_the_floor_of_their_part(record: Record) -> None:
    header, rows = profile_table(record.profile, "decode", 1e11)
    assert header == ("part", "kernels", "time", "share", "count", "floor of the part")
    assert rows[0] == ("moe", "moe", "120 µs", "62%", "2", "80.0 µs")
    assert [r[0] for r in rows] == ["moe", "attention", "lm_head", "moe"]
    assert rows[3][5] == rows[2][5] == ""
    assert len(profile_table(record.profile, "decode", most=1)[1]) == 1


def test_bars_are_as_long_as_their_time_and_a_line_marks_the_floor(record: Record) -> None:
    svg = profile_svg(record, "decode")
    widths = {found[1]: float(found[0]) for found in re.findall(r'width="([\d.]+)"[^>]*><title>(\w+, \w+)', svg)}
    assert widths["moe, moe"] / widths["attention, attention"] == pytest.approx(4.0, rel=1e-2)
    assert "floor 80.0 µs" in svg
    assert "least time that its bytes need" in svg
    assert "no profile of the prefill here" in profile_svg(record, "prefill")
    unknown = record.model_copy(update={"environment": record.environment.model_copy(update={"roofs": {}})})
    assert "floor" not in profile_svg(unknown, "decode")
