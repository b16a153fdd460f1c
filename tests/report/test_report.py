"""Summary and page: the numbers they say, ties, baselines, and no markup from a record's strings."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
from stand_in import HERE, NASTY, failed_record, ok_record

from workbench.errors import InvalidInput
from workbench.record import Metric, Status
from workbench.report.compare import default_baseline, describe, parse_baseline, speedups
from workbench.report.page import page
from workbench.report.summary import MOST_ROWS, code, escape, summary
from workbench.report.table import failures, name_of, results_table
from workbench.spec import Modes, RunSpec
from workbench.sweeps.results import Results
from workbench.sweeps.spec import SweepSpec
from workbench.units import microseconds

SWEEP = SweepSpec(
    axes={"quant": ["fp32", "bf16"], "moe_backend": ["reference", "torch_grouped_mm"], "num_tokens": [1, 16]}
)
TIMES = {
    ("fp32", "reference"): 40.0,
    ("fp32", "torch_grouped_mm"): 20.0,
    ("bf16", "reference"): 10.05,
    ("bf16", "torch_grouped_mm"): 10.0,
}


def some() -> Results:
    made = []
    for spec in SWEEP.points():
        latency = TIMES[str(spec.modes.quant), spec.modes.moe_backend] * spec.point.num_tokens
        made.append(ok_record(spec, latency))
    made[3] = failed_record(made[3].spec, Status.OUT_OF_MEMORY, "needs 99 GiB")
    anchor = made[0].model_copy(update={"anchor": True})
    return Results((*made, anchor), ("A note.",), command=SWEEP.command)


class Tags(HTMLParser):
    """Gathers tags, their attributes and the text between."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_speedups_ties_and_the_baseline_itself() -> None:
    frame = some().frame()
    base = default_baseline(frame)
    assert base == {"quant": "bf16", "moe_backend": "torch_grouped_mm"}  # the axes on which rows differ
    found = [str(s) for s in speedups(frame, base)]
    assert found == ["0.25x", "0.25x", "0.50x", "None", "tie", "tie", "baseline", "baseline", "0.25x"]


def test_a_baseline_of_one_axis_compares_rows_that_are_equal_in_the_others() -> None:
    found = [None if s is None else round(s.ratio, 3) for s in speedups(some().frame(), {"quant": "fp32"})]
    assert found == [1.0, 1.0, 1.0, None, 3.98, 3.98, 2.0, None, 1.0]
    with pytest.raises(InvalidInput, match="baseline: nothing with quant=fp16 was measured"):
        speedups(some().frame(), {"quant": "fp16"})


def test_other_machines_are_no_baseline() -> None:
    records = some().records
    elsewhere = HERE.model_copy(update={"device_name": "another"})
    moved = tuple(
        r.model_copy(update={"environment": elsewhere}) if r.spec.modes.quant == "fp32" else r for r in records
    )
    found = speedups(Results(moved).frame(), {"quant": "bf16"})
    assert found[:4] == [None] * 4
    assert [str(s) for s in found[4:8]] == ["baseline"] * 4


def test_a_split_that_is_as_tuned_can_be_the_baseline() -> None:
    specs = [RunSpec(modes=Modes(moe_backend="triton", split_k=split)) for split in (None, 2, 4)]
    frame = Results(tuple(ok_record(spec, us) for spec, us in zip(specs, (100.0, 50.0, 200.0), strict=True))).frame()
    base = parse_baseline(["split-k=none"])
    assert base == {"split_k": None}
    assert describe(base) == "split_k=none"
    assert [str(s) for s in speedups(frame, base)] == ["baseline", "2.00x", "0.50x"]
    assert default_baseline(frame) == base
    assert [str(s) for s in speedups(frame, {"split_k": 2})] == ["0.50x", "baseline", "0.25x"]


def test_the_table_names_what_is_not_plain_and_how_many_results_differed() -> None:
    spec = RunSpec(modes=Modes(moe_backend="triton", split_k=4, reduction="atomic", quant="int8"))
    again = ok_record(spec, 10.0, resolved={"distinct_outputs": 5, "split_k": 4, "arithmetic": "int8 x int8"})
    results = Results((again,))
    table = results_table(results)
    assert table.shared["split_k"] == "4"
    assert table.shared["reduction"] == "atomic"
    assert "group_size" not in table.shared
    assert dict(zip(table.header, table.rows[0], strict=True))["distinct outputs"] == "5"
    frame = results.frame()
    assert frame["arithmetic"].tolist() == ["int8 x int8"]
    assert frame["split_k_in_force"].tolist() == ["4"]
    assert "split_k 4, reduction atomic" in name_of(again)
    plain = results_table(Results((ok_record(RunSpec(), 10.0),)))
    assert not {"split_k", "reduction", "zero_points", "activation_scale"} & set(plain.shared)
    assert "distinct outputs" not in plain.header


