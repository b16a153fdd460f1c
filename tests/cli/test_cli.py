"""The command line: exit codes, one sentence for what is wrong, and a surface that does not change unseen."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main
from hypothesis import given, settings
from stand_in import StandIn, failed_record, no_graphs, specs
from typer.testing import CliRunner

import workbench
from workbench.cli import app, commands
from workbench.cli.environment import cached_roofs
from workbench.cli.options import HELP, flag
from workbench.devices import DeviceInfo
from workbench.errors import InvalidInput
from workbench.record import Record, Status
from workbench.spec import FIELDS, RunSpec
from workbench.sweeps import planner, runner
from workbench.sweeps.loader import load
from workbench.sweeps.spec import SweepSpec

RUNNER = CliRunner()
SMALL = ["sweep", "--device", "cpu", "--axis", "num_tokens=1,16", "--axis", "quant=fp32,bf16"]
SPEC_COMMANDS = ("modes", "run", "profile", "sweep")
COMMANDS = {
    "modes": set(),
    "run": set(),
    "profile": {"--out"},
    "sweep": {"--preset", "--file", "--axis", "--dry-run", "--out", "--name", "--resume"},
    "show": {"--baseline"},
    "export": {"--format", "--out", "--baseline", "--samples", "--no-samples"},
    "env": set(),
    "tune": {
        *("--model", "--quant", "--tokens", "--experts", "--top-k", "--tp-size", "--group-size", "--zero-points"),
        *("--device", "--out", "--seconds", "--quick", "--dry-run", "--check"),
    },
    "lab": {"--notebook", "--ip", "--port", "--headless"},
}


class Engines:
    """Stands for `LocalEngine`: every engine opened by a command is a stand-in."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine = StandIn()
        monkeypatch.setattr(runner, "open_engine", lambda engine, device: (self.engine, True))
        for module in (planner, runner, commands):
            monkeypatch.setattr(module, "find_reasons", no_graphs, raising=False)
        monkeypatch.setattr(planner.plan, "__kwdefaults__", {"find": no_graphs})
        defaults = runner.sweep.__defaults__ or ()
        monkeypatch.setattr(runner.sweep, "__defaults__", (*defaults[:-1], no_graphs))


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Engines:
    monkeypatch.chdir(tmp_path)
    return Engines(monkeypatch)


def test_commands_and_options_are_pinned() -> None:
    group = typer.main.get_command(app)
    found = {
        name: {text for option in command.params for text in (*option.opts, *option.secondary_opts) if text[0] == "-"}
        for name, command in group.commands.items()  # type: ignore[attr-defined]
    }
    fields = {flag(name) for name in FIELDS} | {"--no-dynamic", "--no-zero-points"}
    expected = {name: own | (fields if name in SPEC_COMMANDS else set()) for name, own in COMMANDS.items()}
    assert {name: options - {"--help", "-h"} for name, options in found.items()} == expected
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        for option in command.params:
            assert option.name == "help" or getattr(option, "help", None), f"{name} {option.name} says nothing"
    assert set(HELP) == set(FIELDS)


