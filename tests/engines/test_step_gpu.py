"""Whole steps on a GPU: every backend right, time in kernels, and what a profile finds there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from workbench.devices import find_device
from workbench.engines.environment import device_environment
from workbench.engines.point import run_point
from workbench.engines.session import PointSession
from workbench.measure.roofs import measure_roofs
from workbench.record import Record, Status
from workbench.spec import RunSpec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
]
Runner = Callable[..., Record]


@pytest.fixture(scope="module")
def run() -> Runner:
    device = find_device("cuda")
    roofs = measure_roofs(torch.device(device.torch_device))
    session = PointSession(device, device_environment(device).model_copy(update={"roofs": roofs}))

    def one(model: str, **values: Any) -> Record:
        given = {"subject": "step", "device": "cuda", "num_layers": 2, "moe_backend": "triton", "samples": 6}
        if model == "llama-3-8b":
            del given["moe_backend"]
        return run_point(RunSpec.from_flat({**given, "model": model, **values}), device, session, lambda *_: None)

    return one


@pytest.mark.parametrize("attention", ["reference", "sdpa", "triton"])
@pytest.mark.parametrize("model", ["llama-3-8b", "deepseek-v2-lite"])
def test_attention_backends(run: Runner, model: str, attention: str) -> None:
    record = run(model, attention_backend=attention, batch_size=3, input_len=37, output_len=5)
    assert record.status is Status.OK, (record.reason, record.detail)
    assert record.correctness is not None
    assert record.correctness.step is not None
    assert record.correctness.step.worst_error is not None
    assert record.correctness.step.worst_error < 0.02
    assert record.work is not None
    assert record.work.floor_share is not None
    assert 0 < record.work.floor_share < 1


@pytest.mark.parametrize("quant", ["fp16", "fp8_tensor", "fp8_channel", "fp8_block", "int8", "int8_weight", "int4"])
def test_formats(run: Runner, quant: str) -> None:
    record = run("deepseek-v2-lite", quant=quant, batch_size=2, input_len=33, output_len=4)
    assert record.status is Status.OK, (record.reason, record.detail)


@pytest.mark.parametrize("decode", ["absorbed", "expanded"])
@pytest.mark.parametrize("prefill", ["absorbed", "expanded"])
def test_forms_of_latent_attention(run: Runner, prefill: str, decode: str) -> None:
    values = {"mla_prefill": prefill, "mla_decode": decode, "attention_backend": "sdpa"}
    record = run("deepseek-v2-lite", batch_size=2, input_len=33, output_len=4, **values)
    assert record.status is Status.OK, (record.reason, record.detail)


def test_the_profile_is_of_kernels(run: Runner) -> None:
    record = run("deepseek-v2-lite", attention_backend="triton", batch_size=8, input_len=64, output_len=3)
    assert record.status is Status.OK, (record.reason, record.detail)
    decode = [row for row in record.profile if row.phase == "decode"]
    kinds = {row.kind for row in decode}
    assert {"gemm", "moe", "attention", "norm"} <= kinds, kinds
    taken = sum(row.time_us for row in decode)
    assert taken < record.metrics["decode"].median
    assert sum(row.time_us for row in decode if row.kind == "other") < 0.1 * taken
    weights = sum(row.floor_bytes or 0 for row in decode)
    assert record.work is not None
    assert weights == pytest.approx(record.work.bytes, rel=0.01)


def test_a_whole_llama_reads_its_weights_at_a_sane_rate(run: Runner) -> None:
    record = run("llama-3-8b", num_layers=None, batch_size=1, input_len=128, output_len=8, attention_backend="triton")
    assert record.status is Status.OK, (record.reason, record.detail)
    assert record.work is not None
    assert record.work.floor_us == pytest.approx(3450, rel=0.1)
    assert record.startup.load_s is not None
