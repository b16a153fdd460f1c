"""The command line on steps: the lines of bench_one_batch, the check, the profile, the trace, the export."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from workbench.cli import app
from workbench.devices import DeviceInfo
from workbench.engines.fake import FakeEngine
from workbench.record import ProfileRow, Status
from workbench.report.one_batch import read_one_batch
from workbench.spec import RunSpec
from workbench.sweeps import runner

RUNNER = CliRunner()
H200 = DeviceInfo(type="cuda", name="NVIDIA H200", torch_device="cuda:0", capability=(9, 0), memory_bytes=150 * 2**30)
STEP = ["--subject", "step", "--quant", "fp32", "--device", "cpu"]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeEngine:
    made = FakeEngine(latency=lambda spec: 2000.0 + spec.size)
    monkeypatch.setattr(runner, "open_engine", lambda engine, device: (made, True))
    monkeypatch.chdir(tmp_path)
    return made


def test_run_prints_the_lines_then_the_check_then_where_the_time_goes(engine: FakeEngine) -> None:
    result = RUNNER.invoke(app, ["run", *STEP, "--batch-size", "4", "--output-len", "3", "--perplexity-tokens", "50"])
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert re.fullmatch(r"Prefill\. latency: 0\.00827 s, throughput: +\d+\.\d\d token/s", lines[0])
    assert lines[1].startswith("Decode 0. Batch size: 4, latency: 0.00198 s, ")
    assert any(re.fullmatch(r"Decode\.  median latency: 0\.00200 s, median throughput: .*", line) for line in lines)
    assert re.search(r"^logits +2\.0e-03 against float32; divergence 4\.0e-06 nats *$", result.stdout, re.M)
    assert re.search(r"^top token +the same at 100\.0% of 8 positions *$", result.stdout, re.M)
    assert re.search(r"^layers +30 checked, all within budget; worst layer 2 with 1\.2e-03", result.stdout, re.M)
    assert re.search(r"^perplexity +12\.5 *$", result.stdout, re.M)
    assert re.search(r"^kv cache +[\d.]+ MiB *$", result.stdout, re.M)
    assert "Where the time of the prefill goes: 8,2" in result.stdout
    assert "Where the time of one decode step goes: 2,004.0 us" in result.stdout
    assert re.search(r"^mlp +gemm +", result.stdout, re.M)
    assert "workbench run --subject step --device cpu --quant fp32 --batch-size 4" in result.stdout


def test_run_prints_what_each_graph_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    made = FakeEngine(device=H200)
    monkeypatch.setattr(runner, "open_engine", lambda engine, device: (made, True))
    argv = ["--quant", "fp32", "--batch-size", "3", "--graph", "full", "--max-capture-batch", "16"]
    result = RUNNER.invoke(app, ["run", "--subject", "step", *argv, "--compile", "default", "--max-compile-batch", "4"])
    assert result.exit_code == 0, result.stderr
    text = re.sub(r" +", " ", result.stdout)
    assert "Graphs, in the order of capture; capture error mode thread_local" in text
    assert re.search(r"^ ?batch seconds MiB kernels", text, re.M)
    assert re.search(r"^ ?16 0\.50 30\.0 364", text, re.M)
    assert re.search(r"^ ?1 0\.50 1\.0 364", text, re.M)
    assert re.search(r"^ ?all 2\.50 34\.0", text, re.M)
    assert "captured_size = 4" in text
    assert "graph_breaks = 0" in text
    assert re.search(r"^compile 2\.00 s", text, re.M)


def test_a_failed_step_has_no_lines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    failing = FakeEngine(fail=lambda spec: Status.OUT_OF_MEMORY)
    monkeypatch.setattr(runner, "open_engine", lambda engine, device: (failing, True))
    result = RUNNER.invoke(app, ["run", *STEP])
    assert result.exit_code == 1
    assert "Prefill." not in result.stdout
    assert "out_of_memory" in result.stdout


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["run", "--batch-size", "2"], "batch_size: is for subject step; a moe_layer is measured at num_tokens"),
        (
            ["run", *STEP, "--num-tokens", "2"],
            "num_tokens: is for subject moe_layer; a step is measured at batch_size, ",
        ),
        (["run", *STEP, "--mla-decode", "folded"], "mla_decode: must be absorbed or expanded, not 'folded'"),
        (["run", *STEP, "--model", "gpt-17"], "model: "),
        (["sweep", *STEP, "--axis", "num_tokens=1,2"], "num_tokens: is for subject moe_layer"),
        (
            ["profile", "--device", "cpu", "--subject", "moe_layer"],
            "subject: must be step for a profile, not moe_layer",
        ),
        (["profile", "--device", "cpu", "--graph", "full"], "graph: CUDA graphs need a GPU"),
        (["run", "--fusion", "on"], "fusion: is for subject step; a moe_layer is measured at num_tokens"),
        (["run", *STEP, "--max-capture-batch", "0"], "max_capture_batch: must be a whole number of at least 1, not 0"),
    ],
)
def test_bad_input_is_one_sentence(engine: FakeEngine, argv: list[str], sentence: str) -> None:
    result = RUNNER.invoke(app, argv)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(sentence)
    assert result.stderr.count("\n") == 1


def test_a_sweep_of_steps_is_shown_and_exported(engine: FakeEngine) -> None:
    argv = ["sweep", *STEP, "--axis", "batch_size=1,8", "--axis", "attention_backend=reference,sdpa", "--name", "s"]
    made = RUNNER.invoke(app, argv)
    assert made.exit_code == 0, made.stderr
    assert "4 ok, 0 failed, 0 unsupported" in made.stdout
    points = [line.partition("] ")[2] for line in made.stderr.splitlines() if line.startswith("[")]
    assert points[0].startswith("attention_backend reference, batch 1: ok, 2.00 ms (")
    shown = RUNNER.invoke(app, ["show", "results/s", "--baseline", "attention_backend=reference"])
    assert shown.exit_code == 0, shown.stderr
    assert "decode step" in shown.stdout
    assert "Speed-up against attention_backend=reference" in shown.stdout
    out = RUNNER.invoke(app, ["export", "results/s", "--format", "one_batch", "--out", "x.jsonl"])
    assert out.exit_code == 0, out.stderr
    rows = read_one_batch(Path("x.jsonl").read_text(encoding="utf-8"))
    assert [row.batch_size for row in rows] == [1, 8, 1, 8]
    assert rows[0].median_decode_latency == pytest.approx(2001e-6)
    assert rows[0].run_name.endswith("--attention-backend reference")


def test_layers_have_no_lines_to_export(engine: FakeEngine) -> None:
    RUNNER.invoke(app, ["sweep", "--device", "cpu", "--axis", "num_tokens=1", "--name", "l"])
    out = RUNNER.invoke(app, ["export", "results/l", "--format", "one_batch", "--out", "x.jsonl"])
    assert (out.exit_code, out.stderr) == (2, "format: one_batch is of measured steps, and these results have none\n")
    assert not Path("x.jsonl").exists()


def test_profile_writes_the_trace_and_prints_the_largest_rows(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[RunSpec] = []

    def run_profile(spec: RunSpec, path: Path) -> tuple[ProfileRow, ...]:
        seen.append(spec)
        path.write_text("{}", encoding="utf-8")
        return engine.run(spec).profile

    monkeypatch.setattr("workbench.engines.run_profile", run_profile)
    result = RUNNER.invoke(app, ["profile", "--device", "cpu", "--quant", "fp32", "--out", "t.json"])
    assert result.exit_code == 0, result.stderr
    assert seen == [RunSpec.from_flat({"subject": "step", "quant": "fp32", "device": "cpu"})]
    assert "Where the time of one decode step goes" in result.stdout
    assert "t.json  2 bytes; open it in Perfetto" in result.stdout


def test_modes_of_a_step_say_what_it_has_and_what_a_layer_may(engine: FakeEngine) -> None:
    result = RUNNER.invoke(app, ["modes", *STEP, "--model", "llama-3-8b", "--num-layers", "2"])
    assert result.exit_code == 0, result.stderr
    text = re.sub(r" +", " ", result.stdout)
    assert "\nsubject step* available" in text
    assert "\nsubject moe_layer unavailable model: " in text
    assert "\ngraph full unavailable CUDA graphs need a GPU." in text
    assert "\nfusion off* available" in text
    assert "\nfusion on unavailable Fused kernels need Triton: " in text
    assert "\ncompile_scope skip_moe unavailable compile_scope skip_moe is for compiled steps" in text
    assert "\nattention_backend sdpa* available" in text
    assert "\nmla_decode expanded unavailable mla_decode expanded is for models with latent attention" in text
    layer = re.sub(r" +", " ", RUNNER.invoke(app, ["modes", "--device", "cpu"]).stdout)
    assert "\nsubject step available" in layer
    assert "mla_decode" not in layer
