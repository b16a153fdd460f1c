"""`workbench tune` without a GPU: what it plans, what it refuses, and what it says about files."""

import json
import re
import subprocess
import sys

import pytest
from moe_kernels.tuning import PACKAGED
from typer.testing import CliRunner

from workbench.cli import app
from workbench.devices import DeviceInfo

RUNNER = CliRunner()
ROW = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1, "num_warps": 4, "num_stages": 3}
NAME = "E=4,N=96,device_name=NVIDIA_H200"


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch, tmp_path):
    cpu = DeviceInfo(type="cpu", name="some CPU", torch_device="cpu", memory_bytes=2**36)
    monkeypatch.setattr("workbench.cli.tune.find_device", lambda asked: cpu)
    monkeypatch.chdir(tmp_path)


def test_a_dry_run_lists_candidates_and_the_time():
    argv = ["tune", "--model", "mixtral-8x7b", "--quant", "bf16", "--tokens", "8,4096", "--seconds", "90", "--dry-run"]
    result = RUNNER.invoke(app, argv)
    assert result.exit_code == 0, result.stderr
    assert re.search(r"^ +8 +up +\d+ +\d+ inline", result.stdout, re.M)
    assert re.search(r"^ +4096 +down +\d+ +\d+ sorted +\d+ too large for the shared memory", result.stdout, re.M)
    assert re.search(
        r"^About \d.* with nothing compiled yet .*; --seconds ends it after 1 min 30 s\.$", result.stdout, re.M
    )


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--model", "mixtral-8x7b"], "moe_backend: tuning cannot run on some CPU: "),
        (["--model", "gpt-17"], "model: must be smollm2-135m, mixtral-8x7b, "),
        (["--quant", "fp9"], "quant: must be fp32, bf16, fp16, fp8_tensor, "),
        (["--tokens", "1,zero"], "tokens: must be whole numbers from 1 to 1048576, as in 1,8,32, not '1,zero'"),
        (["--tp-size", "5"], "tp_size: must divide the "),
        (["--group-size", "48"], "group_size: must be 32, 64 or 128, not 48"),
        (["--seconds", "0"], "seconds: must be above 0, not 0"),
        (["--check", "none.json"], "check: none.json does not exist; must be a tuning file or a folder of them"),
        (["--check", "."], "check: . holds no tuning file, such as E=8,N=14336,device_name=NVIDIA_H200.json"),
    ],
)
def test_bad_input_is_one_sentence(argv, sentence):
    extra = [] if "--model" in argv or "--check" in argv else ["--model", "mixtral-8x7b"]
    result = RUNNER.invoke(app, ["tune", *extra, *argv])
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith(sentence)
    assert result.stderr.count("\n") == 1


def test_check_lists_rows_and_why_some_are_not_legal(tmp_path):
    rows = {"8": ROW, "16": {**ROW, "num_warps": 3}, "32": {**ROW, "BLOCK_SIZE_N": 0}, "many": ROW}
    rows["64"] = {key: ROW[key] for key in ROW if key != "num_stages"}
    (tmp_path / f"{NAME}.json").write_text(json.dumps(rows), encoding="utf-8")
    (tmp_path / f"{NAME}_down.json").write_text(json.dumps({"8": {**ROW, "BLOCK_SIZE_M": 32}}), encoding="utf-8")
    result = RUNNER.invoke(app, ["tune", "--check", f"{NAME}.json"])
    assert result.exit_code == 1
    lines = {line.split()[1]: line for line in result.stdout.splitlines()[1:-1]}
    assert "not legal  up and down must share BLOCK_SIZE_M where both are sorted, not 16 and 32" in lines["8"]
    assert "not legal  up: num_warps must be a power of two from 1 to 16, not 3" in lines["16"]
    assert "not legal  up: BLOCK_SIZE_N must be a power of two from 16 to 512, not 0" in lines["32"]
    assert "not legal  up: num_stages is missing" in lines["64"]
    assert "row 'many': must be named by a number of tokens" in result.stdout
    assert result.stdout.splitlines()[-1] == "0 legal, 5 not."


def test_check_of_good_files(tmp_path):
    folder = tmp_path / "triton_3_2_0"
    folder.mkdir()
    (folder / f"{NAME},dtype=fp8_w8a8,block_shape=[128, 128].json").write_text(json.dumps({"8": ROW}), encoding="utf-8")
    result = RUNNER.invoke(app, ["tune", "--check", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert re.search(r" 8 +legal +tuned with triton 3\.2\.0, running 3\.\d+", result.stdout)
    packaged = RUNNER.invoke(app, ["tune", "--check", str(PACKAGED)])
    assert packaged.exit_code == 0, packaged.output
    assert re.search(r"^[1-9]\d* legal, 0 not\.$", packaged.stdout, re.M)


def test_files_of_other_kinds_are_named(tmp_path):
    (tmp_path / "rows.json").write_text("{}", encoding="utf-8")
    result = RUNNER.invoke(app, ["tune", "--check", "rows.json"])
    assert result.exit_code == 1
    assert "is not named as a tuning file is: E=" in result.stdout
    (tmp_path / f"{NAME},dtype=fp8_w8a16.json").write_text(json.dumps({"8": ROW}), encoding="utf-8")
    result = RUNNER.invoke(app, ["tune", "--check", "."])
    assert "is for a format that there is not here (fp8_w8a16)" in result.stdout


def test_planning_and_checking_load_no_torch():
    code = (
        "import sys; from workbench.tune import run, check, files, merge, search, candidates, ahead;"
        "print([m for m in ('torch', 'triton') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