def test_public_names_are_pinned() -> None:
    classes = [
        "DeviceBusy",
        "InvalidInput",
        "LayerPoint",
        "Modes",
        "Record",
        "Results",
        "RunSpec",
        "Status",
        "StepPoint",
        "SweepSpec",
    ]
    assert workbench.__all__ == [*classes, "__version__", "load", "recordings", "run", "supports", "sweep"]
    assert all(getattr(workbench, name) is not None for name in workbench.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        workbench.nothing  # noqa: B018


def test_importing_workbench_is_quick_and_light() -> None:
    code = (
        "import sys, time; t = time.perf_counter(); import workbench; workbench.RunSpec, workbench.SweepSpec;"
        "print(time.perf_counter() - t, *sorted({'torch', 'pandas', 'plotly', 'pyarrow', 'numpy'} & set(sys.modules)))"
    )
    words = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert words[1:] == []
    assert float(words[0]) < 1.0


def test_commands_start_without_torch() -> None:
    code = "import sys, workbench.cli; print(sorted({'torch', 'plotly'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@given(specs)
@settings(max_examples=40, deadline=None)
def test_the_command_of_a_spec_reads_back_as_that_spec(spec: RunSpec) -> None:
    seen: list[dict[str, Any]] = []

    def catch(given: dict[str, Any]) -> None:
        seen.append(given)

    probe = typer.Typer()
    probe.command()(commands_wrapped(catch))
    result = RUNNER.invoke(probe, spec.to_argv()[2:])
    assert result.exit_code == 0, result.output
    assert RunSpec.from_flat(seen[0]) == spec


def commands_wrapped(function: Any) -> Any:
    from workbench.cli.options import spec_options

    return spec_options(function)


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["run", "--num-tokens", "0"], "num_tokens: must be a whole number of at least 1, not 0"),
        (["run", "--num-tokens", "-3"], "num_tokens: must be a whole number of at least 1, not -3"),
        (["run", "--num-tokens", "many"], "num_tokens: must be a whole number, not 'many'"),
        (["run", "--quant", "fp9"], "quant: must be fp32, bf16, fp16, fp8_tensor, "),
        (["run", "--device", "tpu"], "device: must be auto, cpu, cuda or cuda:N, not 'tpu'"),
        (
            ["modes", "--compile", "fast"],
            "compile: must be none, default, max-autotune-no-cudagraphs, reduce-overhead or ",
        ),
        (["sweep", "--top-k", "9", "--device", "cpu"], "top_k: "),
        (["sweep", "--model", "gpt-17", "--device", "cpu"], "model: must be smollm2-135m, mixtral-8x7b, "),
        (
            ["sweep", "--preset", "all"],
            "preset: must be main, quick, shapes, fused-moe-splitk, steps, "
            "moe-torch-compile or cuda-graph-attention, not 'all'",
        ),
        (["sweep", "--axis", "num_tokens=16,1"], "num_tokens: must be in ascending order, not 16, 1"),
        (
            ["sweep", "--axis", "num_tokens=1", "--num-tokens", "2"],
            "num_tokens: is an axis of this sweep and cannot be ",
        ),
        (["sweep", "--axis", "colour=red"], "colour: no such axis; axes are model, "),
        (["sweep", "--file", "none.json"], "file: none.json cannot be read (No such file or directory)"),
        (["sweep", "--name", "../x"], "name: must be 1 to 80 letters"),
        (["sweep", "--resume", "--device", "cpu"], "resume: results holds no results of this sweep; give --name or "),
        (["show", "none"], "path: none does not exist; must be a results folder, a .jsonl or a .parquet file"),
        (["show", "."], "path: . holds no records.jsonl; must be a results folder, a .jsonl or a .parquet file"),
        (["export", "none", "--format", "csv", "--out", "x"], "path: none does not exist"),
        (["sweep", "--resume", "--name", "typo"], "name: results/typo holds no sweep to resume; describe it with "),
        (["lab", "--port", "abc"], "Invalid value for '--port': "),
        (["run", "--speed", "9"], "No such option: --speed"),
        (["fly"], "No such command 'fly'"),
        (["show"], "Missing argument 'path'; --help lists what there is"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(engines: Engines, argv: list[str], sentence: str) -> None:
    result = RUNNER.invoke(app, argv)
    assert result.exit_code == 2
    assert result.stderr.startswith(sentence)
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""
    assert engines.engine.ran == []


def test_a_preset_file_of_another_version_is_refused(engines: Engines, tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    path.write_text(json.dumps({"version": 2, "axes": {}}), encoding="utf-8")
    result = RUNNER.invoke(app, ["sweep", "--file", str(path)])
    assert (result.exit_code, result.stderr) == (2, f"{path}: version: must be 1, not 2\n")


def test_a_dry_run_lists_points_and_runs_none(engines: Engines, tmp_path: Path) -> None:
    result = RUNNER.invoke(app, [*SMALL, "--axis", "graph=disabled,full", "--dry-run"])
    assert result.exit_code == 0, result.stderr
    assert len([line for line in result.stdout.splitlines() if "yes, about" in line]) == 4
    assert result.stdout.count("no: graph full needs a GPU.") == 4
    assert "8 points on " in result.stdout
    assert engines.engine.ran == []
    assert not list(tmp_path.iterdir())


def test_a_sweep_writes_its_files_and_ends_with_a_table(engines: Engines) -> None:
    result = RUNNER.invoke(app, [*SMALL, "--out", "all", "--name", "first"])
    assert result.exit_code == 0, result.stderr
    folder = Path("all/first")
    files = {path.name for path in folder.iterdir()}
    assert files == {"records.jsonl", "records.parquet", "sweep.json", "summary.md", "report.html"}
    assert all(f"{folder / name}  " in result.stdout for name in files)
    assert "4 ok, 0 failed, 0 unsupported" in result.stdout
    assert "44.0 us" in result.stdout
    points = [line.partition("] ")[2] for line in result.stderr.splitlines() if line.startswith("[")]
    assert points[0].startswith("fp32, 1 token: ok, 44.0 us (")
    assert points[3].startswith("bf16, 16 tokens: ok, 52.0 us (")
    assert engines.engine.closed == 1
    assert SweepSpec.from_file(folder / "sweep.json").name == "first"
    assert load(folder / "records.parquet").records == load(folder).records
    again = RUNNER.invoke(app, [*SMALL, "--out", "all", "--name", "first"])
    assert again.exit_code == 0
    assert "all/first exists and is left as it is; this sweep is in all/first-2." in again.stdout


def test_failed_points_are_reported_and_the_sweep_is_still_done(engines: Engines) -> None:
    def answer(spec: RunSpec) -> Record | None:
        return failed_record(spec, Status.COMPILE_ERROR, "no such instruction") if spec.point.num_tokens == 16 else None

    engines.engine.answer = answer
    result = RUNNER.invoke(app, SMALL)
    assert result.exit_code == 0
    assert "2 ok, 2 failed, 0 unsupported" in result.stdout
    assert "compile_error: 2 points: no such instruction" in result.stdout
    assert re.fullmatch(r"sweep-\d{8}-\d{6}", next(Path("results").iterdir()).name)


def test_a_sweep_in_which_nothing_ran_ends_with_1(engines: Engines) -> None:
    engines.engine.answer = lambda spec: failed_record(spec, Status.RUNTIME_ERROR, "no such instruction")
    result = RUNNER.invoke(app, SMALL)
    assert result.exit_code == 1
    assert "0 ok, 4 failed, 0 unsupported" in result.stdout


def test_what_is_no_spec_or_path_is_one_sentence() -> None:
    with pytest.raises(InvalidInput, match="spec: must be a SweepSpec, not str"):
        workbench.sweep("x")  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="spec: must be a RunSpec, not int"):
        workbench.run(3)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match=r"path: must be a results folder, .* not int"):
        workbench.load(5)  # type: ignore[arg-type]


