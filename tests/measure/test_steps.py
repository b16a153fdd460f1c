"""Times, floors and profiles of whole steps."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "check"))
from step_cases import step_runner

from workbench.measure.floor import SampleWork
from workbench.measure.kernel_kinds import kernel_kind
from workbench.measure.profile import profile_step, summarize
from workbench.measure.step_floor import Pass, pass_work, total_work
from workbench.measure.step_timer import repeats, time_step

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


@pytest.mark.parametrize(
    ("samples", "steps", "expected"),
    [(20, 7, 3), (21, 7, 3), (22, 7, 4), (1, 7, 3), (500, 7, 20), (5, 0, 5), (1, 0, 3)],
)
def test_repeats(samples: int, steps: int, expected: int) -> None:
    assert repeats(samples, steps) == expected


@torch.no_grad()
def test_series_of_a_step() -> None:
    runner = step_runner("latent", output_len=5)
    timed = time_step(runner, 3)
    assert len(timed.prefill_us) == len(timed.total_us) == 3
    assert len(timed.decode_us) == 12
    for index, total in enumerate(timed.total_us):
        parts = timed.prefill_us[index] + sum(timed.decode_us[4 * index : 4 * index + 4])
        assert total == pytest.approx(parts)
    expected = runner.run()
    assert all(torch.equal(tokens, expected) for tokens in timed.tokens)
    assert timed.compiled_in == ()
    assert "On a CPU" in timed.notes[-1]


@torch.no_grad()
@pytest.mark.parametrize(("compiled", "words"), [(1, "1 of 3 repeats; all were run again"), (99, "also when repeated")])
def test_what_is_compiled_meanwhile_is_measured_again_and_said(compiled: int, words: str) -> None:
    counts = iter(range(1, 100))
    left = [2 * compiled]

    def compiles() -> int:
        left[0] -= 1
        return next(counts) if left[0] > 0 else 1000

    timed = time_step(step_runner("dense", output_len=2), 3, compiles=compiles)
    assert words in timed.notes[0]
    assert len(timed.prefill_us) == 3


@torch.no_grad()
def test_the_floor_counts_every_weight_once() -> None:
    runner = step_runner("dense", batch_size=2, input_len=7)
    network = runner.network
    one = Pass(kind="decode", rows=2, sequences=2, keys=9, experts={}, slots={})
    parts = pass_work(network, one)
    weights = network.weight_bytes - network.embed.weight.nbytes  # of which two rows are looked up
    cache_token = 2 * 2 * 8 * 4  # keys and values of 2 heads of 8, float32
    expected = weights + 2 * 48 * 4 + 4 * 2 * 101 + 3 * (2 * 9 + 2) * cache_token
    total = total_work(parts)
    assert total.bytes == expected
    matrices = sum(m.numel() for m in (network.lm_head.weight,)) + 3 * (48 * (6 + 4) * 8 + 48 * 48 + 3 * 48 * 77)
    attention = 3 * 2 * 6 * 16 * 2 * 9
    assert total.operations == 2 * 2 * matrices + attention
    assert total.experts == 0


@torch.no_grad()
def test_the_floor_of_experts_is_of_those_that_are_touched() -> None:
    network = step_runner("latent", batch_size=2, input_len=7).network
    moe = network.layers[1].mlp
    each = sum(t.nbytes for t in moe.experts.tensors().values()) // 8
    few, all_of_them = (
        pass_work(network, Pass(kind="decode", rows=2, sequences=2, keys=9, experts=count, slots={}))
        for count in ({1: 3.0, 2: 5.0}, {})
    )
    assert all_of_them[1, "moe"].bytes - few[1, "moe"].bytes == 5 * each
    assert all_of_them[2, "moe"].bytes - few[2, "moe"].bytes == 3 * each
    assert total_work(few).experts == 4
    assert few[1, "gate"].bytes == 4 * 8 * 48


@torch.no_grad()
@pytest.mark.parametrize("form", ["absorbed", "expanded"])
def test_latent_attention_reads_what_its_form_needs(form: str) -> None:
    network = step_runner("latent", mla_prefill=form, mla_decode=form).network
    parts = pass_work(network, Pass(kind="decode", rows=1, sequences=1, keys=10, experts={}, slots={}))
    down, up, out = 48 * (4 * 20 + 40), 4 * (12 + 10) * 32, 48 * 4 * 10
    a_token = 40 if form == "absorbed" else 4 * (20 + 10)
    assert parts[0, "attention"].bytes == 4 * (down + up + out + 11 * a_token)


NAMES = {
    "nvjet_sm90_tst_128x64_64x8": "gemm",
    "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16>": "gemm",
    "linear_row_kernel": "gemm",
    "aten::addmm": "gemm",
    "up_kernel": "moe",
    "down_token_kernel": "moe",
    "decode_kernel": "attention",
    "merge_kernel": "attention",
    "pytorch_flash::flash_fwd_kernel<...>": "attention",
    "fmha_cutlassF_bf16_aligned_64x64_rf_sm80": "attention",
    "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel": "norm",
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add>": "elementwise",
    "Memcpy DtoD (Device -> Device)": "memory",
    "Memset (Device)": "memory",
    "void at::native::index_elementwise_kernel": "memory",
    "void at::native::(anonymous namespace)::CatArrayBatchedCopy": "memory",
    "something_else": "other",
}


@pytest.mark.parametrize("name", NAMES)
def test_kinds_of_kernels(name: str) -> None:
    assert kernel_kind(name) == NAMES[name]


def span(name: str, start: float, length: float, tid: int = 1) -> dict[str, Any]:
    return {"ph": "X", "cat": "user_annotation", "name": f"step|{name}", "ts": start, "dur": length, "tid": tid}


def launch(at: float, number: int, tid: int = 1) -> dict[str, Any]:
    event = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": at, "dur": 1.0, "tid": tid}
    return {**event, "args": {"correlation": number}}


def kernel(name: str, number: int, length: float) -> dict[str, Any]:
    event = {"ph": "X", "cat": "kernel", "name": name, "ts": 1000.0 + number, "dur": length, "tid": 7}
    return {**event, "args": {"correlation": number}}


def test_a_kernel_belongs_to_the_range_it_was_launched_in() -> None:
    events = [
        span("prefill||other", 0, 100),
        span("prefill|0|layer", 10, 60),
        span("prefill|0|attention", 20, 20),
        span("prefill|0|norm", 22, 2),
        launch(5, 1),
        launch(21, 2),
        launch(23, 3),
        launch(30, 4),
        launch(31, 5),
        launch(60, 6),
        launch(23, 9, tid=2),
        kernel("elementwise_kernel", 1, 3),
        kernel("nvjet_a", 2, 7),
        kernel("rms_norm_kernel", 3, 2),
        kernel("nvjet_b", 4, 5),
        kernel("flash_fwd", 5, 4),
        kernel("vectorized_elementwise_kernel", 6, 1),
        kernel("nvjet_of_another_thread", 9, 50),
        {"ph": "i", "name": "marker"},
    ]
    floors = {"prefill": {(0, "attention"): SampleWork(123, 0, 0), (0, "norm"): SampleWork(7, 0, 0)}}
    rows = [tuple(row.model_dump().values()) for row in summarize(events, floors)]
    assert rows == [
        ("prefill", None, "other", "elementwise", 3.0, 1, None),
        ("prefill", 0, "attention", "attention", 4.0, 1, None),
        ("prefill", 0, "attention", "gemm", 12.0, 2, 123),
        ("prefill", 0, "layer", "elementwise", 1.0, 1, None),
        ("prefill", 0, "norm", "norm", 2.0, 1, 7),
    ]


def test_an_operator_counts_what_is_its_own() -> None:
    def op(name: str, start: float, length: float) -> dict[str, Any]:
        return {"ph": "X", "cat": "cpu_op", "name": name, "ts": start, "dur": length, "tid": 1}

    events = [
        span("decode|2|mlp", 0, 100),
        op("aten::linear", 10, 20),
        op("aten::addmm", 12, 15),
        op("aten::mul", 40, 5),
        op("aten::mul", 200, 5),
    ]
    rows = {(row.kind, row.time_us, row.count) for row in summarize(events, {})}
    assert rows == {("gemm", 20.0, 2), ("elementwise", 5.0, 1)}


@torch.no_grad()
def test_the_profile_of_a_step_names_its_parts_and_leaves_a_trace(tmp_path: Path) -> None:
    runner = step_runner("latent")
    path = tmp_path / "new" / "trace.json"
    floors = {
        "decode": pass_work(runner.network, Pass(kind="decode", rows=3, sequences=3, keys=12, experts={}, slots={}))
    }
    rows = profile_step(runner, floors, path)
    assert {row.phase for row in rows} == {"prefill", "decode"}
    parts = {(row.layer, row.part) for row in rows if row.phase == "decode"}
    assert {(None, "embed"), (None, "lm_head"), (None, "rope"), (0, "mlp"), (1, "moe"), (2, "gate")} <= parts
    assert {(index, part) for index in range(3) for part in ("attention", "norm")} <= parts
    floor = {(row.layer, row.part): row.floor_bytes for row in rows if row.floor_bytes is not None}
    assert floor == {place: work.bytes for place, work in floors["decode"].items()}
    assert all(row.floor_bytes is None for row in rows if row.phase == "prefill")
    assert any(event.get("name") == "step|decode|1|moe" for event in json.loads(path.read_text())["traceEvents"])
    # Nothing is left behind in the network.
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in runner.network.modules())
