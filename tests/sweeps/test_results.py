"""Results: the table, filters, exports that read back equal, and what `load` refuses."""

from __future__ import annotations

import csv
import io
import json
import math
import time
from pathlib import Path
from typing import NoReturn

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stand_in import NASTY, failed_record, ok_record, records

from workbench.errors import InvalidInput
from workbench.record import Metric, Record, Status
from workbench.spec import FIELDS, RunSpec
from workbench.sweeps.exports import csv_text, parquet
from workbench.sweeps.frame import COLUMNS
from workbench.sweeps.loader import load, recordings
from workbench.sweeps.results import Results
from workbench.sweeps.spec import SweepSpec


def refuse(text: str) -> NoReturn:
    raise AssertionError(f"{text} in strict JSON")


def some() -> Results:
    specs = list(SweepSpec(axes={"quant": ["fp32", "bf16"], "num_tokens": [1, 16]}).points())
    made = [ok_record(spec, 1.23456789e-5 * (i + 1)) for i, spec in enumerate(specs[:3])]
    return Results((*made, failed_record(specs[3], Status.OUT_OF_MEMORY, NASTY)))


@given(st.lists(records(), max_size=4))
@settings(max_examples=40, deadline=None)
def test_exports_read_back_equal(tmp_path_factory: pytest.TempPathFactory, made: list[Record]) -> None:
    folder = tmp_path_factory.mktemp("r")
    results = Results(tuple(made))
    results.to_jsonl(folder / "r.jsonl")
    results.to_parquet(folder / "r.parquet")
    assert load(folder / "r.jsonl").records == results.records
    assert load(folder / "r.parquet").records == results.records
    for line in (folder / "r.jsonl").read_text(encoding="utf-8").split("\n")[:-1]:
        json.loads(line, parse_constant=refuse)
    rows = list(csv.DictReader(io.StringIO(results.to_csv(), newline="")))
    assert len(rows) == len(made)
    for row, record in zip(rows, made, strict=True):
        assert row["latency_us"] == ("" if record.latency_us is None else repr(record.latency_us))
        assert row["reason"] == record.reason
        assert row["model"] == record.spec.model
        assert row["key"] == record.key
        assert row["top_k"] == ("" if record.spec.top_k is None else str(record.spec.top_k))


def test_csv_keeps_every_digit_and_leaves_missing_values_empty() -> None:
    rows = list(csv.DictReader(io.StringIO(csv_text(some()), newline="")))
    assert float(rows[0]["latency_us"]) == some().records[0].latency_us
    assert rows[0]["latency_us"].startswith("1.23456789")
    failed = rows[3]
    assert failed["status"] == "out_of_memory"
    assert failed["latency_us"] == failed["error_ratio"] == failed["compile_s"] == ""
    assert "nan" not in csv_text(some()).lower()


def test_parquet_is_flat_and_may_leave_samples_out(tmp_path: Path) -> None:
    path = some().to_parquet(tmp_path / "r.parquet")
    table = pq.read_table(path)
    assert table.column_names == [*FIELDS, *COLUMNS, "record"]
    assert table["latency_us"].to_pylist()[3] is None
    assert table["num_tokens"].to_pylist() == [1, 16, 1, 16]
    assert pq.ParquetFile(path).metadata.row_group(0).column(0).compression == "ZSTD"
    small = some().to_parquet(tmp_path / "small.parquet", samples=False)
    kept = load(small).records
    assert [r.metrics["latency"].samples for r in kept[:3]] == [()] * 3
    assert [r.latency_us for r in kept] == [r.latency_us for r in some().records]
    assert len(parquet(some(), samples=False)) < len(parquet(some()))


def test_the_frame_has_the_promised_columns() -> None:
    frame = some().frame()
    promised = {
        *FIELDS, "status", "reason", "latency_us", "p10_us", "p90_us", "total_error", "kernel_error", "mode_error",
        "error_ratio", "compile_s", "capture_s", "weight_bytes", "peak_bytes", "graph_bytes", "floor_share",
        "distinct_experts", "device_name", "anchor", "key",
    }  # fmt: skip
    assert promised <= set(frame.columns)
    assert frame["error_ratio"].tolist()[0] == 0.25
    assert math.isnan(frame["error_ratio"].tolist()[3])
    assert frame["floor_share"].tolist()[0] == pytest.approx(1 / 3)
    results = some()
    assert results.frame() is results.frame()
    copy = results.to_pandas()
    copy["model"] = "changed"
    assert set(results.frame()["model"]) == {"smollm2-135m"}
    assert list(Results().frame().columns) == list(frame.columns)


def test_the_frame_has_the_time_from_an_idle_device_where_there_is_one() -> None:
    plain = ok_record(RunSpec(), 26.0)
    wall = Metric.from_samples([0.1, 0.108, 0.116], "ms")
    both = plain.model_copy(update={"metrics": plain.metrics | {"wall": wall}})
    frame = Results((plain, both)).frame()
    assert frame["latency_us"].tolist() == [26.0, 26.0]
    assert frame.loc[1, ["wall_us", "wall_p10_us", "wall_p90_us"]].tolist() == pytest.approx([108.0, 101.6, 114.4])
    assert frame.loc[0, ["wall_us", "wall_p10_us", "wall_p90_us"]].isna().all()


