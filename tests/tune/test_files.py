"""Files are written whole, hold what SGLang reads, and keep the rows of other token counts."""

import json
import os

import pytest
from moe_kernels.tuning import find_config, lookup
from moe_kernels.tuning.names import Problem

from workbench.errors import InvalidInput
from workbench.tune import files
from workbench.tune.files import read_rows, version_place, write_rows
from workbench.tune.merge import merge_row
from workbench.tune.search import Timed

H200 = 232448
GEMM = {
    "BLOCK_SIZE_M": 16,
    "BLOCK_SIZE_N": 64,
    "BLOCK_SIZE_K": 64,
    "GROUP_SIZE_M": 1,
    "num_warps": 4,
    "num_stages": 3,
    "LAYOUT": "sorted",
    "USE_TMA": False,
    "SWAP_AB": True,
    "SPLIT_K": 1,
}
ROW = {"up": GEMM, "down": {**GEMM, "USE_TMA": True}, "PDL": True}
TOKEN = {**GEMM, "BLOCK_SIZE_M": 1, "LAYOUT": "token", "SWAP_AB": False}
NAME = "E=4,N=96,device_name=NVIDIA_H200"


def problem(tokens=8):
    return Problem(tokens, 4, 128, 96, 2, "bf16")


def load(folder, end=""):
    return json.loads((folder / f"{NAME}{end}.json").read_text(encoding="utf-8"))


def test_three_files_that_say_the_same(tmp_path):
    paths = write_rows(tmp_path / "new", problem(), "NVIDIA H200", {32: ROW, 8: ROW, 1: {**ROW, "up": TOKEN}})
    assert [path.name for path in paths] == [f"{NAME}{end}.json" for end in ("_modes", "", "_down")]
    folder = tmp_path / "new"
    assert list(load(folder, "_modes")) == ["1", "8", "32"]
    assert load(folder, "_modes")["8"] == ROW
    # SGLang's launcher takes these keys alone, and int() of every key of the file.
    assert list(load(folder)) == ["8", "32"]
    plain = {key: GEMM[key] for key in list(GEMM)[:6]}
    assert load(folder)["8"] == {**plain, "BLOCK_SIZE_N": 128}
    assert load(folder, "_down")["8"] == {**plain, "USE_TMA": True}
    assert [path.name for path in folder.iterdir() if path.suffix != ".json"] == []


def test_a_layout_that_sglang_lacks_makes_no_file_of_its_own(tmp_path):
    paths = write_rows(tmp_path, problem(), "NVIDIA H200", {1: {"up": TOKEN, "down": TOKEN, "PDL": False}})
    assert [path.name for path in paths] == [f"{NAME}_modes.json"]


def test_lookup_finds_what_was_written(tmp_path, monkeypatch):
    monkeypatch.setattr(lookup, "running_triton", lambda: "3.6.0")
    monkeypatch.setattr(files, "running_triton", lambda: "3.6.0")
    place = version_place(tmp_path)
    assert place == tmp_path / "triton_3_6_0"
    merge_row(place, problem(), "NVIDIA H200", H200, Timed(config=ROW, us=12.345))
    monkeypatch.setenv("MOE_WORKBENCH_CONFIG_DIR", str(tmp_path))
    found = find_config(problem(), "NVIDIA H200", H200)
    assert found.config == ROW
    assert str(place) in found.source


def test_merging_keeps_other_counts_and_the_old_row_where_it_won(tmp_path):
    write_rows(tmp_path, problem(), "NVIDIA H200", {4: ROW, 8: {**ROW, "us": 20.0}})
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    same = merge_row(tmp_path, problem(), "NVIDIA H200", H200, Timed(config=ROW, us=19.0))
    assert same.paths == []
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    faster = {**ROW, "PDL": False}
    merged = merge_row(tmp_path, problem(), "NVIDIA H200", H200, Timed(config=faster, us=10.004))
    assert len(merged.paths) == 3
    rows = load(tmp_path, "_modes")
    assert rows["4"] == ROW
    assert rows["8"] == {**faster, "hidden_size": 128, "top_k": 2, "us": 10.0}


def test_rows_of_sglangs_own_tuning_stay(tmp_path):
    own = {
        "BLOCK_SIZE_M": 64,
        "BLOCK_SIZE_N": 64,
        "BLOCK_SIZE_K": 32,
        "GROUP_SIZE_M": 8,
        "num_warps": 4,
        "num_stages": 2,
    }
    (tmp_path / f"{NAME}.json").write_text(json.dumps({"256": own, "8": own}), encoding="utf-8")
    merge_row(tmp_path, problem(), "NVIDIA H200", H200, Timed(config=ROW, us=1.0))
    up, down = load(tmp_path), load(tmp_path, "_down")
    assert up["256"] == own
    assert up["8"]["BLOCK_SIZE_M"] == 16
    assert down["256"] == {**own, "USE_TMA": False}  # the nearest count is looked up in each file
    assert list(up) == list(down) == ["8", "256"]


def test_impossible_rows_are_left_out_and_said(tmp_path):
    write_rows(tmp_path, problem(), "NVIDIA H200", {4: ROW})
    path = tmp_path / f"{NAME}_modes.json"
    content = load(tmp_path, "_modes")
    content["16"] = {**ROW, "up": {**GEMM, "num_warps": 3}}
    path.write_text(json.dumps(content), encoding="utf-8")
    rows, faults = read_rows(tmp_path, problem(), "NVIDIA H200", H200)
    assert list(rows) == [4]
    assert faults == [f"{path}: row 16: up: num_warps must be a power of two from 1 to 16, not 3."]
    merged = merge_row(tmp_path, problem(), "NVIDIA H200", H200, Timed(config=ROW, us=1.0))
    assert merged.notes == [f"Left out from now on: {faults[0]}"]
    assert list(load(tmp_path, "_modes")) == ["4", "8"]


def test_a_file_that_cannot_be_read_is_not_written_over(tmp_path):
    path = tmp_path / f"{NAME}_modes.json"
    path.write_text("{", encoding="utf-8")
    with pytest.raises(InvalidInput, match=r"^out: .*_modes.json: is no valid JSON .*; give another folder$"):
        merge_row(tmp_path, problem(), "NVIDIA H200", H200, Timed(config=ROW, us=1.0))
    assert path.read_text(encoding="utf-8") == "{"


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    write_rows(tmp_path, problem(), "NVIDIA H200", {4: ROW})
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(InvalidInput, match=r"cannot be written \(No space left on device\); give another folder$"):
        merge_row(tmp_path, problem(), "NVIDIA H200", H200, Timed(config=ROW, us=1.0))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_folder_that_is_a_file(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InvalidInput, match=r"^out: .*/file cannot be written \(.*\); give another folder$"):
        write_rows(tmp_path / "file", problem(), "NVIDIA H200", {4: ROW})