def test_ctrl_c_ends_with_130_and_resume_finishes(engines: Engines) -> None:
    def interrupt(spec: RunSpec) -> Record | None:
        if spec.modes.quant == "bf16":
            raise KeyboardInterrupt
        return None

    engines.engine.answer = interrupt
    result = RUNNER.invoke(app, SMALL)
    assert result.exit_code == 130
    assert "2 ok, 0 failed, 0 unsupported, 1 cancelled" in result.stdout
    folder = next(Path("results").iterdir())
    assert f"to finish: workbench sweep --resume --out results --name {folder.name}" in result.stderr
    engines.engine = StandIn()
    by_name = RUNNER.invoke(app, ["sweep", "--resume", "--name", folder.name])
    assert by_name.exit_code == 0, by_name.stderr
    assert [spec.modes.quant for spec in engines.engine.ran[:2]] == ["bf16", "bf16"]
    assert "4 ok, 0 failed, 0 unsupported" in by_name.stdout
    engines.engine = StandIn()
    other = RUNNER.invoke(app, ["sweep", "--resume", "--name", folder.name, "--samples", "9"])
    assert (other.exit_code, engines.engine.ran) == (2, [])  # an option is never passed over
    assert f"resume: results/{folder.name} holds another sweep" in other.stderr
    newest = RUNNER.invoke(app, [*SMALL, "--resume"])
    assert newest.exit_code == 0, newest.stderr
    assert engines.engine.ran == []
    assert [path.name for path in Path("results").iterdir()] == [folder.name]


def test_the_line_that_finishes_a_sweep_is_quoted_for_the_shell(engines: Engines) -> None:
    def interrupt(spec: RunSpec) -> Record | None:
        raise KeyboardInterrupt

    engines.engine.answer = interrupt
    result = RUNNER.invoke(app, [*SMALL, "--out", "my results", "--name", "first"])
    assert result.exit_code == 130
    assert "to finish: workbench sweep --resume --out 'my results' --name first\n" in result.stderr


def test_an_unwritable_folder_is_one_sentence(engines: Engines) -> None:
    Path("file").touch()
    result = RUNNER.invoke(app, [*SMALL, "--out", "file"])
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].endswith("cannot be written (Not a directory); give another folder")
    assert engines.engine.ran == []


