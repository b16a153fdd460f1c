"""Claims beside own figures, what graphs cost, and lessons, from rows with known times."""

from __future__ import annotations

import pandas as pd
import pytest

from workbench.devices import DeviceInfo
from workbench.engines.fake import FakeEngine
from workbench.errors import InvalidInput
from workbench.models.network.config import network_config
from workbench.report.claims import CLAIMS, beside
from workbench.report.graphs import captures_table, room_lesson, room_table
from workbench.report.table import results_table
from workbench.report.winners import lesson, winners
from workbench.spec import RunSpec
from workbench.sweeps.presets import preset
from workbench.sweeps.results import Results

GIB = 2**30
H200 = DeviceInfo(type="cuda", name="NVIDIA H200", torch_device="cuda:0", capability=(9, 0), memory_bytes=150 * GIB)


def decode_us(spec: RunSpec) -> float:
    """Eager 40 ms; a graph takes it to 10; compiled without MoE to 8, with it to 4; a larger batch gains nothing."""
    modes = spec.modes
    if spec.size > 8:
        return 40e3
    compiled = {"all": 4e3, "skip_moe": 8e3}[str(modes.compile_scope)]
    return 40e3 if modes.graph == "disabled" else compiled if modes.compile != "none" else 10e3


def ran(name: str, **values: object) -> Results:
    engine = FakeEngine(latency=decode_us, device=H200)
    sweep = preset(name, H200)
    base = sweep.base.replace(samples=5, **values)
    points = [spec for spec in sweep.model_copy(update={"base": base}).points() if spec.modes.quant == "bf16"]
    return Results(tuple(engine.run(spec) for spec in points))


@pytest.fixture(scope="module")
def compiled() -> pd.DataFrame:
    return ran("moe-torch-compile").frame()


@pytest.fixture(scope="module")
def graphs() -> Results:
    return ran("cuda-graph-attention")


def test_claims_are_those_of_the_pull_requests_tables() -> None:
    gains = {name: [round(claim.gain, 2) for claim in claims] for name, claims in CLAIMS.items()}
    assert gains == {"moe-torch-compile": [1.0, 1.25, 1.35], "cuda-graph-attention": [1.31, 1.12, 3.94, 4.6, 3.09]}
    for claims in CLAIMS.values():
        for claim in claims:
            assert RunSpec.from_flat({"subject": "step", **claim.fields, **claim.against})


def test_own_figures_stand_beside_each_claim_for_every_other_mode(compiled: pd.DataFrame) -> None:
    found = beside("moe-torch-compile", compiled)
    claimed = ["claimed_ms", "claimed_against_ms", "claimed_gain"]
    own = ["own_ms", "own_against_ms", "own_gain", "verdict"]
    assert list(found.columns) == ["what", "fusion", *claimed, *own]
    assert found["own_against_ms"].tolist() == pytest.approx([10] * 6)
    assert found["what"].tolist() == [claim.what for claim in CLAIMS["moe-torch-compile"] for _ in range(2)]
    assert found["fusion"].tolist() == ["off", "on"] * 3
    assert found["own_ms"].tolist() == pytest.approx([10, 10, 8, 8, 4, 4])
    assert found["own_gain"].tolist() == pytest.approx([1, 1, 1.25, 1.25, 2.5, 2.5])
    assert found["verdict"].tolist() == ["", "", "wins", "wins", "wins", "wins"]


def test_what_was_not_measured_is_missing_beside_its_claim(graphs: Results) -> None:
    frame = graphs.frame()
    found = beside("cuda-graph-attention", frame[frame["attention_backend"] == "triton"])
    assert found["own_gain"].tolist() == pytest.approx([4, float("nan"), 4, 4, 4], nan_ok=True)
    assert found["own_ms"].isna().tolist() == [False, True, False, False, False]
    without = frame[(frame["attention_backend"] == "triton") & (frame["graph"] == "full")]
    assert beside("cuda-graph-attention", without)["own_gain"].isna().all()
    assert beside("cuda-graph-attention", without)["own_ms"].notna().sum() == 4
    for name, claims in CLAIMS.items():
        empty = beside(name, Results().frame())
        assert len(empty) == len(claims)
        assert empty["own_ms"].isna().all()
    with pytest.raises(InvalidInput, match="claims: must be those of moe-torch-compile or cuda-graph-attention"):
        beside("steps", frame)


def test_every_captured_size_has_a_row() -> None:
    engine = FakeEngine(device=H200)
    spec = RunSpec.from_flat({"subject": "step", "graph": "full", "max_capture_batch": 9, "quant": "fp32"})
    table = captures_table(
        Results((engine.run(spec), engine.run(spec.replace(graph="disabled", max_capture_batch=None))))
    )
    assert table["size"].tolist() == [9, 8, 4, 2, 1]
    assert table["MiB"].tolist() == [30, 1, 1, 1, 1]
    assert table["kernels"].tolist() == [364] * 5
    assert set(table["model"]) == {"smollm2-135m"}
    assert len(captures_table(Results())) == 0


def test_the_room_is_what_weights_work_and_graphs_leave() -> None:
    spec = RunSpec.from_flat({"subject": "step", "model": "llama-3-8b", "graph": "full", "attention_backend": "triton"})
    record = FakeEngine(device=H200).run(spec)
    held = {"weight_bytes": 15 * GIB, "graph_bytes": GIB, "kv_cache_bytes": 2 * GIB, "peak_bytes": 22 * GIB}
    record = record.model_copy(update={"memory": record.memory.model_copy(update=held)})
    row = room_table(Results((record,))).iloc[0]
    each = network_config("llama-3-8b").kv_bytes_per_token(2)
    assert row["KV_bytes_a_token"] == each == 2 * 32 * 8 * 128 * 2
    room = (150 - 15 - 4) * GIB  # 22 at the peak, of which 4 are to work in
    assert row["room_tokens"] == room // each
    assert row["room_tokens_with_graphs"] == (room - GIB) // each
    assert row["room_lost"] == pytest.approx(1 / 131)
    said = room_lesson(room_table(Results((record,))))
    assert said.startswith(
        "Graphs took at most 0.763% of the KV cache's room: 8,192 of 1,073,152 tokens with 1,024.0 MiB"
    )
    assert room_lesson(room_table(Results())) == "Graphs and the KV cache: no step was measured with a graph."


def test_a_lesson_is_worked_out_from_what_was_found(graphs: Results) -> None:
    frame = graphs.frame()
    frame = frame[frame["attention_backend"] == "triton"]
    places = ("model", "mla_decode", "batch_size")
    found = winners(frame, {"graph": "disabled"}, among=("graph",), problem=places)
    said = lesson(found, "A graph")
    assert said.startswith("A graph at 9 problems: wins 6 times, ties 3 times, loses 0 times. Speed-up from 1.00 (")
    assert "batch 32) to 4.00 (" in said
    assert said.endswith("median 4.00.")
    turned = winners(frame, {"graph": "full"}, among=("graph",), problem=places)
    assert "wins 0 times, ties 3 times, loses 6 times" in lesson(turned, "None")
    assert lesson(found[:0], "A graph") == "A graph: nothing was measured both with and without it."


def test_the_report_has_what_graphs_and_compiling_cost(compiled: pd.DataFrame) -> None:
    header = results_table(ran("moe-torch-compile")).header
    assert {"fusion", "compile_scope", "capture (s)", "graphs (MiB)", "kernels in graph", "graph breaks"} <= set(header)
    eager = RunSpec.from_flat({"subject": "step", "quant": "fp32"})
    assert "capture (s)" not in results_table(Results((FakeEngine().run(eager),))).header