def test_filters_and_sums() -> None:
    results = some()
    assert [r.spec.point.num_tokens for r in results.filter(quant="bf16").records] == [1, 16]
    assert results.filter(num_tokens=[1], quant="fp32").records == results.records[:1]
    assert results.filter(status=Status.OK).records == results.records[:3]
    assert results.filter(top_k=None).records == results.records
    assert results.filter(top_k=2).records == ()
    assert results.filter(quant="bf16").frame()["num_tokens"].tolist() == [1, 16]
    with pytest.raises(InvalidInput, match="colour: no such column; there are subject, "):
        results.filter(colour="red")
    both = Results(results.records[:1], ("a",)) + Results(results.records[1:], ("a", "b"))
    assert both.records == results.records
    assert both.notes == ("a", "b")
    assert repr(results) == "<Results: 3 ok, 1 failed, 0 unsupported>"


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("x.jsonl", b"hello\nworld\n", "is no file of results; must be a results folder, a .jsonl or a .parquet file"),
        ("x.parquet", b"hello", "is no file of results"),
        ("x.parquet", b"PAR1 and then nothing", "cannot be read as Parquet"),
        ("x.csv", b"a,b\n1,2\n", "is an export for people; must be"),
        (
            "sweep.json",
            SweepSpec(axes={"num_tokens": [1]}).to_json().encode(),
            "describes a sweep and holds no results",
        ),
        ("x.jsonl", b'{"version": 7}\n', "x.jsonl, line 1: version: must be 1, not 7"),
        ("x.jsonl", b'{"status": "ok"}\n', "x.jsonl, line 1: spec: is missing; environment: is missing"),
        (
            "x.jsonl",
            b'{"version": ' + b"[" * 100_000 + b"\n{}\n",
            "line 1: not valid JSON (recursion limit exceeded",
        ),
        ("x.jsonl", b'{"a": "\xff"}\n{}\n', "x.jsonl, line 1: not UTF-8 text"),
    ],
)
def test_another_kind_of_file_is_recognised(tmp_path: Path, name: str, content: bytes, sentence: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InvalidInput) as caught:
        load(path)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_parquet_of_another_tool_is_named(tmp_path: Path) -> None:
    some().frame()[["model"]].to_parquet(tmp_path / "x.parquet")
    with pytest.raises(InvalidInput, match="has no column record: it was written by another tool"):
        load(tmp_path / "x.parquet")


def test_load_finds_folders_and_globs(tmp_path: Path) -> None:
    results = some()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    results.to_jsonl(tmp_path / "a" / "records.jsonl")
    results.to_parquet(tmp_path / "a" / "records.parquet")
    Results(results.records[:1]).to_parquet(tmp_path / "b" / "records.parquet")
    (tmp_path / "notes.txt").write_text("hello", encoding="utf-8")
    assert load(tmp_path / "a").records == results.records
    assert load(tmp_path / "a").folder == tmp_path / "a"
    assert load(tmp_path / "b").records == results.records[:1]
    everything = load(str(tmp_path / "*"))
    assert everything.records == results.records  # b's record is a's: kept once
    assert everything.notes == (f"{tmp_path / 'notes.txt'} holds no results and was left out.",)
    for path, sentence in [
        ("none", "does not exist"),
        ("*.none", "nothing matches"),
        ("*.txt", "nothing that matches"),
    ]:
        with pytest.raises(InvalidInput, match=sentence):
            load(str(tmp_path / path))
    (tmp_path / "c").mkdir()
    with pytest.raises(InvalidInput, match=r"holds no records\.jsonl"):
        load(tmp_path / "c")


def test_a_broken_last_line_is_left_out_and_said(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    results = some()
    path.write_text(results.to_jsonl()[:-100], encoding="utf-8")
    found = load(path)
    assert found.records == results.records[:3]
    assert found.notes == (f"The last line of {path} is broken and was left out.",)


def test_a_file_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"out: .*none/r.csv cannot be written \(No such file or directory\)"):
        some().to_csv(tmp_path / "none" / "r.csv")
    with pytest.raises(InvalidInput, match="format: must be jsonl, parquet, csv, md, html or one_batch, not 'doc'"):
        some().write(tmp_path / "r.doc", "doc")
    assert not list(tmp_path.iterdir())


def test_recordings_are_results() -> None:
    assert isinstance(recordings(), Results)


def test_ten_thousand_records_load_and_filter_quickly(tmp_path: Path) -> None:
    base = ok_record(RunSpec(), 12.5)
    many = [
        base.model_copy(update={"spec": spec})
        for spec in SweepSpec(
            axes={"seed": list(range(1250)), "quant": ["fp32", "bf16"], "num_tokens": [1, 2, 3, 4]}
        ).points()
    ]
    Results(tuple(many)).to_parquet(tmp_path / "r.parquet")

    def best(action: object, times: int) -> float:
        found = []
        for _ in range(times):
            started = time.process_time()
            assert callable(action)
            action()
            found.append(time.process_time() - started)
        return min(found)

    results = load(tmp_path / "r.parquet")
    assert len(results) == 10_000
    results.frame()
    texts = [record.to_json() for record in many]
    plain = best(lambda: [json.loads(text) for text in texts], 3)  # so that a busy machine does not fail the test
    assert best(lambda: load(tmp_path / "r.parquet").frame(), 2) < max(1.5, 15 * plain)
    assert best(lambda: results.filter(quant="bf16", num_tokens=[1, 3]), 3) < 0.05
    assert len(results.filter(quant="bf16", num_tokens=[1, 3])) == 2500