def test_an_option_replaces_a_presets_axis_and_an_axis_its_axis(engines: Engines) -> None:
    argv = ["sweep", "--preset", "quick", "--device", "cpu", "--num-tokens", "4", "--axis", "quant=fp16", "--dry-run"]
    result = RUNNER.invoke(app, argv)
    assert result.exit_code == 0, result.stderr
    assert "2 points on " in result.stdout
    assert "fp16" in result.stdout


def test_run_prints_the_record_and_only_ok_is_0(engines: Engines) -> None:
    good = RUNNER.invoke(app, ["run", "--num-tokens", "16", "--quant", "fp32"])
    assert good.exit_code == 0, good.stderr
    assert "104 us" in good.stdout
    assert "0.25 of its budget" in good.stdout
    assert "workbench run --quant fp32" in good.stdout
    engines.engine.answer = lambda spec: failed_record(spec, Status.INCORRECT, "error 9 of its budget")
    bad = RUNNER.invoke(app, ["run"])
    assert bad.exit_code == 1
    assert "incorrect: error 9 of its budget" in bad.stdout


def test_show_and_export(engines: Engines) -> None:
    RUNNER.invoke(app, [*SMALL, "--name", "r"])
    shown = RUNNER.invoke(app, ["show", "results/r", "--baseline", "quant=fp32"])
    assert shown.exit_code == 0, shown.stderr
    assert "2.00x" in shown.stdout
    assert "Speed-up against quant=fp32" in shown.stdout
    for kind in ("csv", "parquet", "jsonl", "md", "html"):
        made = RUNNER.invoke(app, ["export", "results/r", "--format", kind, "--out", f"x.{kind}"])
        assert made.exit_code == 0, made.stderr
        assert made.stdout.startswith(f"x.{kind}  ")
    assert load("x.parquet").records == load("x.jsonl").records == load("results/r").records
    wrong = RUNNER.invoke(app, ["export", "results/r", "--format", "doc", "--out", "x"])
    assert (wrong.exit_code, wrong.stderr) == (
        2,
        "format: must be jsonl, parquet, csv, md, html or one_batch, not 'doc'\n",
    )
    nothing = RUNNER.invoke(app, ["show", "results/r", "--baseline", "quant=fp16"])
    assert (nothing.exit_code, nothing.stderr) == (2, "baseline: nothing with quant=fp16 was measured\n")


def test_modes_lists_every_value_with_the_reason(engines: Engines) -> None:
    result = RUNNER.invoke(app, ["modes", "--device", "cpu", "--quant", "fp16"])
    assert result.exit_code == 0, result.stderr
    lines = [line.split() for line in result.stdout.splitlines()]
    assert re.search(r"^graph +full +unavailable +graph full needs a GPU\.", result.stdout, re.M)
    assert ["quant", "fp16*", "available"] in lines
    assert ["compile", "reduce-overhead", "available"] in lines
    assert ["split_k", "none*", "available"] in lines
    assert ["zero_points", "false*", "available"] in lines
    assert sum(line[0] in commands.TOGGLES for line in lines if line) == 44


def test_env_says_what_is_here_and_what_is_missing(engines: Engines) -> None:
    result = RUNNER.invoke(app, ["env"])
    assert result.exit_code == 0, result.stderr
    assert re.search(r"^device in use +(cpu|cuda:0): \S", result.stdout, re.M)
    assert re.search(r"^torch +2\.", result.stdout, re.M)


def test_env_reads_the_roofs_of_an_earlier_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MOE_WORKBENCH_CACHE", str(tmp_path))
    device = DeviceInfo(type="cpu", name="some CPU", torch_device="cpu")
    assert cached_roofs(device) == "not measured yet; the first run measures them"
    path = tmp_path / "roofs-cpu.json"
    kept = {"identity": ["cpu", "some CPU"], "roofs": {"read": 12.34e9, "bf16": 2e12}}
    path.write_text(json.dumps(kept), encoding="utf-8")
    assert cached_roofs(device) == "read 12.3 GB/s, bf16 2,000.0 GFLOP/s"
    path.write_text("{", encoding="utf-8")
    assert cached_roofs(device) == f"{path} cannot be read (JSONDecodeError); the next run measures them"


def test_control_characters_of_a_record_never_reach_the_terminal(engines: Engines) -> None:
    engines.engine.answer = lambda spec: failed_record(spec, Status.RUNTIME_ERROR, "bad \x1b[31m\x07 [red]markup[/red]")
    result = RUNNER.invoke(app, SMALL)
    assert result.exit_code == 1  # nothing was measured
    assert "\x1b" not in result.stdout + result.stderr
    assert "bad ?[31m? [red]markup[/red]" in result.stdout
