"""Running a sweep: nothing measured is lost, nothing is run twice, no failure stops the rest."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from threading import Event

import pytest
import slow_sweep
from stand_in import HERE, THERE, StandIn, cost, failed_record, no_graphs, ok_record

from workbench.errors import DeviceBusy, InvalidInput
from workbench.record import Record, Status
from workbench.spec import RunSpec
from workbench.sweeps import anchor
from workbench.sweeps.loader import load
from workbench.sweeps.results import Results
from workbench.sweeps.runner import SweepProgress, run, sweep
from workbench.sweeps.spec import SweepSpec
from workbench.sweeps.store import read_lines

SWEEP = SweepSpec(name="t", axes={"quant": ["fp32", "bf16"], "num_tokens": [1, 16, 128]})


def go(spec: SweepSpec = SWEEP, engine: StandIn | None = None, **options: object) -> Results:
    options.setdefault("exports", False)
    return sweep(spec, engine=engine or StandIn(), find=no_graphs, **options)  # type: ignore[arg-type]


def tokens(records: tuple[Record, ...]) -> list[int]:
    return [record.spec.point.num_tokens for record in records]


def test_every_point_gets_a_record_and_the_engine_stays_open(tmp_path: Path) -> None:
    engine = StandIn()
    seen: list[SweepProgress] = []
    spec = SWEEP.with_axes(graph=["disabled", "full"])
    results = go(spec, engine, out=tmp_path / "r", progress=seen.append)
    assert results.totals() == "6 ok, 0 failed, 6 unsupported"
    assert [r.spec for r in results.points] == list(spec.points())
    assert {r.reason for r in results.points if r.status is Status.UNSUPPORTED} == {"graph full needs a GPU."}
    assert len(engine.ran) == 7  # and the anchor once more at the end
    assert engine.closed == 0
    assert seen[-1].state == "done"
    assert (seen[-1].done, seen[-1].total, seen[-1].ok, seen[-1].skipped) == (12, 12, 6, 6)
    assert seen[-1].remaining_s == 0
    counts = [p.done for p in seen]
    assert counts == sorted(counts)
    assert "measuring" in {p.state for p in seen}
    stored = load(tmp_path / "r")
    assert (stored.records, stored.notes, stored.command) == (results.records, results.notes, spec.command)


def test_a_sweep_in_memory_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert go().folder is None
    assert not list(tmp_path.iterdir())


def test_failures_never_stop_a_sweep_and_larger_points_are_left_out_after_out_of_memory() -> None:
    def answer(spec: RunSpec) -> Record | None:
        if spec.modes.quant == "fp32" and spec.point.num_tokens == 1:
            raise RuntimeError("the engine itself broke")
        if spec.modes.quant == "fp32" and spec.point.num_tokens == 16:
            return failed_record(spec, Status.OUT_OF_MEMORY, "needs 99 GiB")
        return None

    engine = StandIn(answer)
    results = go(engine=engine)
    assert [str(r.status) for r in results.points] == ["runtime_error", "out_of_memory", "skipped", "ok", "ok", "ok"]
    assert results.points[0].reason == "RuntimeError: the engine itself broke"
    assert results.points[2].reason == "16 tokens already ran out of memory with the same modes"
    assert results.points[3].latency_us == pytest.approx(cost(results.points[3].spec))
    assert results.totals() == "3 ok, 2 failed, 0 unsupported, 1 skipped"
    assert results.frame()["latency_us"].isna().tolist()[:4] == [True, True, True, False]


def test_a_reason_that_is_no_text_is_kept_as_far_as_it_is(tmp_path: Path) -> None:
    engine = StandIn(lambda spec: failed_record(spec, Status.RUNTIME_ERROR, "no file \udcff\udcfe here"))
    results = go(engine=engine, out=tmp_path / "r", exports=True)
    assert {record.reason for record in results.records} == {"no file ?? here"}
    assert load(tmp_path / "r" / "records.parquet").records == results.records


def test_bad_input_that_only_the_engine_sees_is_unsupported() -> None:
    def answer(spec: RunSpec) -> Record | None:
        if spec.point.num_tokens == 16:
            raise InvalidInput("num_tokens: must be odd")
        return None

    results = go(engine=StandIn(answer))
    assert {(r.status, r.reason) for r in results.points if r.latency_us is None} == {
        (Status.UNSUPPORTED, "num_tokens: must be odd")
    }


def test_killed_at_point_k_leaves_k_records_and_resume_runs_the_rest_once(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    process = subprocess.Popen(
        [sys.executable, slow_sweep.__file__, str(folder), "0.05"],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )
    assert process.stdout is not None
    for _ in range(7):
        assert process.stdout.readline() == b"point\n"
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=30)
    said = 7 + process.stdout.read().count(b"point")
    process.stdout.close()
    lines = read_lines(folder / "records.jsonl")
    assert said <= len(lines.records) <= said + 1  # one may be on disk and not yet said
    engine = StandIn()
    results = sweep(slow_sweep.SWEEP, out=folder, resume=True, engine=engine, exports=False, find=no_graphs)
    fresh = [spec for spec in engine.ran if spec.key not in {r.key for r in lines.records}]
    assert len(fresh) == 20 - len(lines.records)
    assert engine.ran[:-1] == fresh  # the last is the anchor
    assert [r.spec for r in results.points] == list(slow_sweep.SWEEP.points())
    assert results.records == read_lines(folder / "records.jsonl").records
    assert results.folder == folder


def test_resume_runs_again_what_is_not_final_and_what_another_environment_ran(tmp_path: Path) -> None:
    def first(spec: RunSpec) -> Record | None:
        return failed_record(spec, Status.TIMED_OUT) if spec.point.num_tokens == 16 else None

    folder = tmp_path / "r"
    assert go(engine=StandIn(first), out=folder).totals() == "4 ok, 2 failed, 0 unsupported"
    again = StandIn()
    results = go(engine=again, out=folder, resume=True)
    assert [s.point.num_tokens for s in again.ran] == [16, 16, 1]
    assert results.totals() == "6 ok, 0 failed, 0 unsupported"
    assert load(folder).totals() == results.totals()
    idle = StandIn()
    assert go(engine=idle, out=folder, resume=True).totals() == "6 ok, 0 failed, 0 unsupported"
    assert idle.ran == []
    elsewhere = StandIn(environment=THERE)
    go(engine=elsewhere, out=folder, resume=True)
    assert len(elsewhere.ran) == 7
    with pytest.raises(InvalidInput, match=r"resume: .* holds another sweep \(workbench sweep .*\); give another name"):
        go(SWEEP.with_axes(num_tokens=[2]), out=folder, resume=True)


def test_an_existing_name_is_never_overwritten(tmp_path: Path) -> None:
    first = go(out=tmp_path / "r")
    before = (tmp_path / "r" / "records.jsonl").read_bytes()
    second = go(out=tmp_path / "r")
    assert second.folder == tmp_path / "r-2"
    assert f"{tmp_path / 'r'} exists and is left as it is; this sweep is in {tmp_path / 'r-2'}." in second.notes
    assert (tmp_path / "r" / "records.jsonl").read_bytes() == before
    assert first.folder == tmp_path / "r"


def test_resuming_nothing_starts_and_says_so(tmp_path: Path) -> None:
    results = go(out=tmp_path / "r", resume=True)
    assert results.notes[0] == f"There was nothing to resume in {tmp_path / 'r'}; the sweep starts anew."
    with pytest.raises(InvalidInput, match="out: must be the folder of the sweep to resume"):
        go(resume=True)


@pytest.mark.parametrize("how", ["keyboard", "stop"])
def test_stopped_in_the_middle_keeps_what_there_is(tmp_path: Path, how: str) -> None:
    stop = Event()

    def answer(spec: RunSpec) -> Record | None:
        if spec.modes.quant == "bf16":
            if how == "keyboard":
                raise KeyboardInterrupt
            stop.set()
            return failed_record(spec, Status.CANCELLED, "stopped")
        return None

    engine = StandIn(answer)
    seen: list[SweepProgress] = []
    results = go(engine=engine, out=tmp_path / "r", stop=stop, progress=seen.append)
    assert results.interrupted
    assert [str(r.status) for r in results.records] == ["ok", "ok", "ok", "cancelled"]
    assert engine.stopped == (how == "keyboard")
    assert seen[-1].state == "cancelled"
    rest = StandIn()
    finished = go(engine=rest, out=tmp_path / "r", resume=True)
    assert [s.modes.quant for s in rest.ran[:-1]] == ["bf16"] * 3
    assert finished.totals() == "6 ok, 0 failed, 0 unsupported"
    assert not finished.interrupted


def test_stop_between_points_records_nothing_more() -> None:
    stop = Event()

    def answer(spec: RunSpec) -> Record | None:
        stop.set()
        return ok_record(spec, 3.0)

    results = go(engine=StandIn(answer), stop=stop)
    assert len(results.records) == 1
    assert results.interrupted


def test_a_busy_device_is_said_before_anything_and_ends_a_sweep_that_has_results() -> None:
    def busy(spec: RunSpec) -> Record | None:
        if spec.modes.quant == "bf16":
            raise DeviceBusy("held by process 7")
        return None

    results = go(engine=StandIn(busy))
    assert results.interrupted
    assert results.totals() == "3 ok, 0 failed, 0 unsupported"
    assert "The sweep ended early: held by process 7" in results.notes
    with pytest.raises(DeviceBusy, match="process 7"):
        go(SWEEP.with_axes(quant=["bf16"]), engine=StandIn(busy))


def test_a_folder_that_cannot_be_made_is_one_sentence_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    engine = StandIn()
    with pytest.raises(InvalidInput, match=r"out: .*file/r cannot be written \(Not a directory\); give another folder"):
        go(engine=engine, out=tmp_path / "file" / "r")
    assert engine.ran == []


def test_a_disk_that_fills_up_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "spare").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "spare"))
    folder, write = tmp_path / "r", os.write

    def full(handle: int, data: bytes) -> int:
        here = Path(os.readlink(f"/proc/self/fd/{handle}"))
        if here.is_relative_to(folder) and here.stat().st_size > 4000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(handle, data)

    monkeypatch.setattr(os, "write", full)
    results = go(out=folder)
    assert results.totals() == "6 ok, 0 failed, 0 unsupported"
    assert results.folder is not None
    assert results.folder.parent == tmp_path / "spare"
    assert load(results.folder).records == results.records
    said = [note for note in results.notes if "No space left on device" in note]
    assert said == [
        f"out: {folder / 'records.jsonl'} cannot be written (No space left on device); "
        f"all records of this sweep are kept in {results.folder}."
    ]
    on_disk = read_lines(folder / "records.jsonl")
    assert not on_disk.broken
    assert on_disk.records == results.records[: len(on_disk.records)]


def test_with_no_room_anywhere_records_stay_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(os, "write", full)
    results = go(out=tmp_path / "r")
    assert results.totals() == "6 ok, 0 failed, 0 unsupported"
    assert results.folder is None
    assert any("kept in memory only: save them with results.to_jsonl(PATH)" in note for note in results.notes)


def test_an_export_that_fails_is_said_and_stops_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow.parquet as pq

    def broken(*args: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pq, "write_table", broken)
    results = go(out=tmp_path / "r", exports=True)
    files = {path.name for path in (tmp_path / "r").iterdir()}
    assert files == {"records.jsonl", "sweep.json", "summary.md", "report.html"}
    assert any(note.startswith("records.parquet was not written: OSError") for note in results.notes)
    assert results.totals() == "6 ok, 0 failed, 0 unsupported"


def test_the_anchor_shows_drift(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anchor, "EVERY", 2)
    first = next(SWEEP.points())
    times = iter([10.0, 10.0, 13.0])

    def answer(spec: RunSpec) -> Record | None:
        return ok_record(spec, next(times)) if spec == first else None

    results = go(engine=StandIn(answer))
    assert [r.anchor for r in results.records] == [False, False, False, True, False, False, False, True]
    assert {r.spec for r in results.records if r.anchor} == {first}
    assert results.notes == (
        "Drift: the anchor point took 10.0 us at the start and 13.0 us at the last repeat (+30.0%), "
        "outside its noise: the machine drifted.",
    )
    assert results.totals() == "6 ok, 0 failed, 0 unsupported"
    steady = go()
    assert "within its noise" in steady.notes[0]


def test_one_run_and_engines_that_are_none() -> None:
    engine = StandIn()
    record = run(RunSpec(), engine=engine)
    assert record.status is Status.OK
    assert record.environment == HERE
    assert engine.closed == 0
    with pytest.raises(InvalidInput, match="engine: must be local or an engine object, not 'moon'"):
        go(engine="moon")  # type: ignore[arg-type]
