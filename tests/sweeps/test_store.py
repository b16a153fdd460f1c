"""The records file: one whole line a record, whatever happened while it was written."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
from stand_in import HERE, THERE, failed_record, ok_record

from workbench.errors import InvalidInput
from workbench.record import Status
from workbench.spec import RunSpec
from workbench.sweeps.spec import SweepSpec
from workbench.sweeps.store import Store, StoreError, free_folder, latest, read_lines

RECORDS = [ok_record(RunSpec().replace(num_tokens=n), 1.23456789e-5 * n) for n in (1, 2, 3)]


def written(folder: Path) -> Path:
    store = Store(folder)
    store.create(SweepSpec(name="s"))
    for record in RECORDS:
        store.append(record)
    store.close()
    return store.path


def test_what_is_appended_reads_back_equal(tmp_path: Path) -> None:
    path = written(tmp_path / "a" / "b")
    assert read_lines(path).records == tuple(RECORDS)
    assert SweepSpec.from_file(path.parent / "sweep.json") == SweepSpec(name="s")
    assert path.read_bytes().count(b"\n") == 3


def test_every_record_is_forced_to_disk_before_append_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    fsync = os.fsync

    def watched(handle: int) -> None:
        sizes.append(os.fstat(handle).st_size)
        fsync(handle)

    store = Store(tmp_path / "x")
    store.create(SweepSpec())
    monkeypatch.setattr(os, "fsync", watched)
    for record in RECORDS:
        store.append(record)
        assert sizes[-1] == store.path.stat().st_size
    assert len(sizes) == 3
    store.close()


@pytest.mark.parametrize("cut", [1, 2, 40, 400])
def test_a_broken_last_line_is_kept_aside(tmp_path: Path, cut: int) -> None:
    path = written(tmp_path / "x")
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    lines = read_lines(path)
    assert lines.records == tuple(RECORDS if cut == 1 else RECORDS[:2])  # only the newline is missing: still a record
    store = Store(path.parent)
    kept, notes = store.reopen()
    assert kept == lines.records
    store.append(RECORDS[0])
    store.close()
    assert read_lines(path).records == (*kept, RECORDS[0])
    aside = path.parent / "records.broken.jsonl"
    if cut == 1:
        assert not notes
        assert not aside.exists()
    else:
        assert notes == ("The last line of records.jsonl was broken and is kept in records.broken.jsonl.",)
        assert aside.read_bytes() == whole.splitlines()[2][: 1 - cut] + b"\n"


def test_a_broken_line_in_the_middle_is_an_error_with_its_number(tmp_path: Path) -> None:
    path = written(tmp_path / "x")
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join([lines[0], lines[1][:50], lines[2]]) + "\n", encoding="utf-8")
    before = path.read_bytes()
    with pytest.raises(InvalidInput, match=r"^records\.jsonl, line 2: not valid JSON"):
        read_lines(path)
    with pytest.raises(InvalidInput, match="line 2"):
        Store(path.parent).reopen()
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"version": 2}, "records.jsonl, line 3: version: must be 1, not 2"),
        ({"version": 10**3000}, "records.jsonl, line 3: version: must be 1, not 1000"),
        ({"colour": "red"}, "records.jsonl, line 3: colour: no such field"),
        ({"status": "fine"}, "records.jsonl, line 3: status: must be 'ok'"),
        ({"metrics": {}}, "records.jsonl, line 3: metrics: must not be empty where status is ok"),
    ],
)
def test_a_whole_line_of_another_kind_is_never_taken_for_a_broken_one(
    tmp_path: Path, change: dict[str, object], sentence: str
) -> None:
    path = written(tmp_path / "x")
    lines = path.read_text(encoding="utf-8").splitlines()
    lines[2] = json.dumps(json.loads(lines[2]) | change)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    with pytest.raises(InvalidInput) as caught:
        read_lines(path)
    assert str(caught.value).startswith(sentence)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("bad", ["NaN", "Infinity", "-Infinity", "1e999", "9" * 5000])
@pytest.mark.parametrize("place", ['"load_s": 0.1', '"extra": {}'])
def test_numbers_that_are_no_json_are_refused(tmp_path: Path, bad: str, place: str) -> None:
    path = written(tmp_path / "x")
    lines = path.read_text(encoding="utf-8").splitlines()
    name = place.split(":")[0]
    lines[0] = lines[0].replace(place, f'{name}: {{"a": {bad}}}' if "extra" in place else f"{name}: {bad}")
    assert bad in lines[0]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    with pytest.raises(
        InvalidInput,
        match=r"line 1: (not valid JSON|startup.load_s: must be a finite number|extra: numbers must be finite)",
    ):
        read_lines(path)


def test_a_full_disk_leaves_no_part_of_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path / "x")
    store.create(SweepSpec())
    store.append(RECORDS[0])
    before = store.path.read_bytes()
    write = os.write
    calls = iter([True, False])

    def full(handle: int, data: bytes) -> int:
        if next(calls):
            return write(handle, bytes(data)[:10])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(StoreError, match=r"records\.jsonl cannot be written \(No space left on device\)"):
            store.append(RECORDS[1])
    assert store.path.read_bytes() == before
    store.append(RECORDS[2])
    store.close()
    assert read_lines(store.path).records == (RECORDS[0], RECORDS[2])


def test_two_writers_exclude_each_other(tmp_path: Path) -> None:
    first = Store(tmp_path / "x")
    first.create(SweepSpec())
    with pytest.raises(InvalidInput, match="is being written by another sweep"):
        Store(tmp_path / "x").reopen()
    first.close()
    again = Store(tmp_path / "x")
    assert again.reopen() == ((), ())
    again.close()


def test_a_taken_name_gives_the_next(tmp_path: Path) -> None:
    assert free_folder(tmp_path / "n") == tmp_path / "n"
    (tmp_path / "n").mkdir()
    assert free_folder(tmp_path / "n") == tmp_path / "n"  # empty: nothing to overwrite
    (tmp_path / "n" / "file").touch()
    (tmp_path / "n-2").touch()
    assert free_folder(tmp_path / "n") == tmp_path / "n-3"


def test_a_later_answer_replaces_one_that_was_not_final() -> None:
    spec = RunSpec()
    cut, good = failed_record(spec, Status.CANCELLED), ok_record(spec, 5.0)
    elsewhere = failed_record(spec, Status.CRASHED, environment=THERE)
    assert latest([cut, good, elsewhere]) == (good, elsewhere)
    assert latest([good, cut]) == (good, cut)
    assert latest([good, good]) == (good, good)
    assert HERE.fingerprint != THERE.fingerprint