def test_baselines_are_read_as_modes() -> None:
    assert parse_baseline(["quant=bf16", "moe-backend=triton"]) == {"quant": "bf16", "moe_backend": "triton"}
    with pytest.raises(InvalidInput, match=r"quant: must be fp32, bf16, fp16, fp8_tensor, .* or mxfp4, not 'fp4'"):
        parse_baseline(["quant=fp4"])
    for bad in ("model=x", "quant"):
        with pytest.raises(InvalidInput, match="baseline: must be AXIS=VALUE with an axis of "):
            parse_baseline([bad])


def test_the_table_shows_what_varies_and_says_what_does_not() -> None:
    table = results_table(some())
    assert table.header[:3] == ("quant", "moe_backend", "num_tokens")
    assert len(table.rows) == 8  # without the anchor's repeat
    first = dict(zip(table.header, table.rows[0], strict=True))
    assert first["latency"] == "40.0 us"
    assert first["p10 to p90"] == "39.7 us to 40.3 us"
    assert first["error/budget"] == "0.25"
    assert first["status"] == "ok"
    failed = dict(zip(table.header, table.rows[3], strict=True))
    assert failed["latency"] == failed["speed-up"] == failed["p10 to p90"] == ""
    assert failed["status"] == "out_of_memory"
    assert table.shared["model"] == "smollm2-135m"
    assert "quant" not in table.shared


def test_compile_mode_and_compile_time_are_two_columns() -> None:
    spec = SweepSpec(axes={"compile": ["none", "default"]})
    table = results_table(Results(tuple(ok_record(point, 5.0) for point in spec.points())))
    assert [row[table.header.index("compile")] for row in table.rows] == ["none", "default"]
    assert [row[table.header.index("compile time")] for row in table.rows] == ["", "4.2 s"]
    assert len(set(table.header)) == len(table.header)


def test_the_time_from_an_idle_device_is_a_column_where_any_record_has_it() -> None:
    specs = list(SweepSpec(axes={"quant": ["fp32", "bf16"]}).points())
    made = [ok_record(spec, 26.0) for spec in specs]
    wall = {"wall": Metric.from_samples([107.0, 108.0, 109.0], "us")}
    with_wall = made[0].model_copy(update={"metrics": made[0].metrics | wall})
    results = Results((with_wall, made[1]))
    table = results_table(results)
    at = table.header.index("from idle")
    assert [row[at] for row in table.rows] == ["108 us", ""]
    assert at in table.numbers
    assert "| from idle |" in summary(results)
    assert "- from idle: median time from an idle device, host launches included" in summary(results).splitlines()
    text = page(results, figures=False)
    assert '<th class="n">from idle</th>' in text
    assert "108 us" in text
    plain = Results(tuple(made))
    assert "from idle" not in results_table(plain).header
    assert "from idle" not in summary(plain)
    assert "idle" not in page(plain, figures=False)
    pytest.importorskip("plotly")
    assert Tags(page(results)).tags.count("h2") == Tags(page(plain)).tags.count("h2") + 2  # latency and speed-up again


def test_the_error_against_the_trained_mlp_is_shown_where_there_is_one() -> None:
    spec = RunSpec()
    whole = ok_record(spec, 5.0, resolved={"trained_mlp_error": 3.21e-7})
    sparse = ok_record(spec.replace(top_k=2), 5.0, resolved={"sparsity_error": 0.456})
    table = results_table(Results((whole, sparse)))
    shown = [dict(zip(table.header, row, strict=True)) for row in table.rows]
    assert [row["against trained MLP"] for row in shown] == ["3.2e-07", ""]
    assert [row["sparsity error"] for row in shown] == ["", "4.6e-01"]


def test_one_set_of_modes_has_no_speedup() -> None:
    spec = SweepSpec(axes={"num_tokens": [1, 2]})
    table = results_table(Results(tuple(ok_record(point, 5.0) for point in spec.points())))
    assert table.baseline == {}
    assert "speed-up" not in table.header


