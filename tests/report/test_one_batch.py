"""Steps in the words of `bench_one_batch`: its lines, its file, and every digit read back."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stand_in import NASTY

from workbench.engines.fake import FakeEngine
from workbench.errors import InvalidInput
from workbench.record import Metric, Record, Status
from workbench.report.one_batch import OneBatch, one_batch_jsonl, one_batch_lines, read_one_batch
from workbench.report.page import page
from workbench.report.summary import summary
from workbench.report.winners import verdicts, winners
from workbench.spec import RunSpec
from workbench.sweeps.results import Results

STEP = RunSpec.from_flat({"subject": "step", "quant": "fp32", "batch_size": 4, "input_len": 100, "output_len": 3})
KEYS = [
    *("run_name", "batch_size", "input_len", "output_len", "prefill_latency", "prefill_throughput"),
    *("median_decode_latency", "median_decode_throughput", "total_latency", "overall_throughput"),
]


def measured(prefill: float = 50_000.0, decode: tuple[float, ...] = (8000.0, 10_000.0), spec: RunSpec = STEP) -> Record:
    """A step with these times in microseconds."""
    record = FakeEngine().run(spec)
    series = {"prefill": (prefill,), "decode": decode, "total": (prefill + sum(decode),)}
    metrics = {name: Metric.from_samples(times, "us") for name, times in series.items() if times}
    return record.model_copy(update={"metrics": metrics})


def test_the_lines_are_those_that_bench_one_batch_prints() -> None:
    assert one_batch_lines(measured()) == [
        "Prefill. latency: 0.05000 s, throughput:   8000.00 token/s",
        "Decode 0. Batch size: 4, latency: 0.00800 s, throughput:    500.00 token/s",
        "Decode 1. Batch size: 4, latency: 0.01000 s, throughput:    400.00 token/s",
        "Decode.  median latency: 0.00900 s, median throughput:    444.44 token/s",
        "Total. latency:  0.068 s, throughput:   6058.82 token/s",
    ]


def test_five_decode_steps_are_printed_and_none_where_the_prefill_gives_all() -> None:
    many = one_batch_lines(measured(decode=tuple(1000.0 + i for i in range(40)), spec=STEP.replace(output_len=21)))
    assert [line.split(".")[0] for line in many] == ["Prefill", *(f"Decode {i}" for i in range(5)), "Decode", "Total"]
    twice = one_batch_lines(measured(decode=(1000.0, 1001.0, 1000.0, 1001.0)))  # two repeats of two steps
    assert [line.split(".")[0] for line in twice] == ["Prefill", "Decode 0", "Decode 1", "Decode", "Total"]
    alone = measured(decode=(), spec=STEP.replace(output_len=1))
    assert [line.split(".")[0] for line in one_batch_lines(alone)] == ["Prefill", "Total"]
    row = json.loads(one_batch_jsonl(Results((alone,))))
    assert list(row) == [name for name in KEYS if "decode" not in name]


def test_the_file_has_the_keys_in_seconds_and_tokens_a_second() -> None:
    text = one_batch_jsonl(
        Results((measured(), FakeEngine().run(RunSpec()), measured(spec=STEP.replace(batch_size=8))))
    )
    rows = [json.loads(line) for line in text.splitlines()]
    assert [list(row) for row in rows] == [KEYS, KEYS]
    assert [row["batch_size"] for row in rows] == [4, 8]
    assert rows[0]["run_name"] == "smollm2-135m --quant fp32"
    assert rows[0]["prefill_latency"] == 0.05
    assert rows[0]["prefill_throughput"] == pytest.approx(400 / 0.05)
    assert rows[0]["median_decode_throughput"] == pytest.approx(4 / 0.009)
    assert rows[0]["overall_throughput"] == pytest.approx(4 * 103 / 0.068)


@given(st.floats(1e-2, 1e9), st.lists(st.floats(1e-2, 1e8), min_size=1, max_size=3))
@settings(max_examples=80, deadline=None)
def test_every_digit_is_read_back(prefill: float, decode: list[float]) -> None:
    record = RECORD.model_copy(
        update={
            "metrics": {
                "prefill": Metric.from_samples([prefill], "us"),
                "decode": Metric.from_samples(decode, "us"),
                "total": Metric.from_samples([prefill + sum(decode)], "us"),
            }
        }
    )
    made = OneBatch.of(record)
    assert read_one_batch(one_batch_jsonl(Results((record,)))) == [made]
    assert read_one_batch(made.to_json() + "\n\n" + made.to_json()) == [made, made]


RECORD = measured()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"batch_size": 1.5}, "line 1: batch_size: must be a whole number, not 1.5"),
        ({"prefill_latency": "fast"}, "line 1: prefill_latency: must be a number, not 'fast'"),
        ({"prefill_latency": 0}, "line 1: prefill_latency: must be above 0 and finite, not 0"),
        ({"total_latency": None}, "line 1: total_latency: must be a number, not None"),
        ({"run_name": 3}, "line 1: run_name: must be text, not 3"),
        ({"speed": 3}, "line 1: one_batch: 'speed' is none of its fields; there are run_name, "),
    ],
)
def test_what_is_no_such_line_is_one_sentence(change: dict[str, object], sentence: str) -> None:
    row = {**json.loads(OneBatch.of(RECORD).to_json()), **change}
    with pytest.raises(InvalidInput) as raised:
        read_one_batch(json.dumps(row))
    assert str(raised.value).startswith(sentence)


def test_only_measured_steps_have_lines() -> None:
    with pytest.raises(InvalidInput, match="subject: must be step for the lines of bench_one_batch, not moe_layer"):
        one_batch_lines(FakeEngine().run(RunSpec()))
    failed = FakeEngine(fail=lambda spec: Status.CRASHED).run(STEP)
    with pytest.raises(InvalidInput, match="record: has no times of a prefill and a total; its status is crashed"):
        OneBatch.of(failed)
    with pytest.raises(InvalidInput, match="format: one_batch is of measured steps, and these results have none"):
        one_batch_jsonl(Results((failed, FakeEngine().run(RunSpec()))))


def test_summary_and_page_show_steps_and_escape_what_they_hold() -> None:
    evil = measured().model_copy(update={"notes": (NASTY,)})
    rows = tuple(row.model_copy(update={"part": "<b>moe</b>"}) for row in evil.profile)
    evil = evil.model_copy(update={"profile": rows})
    results = Results((evil, measured(decode=(4000.0,), spec=STEP.replace(attention_backend="reference"))))
    text = summary(results)
    assert text.startswith("### Whole-model step sweep")
    assert "| decode step |" in text
    assert "| prefill |" in text
    assert "2.25x" in text
    assert "attention_backend" in text
    shown = page(results)
    assert "Latency, decode step" in shown
    assert "Latency, prefill" in shown
    assert "Where the time goes: smollm2-135m" in shown
    assert "<b>moe</b>" not in shown
    assert "&lt;b&gt;moe&lt;/b&gt;" in shown


def test_a_report_of_layers_and_steps_has_figures_of_each() -> None:
    shown = page(Results((measured(), FakeEngine().run(RunSpec()))))
    assert "<h1>Sweep of MoE layers and whole-model steps</h1>" in shown
    assert "Latency of layers" in shown
    assert "Latency of steps, prefill" in shown


def test_winners_of_steps_are_told_by_their_batches() -> None:
    spec = STEP.replace(output_len=2)
    points = [
        measured(decode=(time,), spec=spec.replace(attention_backend=backend, batch_size=batch))
        for backend, times in (("reference", (200.0, 200.0)), ("sdpa", (100.0, 400.0)))
        for batch, time in zip((1, 8), times, strict=True)
    ]
    against = {"attention_backend": "reference"}
    problem = ("model", "tp_size", "quant", "batch_size")
    found = winners(Results(tuple(points)).frame(), against, among=["attention_backend"], problem=problem)
    assert found["speedup"].tolist() == [2.0, 0.5]
    assert verdicts(found)[["wins", "loses"]].to_numpy().tolist() == [["1", "8"]]
