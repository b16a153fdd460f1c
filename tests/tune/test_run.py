"""Cells one after another within a budget, on a bench that is no GPU."""

import json
from pathlib import Path

import pytest
from fake_bench import Clock, FakeBench, FakeWorkshop, costs, opener
from moe_kernels.tuning import find_config

from workbench.devices import DeviceInfo
from workbench.errors import InvalidInput
from workbench.spec import RunSpec
from workbench.tune import run
from workbench.tune.run import TuneRequest, estimate_s, make_problem, parse_tokens, plan_cells, tune

H200 = 232448
GPU = DeviceInfo(type="cuda", name="NVIDIA H200", torch_device="cuda:0", capability=(9, 0), memory_bytes=140 * 2**30)
CPU = DeviceInfo(type="cpu", name="some CPU", torch_device="cpu", memory_bytes=2**36)


@pytest.fixture(autouse=True)
def all_can_run(monkeypatch):
    monkeypatch.setattr(run, "find_reasons", lambda spec, device: [])


def request_for(out, tokens=(1, 8), seconds=None, **fields):
    spec = RunSpec.from_flat({"model": "qwen3-30b-a3b", "moe_backend": "triton", **fields})
    return TuneRequest(spec=spec, tokens=tokens, out=out, seconds=seconds)


def go(request, bench, **options):
    workshop = FakeWorkshop(bench)
    lines = []
    report = tune(request, GPU, H200, opener(workshop), progress=lines.append, clock=bench.clock, **options)
    return report, lines, workshop


def rows_of(out):
    (path,) = Path(out).rglob("*_modes.json")
    return json.loads(path.read_text(encoding="utf-8"))


def test_every_cell_is_searched_and_written(tmp_path, monkeypatch):
    report, lines, _ = go(request_for(tmp_path), FakeBench(costs))
    assert report.complete
    assert len(report.written) == 3  # files, each named once
    assert [line.split(":")[0] for line in report.lines] == ["1 token", "8 tokens"]
    rows = rows_of(tmp_path)
    assert list(rows) == ["1", "8"]
    assert rows["8"]["us"] == pytest.approx(costs(rows["8"]), abs=0.01)
    assert any(line.startswith("[2/2] 8 tokens: up: ") for line in lines)
    monkeypatch.setenv("MOE_WORKBENCH_CONFIG_DIR", str(tmp_path))
    found = find_config(make_problem(request_for(tmp_path).spec, _shape(), 8), "NVIDIA H200", H200)
    assert found.config == {key: rows["8"][key] for key in ("up", "down", "PDL")}


def _shape():
    from workbench.models.shapes import model_shape

    return model_shape(RunSpec(model="qwen3-30b-a3b"))


def test_a_second_run_replaces_a_row_only_by_a_faster_one(tmp_path):
    go(request_for(tmp_path), FakeBench(costs))
    first = rows_of(tmp_path)
    old = {key: first["8"][key] for key in ("up", "down", "PDL")}

    # Every candidate got slower since, the old row did not.
    slower = FakeBench(lambda c: costs(c) if c == old else costs(c) + 50)
    report, _, _ = go(request_for(tmp_path, tokens=(8,)), slower)
    assert rows_of(tmp_path) == first
    assert "the row that was there stays" in report.lines[0]
    assert report.written == []

    # The old row got slower.
    report, _, _ = go(request_for(tmp_path, tokens=(8,)), FakeBench(lambda c: 10_000.0 if c == old else costs(c)))
    again = rows_of(tmp_path)
    assert again["8"] != first["8"]
    assert again["1"] == first["1"]
    assert "written" in report.lines[0]


def test_what_is_packaged_is_compared_with(tmp_path):
    packaged = find_config(make_problem(request_for(tmp_path).spec, _shape(), 8), "NVIDIA H200", H200).config
    assert packaged is not None
    bench = FakeBench(lambda config: 1.0 if config == packaged else costs(config))
    go(request_for(tmp_path, tokens=(8,)), bench)
    assert {key: rows_of(tmp_path)["8"][key] for key in ("up", "down", "PDL")} == packaged


def test_the_budget_ends_it_with_what_there_is(tmp_path):
    clock = Clock()
    bench = FakeBench(costs, clock=clock, open_s=1.0)
    report, _, workshop = go(request_for(tmp_path, tokens=(1, 8, 32), seconds=60.0), bench)
    assert clock.now < 66.0
    assert len(workshop.cells) == 3  # each has its share
    assert list(rows_of(tmp_path)) == ["1", "8", "32"]
    assert all("no time for" in line for line in report.lines)


def test_cells_without_time_are_named(tmp_path):
    clock = Clock()
    bench = FakeBench(costs, clock=clock, open_s=100.0)
    report, _, _ = go(request_for(tmp_path, seconds=10.0), bench)
    assert not report.complete
    assert report.lines[1] == "8 tokens: no time was left"
    assert list(rows_of(tmp_path)) == ["1"]


def test_a_lost_device_keeps_earlier_cells(tmp_path):
    cells = plan_cells(request_for(tmp_path), H200, "NVIDIA H200")
    first = len(cells[0].up.kept) + len(cells[0].down.kept) + 30
    report, _, _ = go(request_for(tmp_path, tokens=(1, 8, 32)), FakeBench(costs, lost_after=first))
    assert not report.complete
    assert report.lines[-1].startswith("Ended early: the device can run nothing more in this process (an illegal")
    assert list(rows_of(tmp_path)) == ["1"]


def test_wrong_candidates_are_told(tmp_path):
    bench = FakeBench(costs, lambda c: "wrong: NaN or infinity in the output" if c["up"].get("SWAP_AB") else "")
    report, lines, _ = go(request_for(tmp_path, tokens=(8,)), bench)
    assert "dropped" in report.lines[0]
    assert any("dropped: up inline" in line and "swap" in line and "NaN or infinity" in line for line in lines)
    assert not rows_of(tmp_path)["8"]["up"]["SWAP_AB"]


def test_a_device_that_cannot_run_it_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.undo()
    with pytest.raises(InvalidInput, match=r"^moe_backend: tuning cannot run on some CPU: .*cuda, not cpu\.$"):
        tune(request_for(tmp_path), CPU, H200, opener(FakeWorkshop(FakeBench(costs))))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["", "0", "1,x", "1,-2", "1.5", "9999999", "1,,2"])
def test_token_counts_are_checked(text):
    with pytest.raises(InvalidInput, match=r"^tokens: must be whole numbers from 1 to 1048576, as in 1,8,32, not "):
        parse_tokens(text)


def test_token_counts_are_put_in_order():
    assert parse_tokens("32, 1,8,8") == (1, 8, 32)


def test_problems_are_those_that_are_looked_up():
    spec = RunSpec.from_flat({"model": "mixtral-8x7b", "tp_size": 2, "quant": "int4", "group_size": 64})
    from workbench.models.shapes import model_shape

    problem = make_problem(spec, model_shape(spec), 8)
    assert (problem.intermediate_size, problem.quant, problem.dtype, problem.group_size) == (7168, "int4", "bf16", 64)
    fp16 = make_problem(spec.replace(quant="fp16"), model_shape(spec), 8)
    assert (fp16.dtype, fp16.group_size) == ("fp16", 0)


def test_the_estimate_grows_with_the_work(tmp_path):
    few, many = (
        plan_cells(request_for(tmp_path), H200, "NVIDIA H200"),
        plan_cells(request_for(tmp_path, tokens=(1, 8, 128)), H200, "NVIDIA H200"),
    )
    assert 10 < estimate_s(few, 14) < estimate_s(many, 14) < estimate_s(many, 2)