def test_the_summary_is_markdown_that_can_be_pasted() -> None:
    text = summary(some())
    lines = text.splitlines()
    assert lines[0] == "### MoE layer sweep"
    assert "- environment: Stand-in 9000, 2 cores, torch 2.13.0, python 3.11" in lines
    assert f"- command: `{SWEEP.command}`" in lines
    assert "- result: 7 ok, 1 failed, 0 unsupported" in lines
    assert "- A note." in lines
    rows = [line for line in lines if line.startswith("| ")]
    assert len(rows) == 9
    assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1
    assert r"| fp32 | reference | 1 | 40.0 us | 39.7 us to 40.3 us | 0.25x | 0.25 | 1.0e-03 | ok |" in rows
    assert "- **out_of_memory**, 1: needs 99 GiB<br>" in text
    assert text.count("<details>") == text.count("</details>") == 1


def test_long_tables_are_folded() -> None:
    spec = SweepSpec(axes={"num_tokens": list(range(1, MOST_ROWS + 11))})
    text = summary(Results(tuple(ok_record(point, 5.0) for point in spec.points())))
    assert "<summary>10 more rows</summary>" in text
    assert len([line for line in text.splitlines() if line.startswith("| ")]) == MOST_ROWS + 10 + 2


def nasty() -> Results:
    environment = HERE.model_copy(update={"device_name": NASTY, "host_os": NASTY, "commit": NASTY})
    made = []
    for spec in SWEEP.points():
        record = ok_record(spec.replace(model=NASTY), 5.0, environment, notes=(NASTY,), resolved={NASTY: NASTY})
        made.append(record)
    made[0] = failed_record(made[0].spec, Status.RUNTIME_ERROR, NASTY, environment)
    return Results(tuple(made), (NASTY,), command=NASTY)


def test_strings_of_a_record_never_become_html() -> None:
    plain, marked = Tags(page(some(), figures=False)), Tags(page(nasty(), figures=False, title=NASTY))
    assert set(marked.tags) <= set(plain.tags)
    assert "script" not in marked.tags
    assert {name for name, _ in marked.attributes} <= {name for name, _ in plain.attributes}
    assert any(NASTY in word for word in marked.words)


def test_strings_of_a_record_never_become_markdown() -> None:
    text = summary(nasty(), title=NASTY)
    outside = re.sub(r"- command: .*", "", text)
    assert "<script" not in outside
    assert "@someone" not in outside
    assert "](" not in outside.replace(r"\](", "")
    assert "</td>" not in outside
    command = next(line for line in text.splitlines() if line.startswith("- command: "))
    assert command.startswith("- command: ``") and command.endswith("``")  # noqa: PT018


def test_escapes() -> None:
    assert escape("a|b\n<c> *d* `e` #1") == r"a\|b &lt;c&gt; \*d\* \`e\` \#1"
    assert escape("moe_backend _a_ b__c") == r"moe_backend \_a\_ b\_\_c"
    assert code("a`b``c") == "```a`b``c```"
    assert code("`x`") == "`` `x` ``"


def test_the_page_is_self_contained_and_holds_plotly_once() -> None:
    pytest.importorskip("plotly")
    text = page(some())
    tags = Tags(text)
    assert [value for name, value in tags.attributes if name in ("src", "href")] == []
    assert 4_000_000 < len(text) < 7_000_000
    assert text.count("plotly.js v") == 1
    assert tags.tags.count("h2") == 5
    assert "40.0 us" in text
    small = page(nasty(), figures=True)
    assert "<script>alert" not in small


def test_nothing_measured_still_makes_a_report() -> None:
    spec = next(SWEEP.points())
    for results in (Results(), Results((failed_record(spec, Status.UNSUPPORTED, "needs a GPU"),))):
        assert results.totals() in summary(results)
        assert results.totals() in page(results)
    assert failures(results) == [
        (
            "unsupported",
            "needs a GPU",
            ["smollm2-135m, fp32, reference, compile none, graph disabled, balanced, 1 tokens"],
        )
    ]


LATENCIES = {
    "0 ns": 0.0,
    "870 ns": 0.87,
    "1.00 us": 0.9999,
    "12.0 us": 12.0,
    "12.3 us": 12.345,
    "999 us": 999.4,
    "1.00 ms": 999.6,
    "4.56 ms": 4.56e3,
    "1.20 s": 1.2e6,
    "2500 s": 2.5e9,
    "": float("nan"),
}


@pytest.mark.parametrize(("text", "us"), LATENCIES.items())
def test_latencies_read_well(text: str, us: float) -> None:
    assert microseconds(us) == text
