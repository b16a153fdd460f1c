"""What a run on FP4 units is held against, what bounds it, and what the workbench says of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from moe_kernels import ExpertWeights, Quant
from moe_kernels.experts.reference import fused_experts_reference
from moe_kernels.quant.fp4 import through_fp4
from moe_kernels.testing.oracle import random_problem

from workbench import support
from workbench.arithmetic import describe, rate_name
from workbench.check.activations import roundings
from workbench.check.difference import difference
from workbench.check.truth import Problem, TruthCache, find_truth
from workbench.devices import DATASHEETS, DeviceInfo
from workbench.measure.floor import SampleWork, implausible_reason, weigh
from workbench.modes import BACKENDS, L2
from workbench.spec import RunSpec
from workbench.support import find_reasons

FP4 = (Quant.NVFP4, Quant.MXFP4)
each_format = pytest.mark.parametrize("quant", FP4)


class Source:
    def __init__(self, weights: ExpertWeights) -> None:
        self.weights = weights

    def expert(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.weights.w1[index], self.weights.w2[index]

    def dense_output(self, x: torch.Tensor) -> None:
        return None


def bench(quant: Quant) -> tuple[Any, ExpertWeights, Problem]:
    x, master, routing = random_problem(9, 4, 64, 48, 2)
    weights = ExpertWeights.from_dense(master.w1, master.w2, quant)
    return Source(master), weights, Problem(x=x.to(weights.dtype), x_float32=x, routing=routing)


@each_format
def test_activations_go_through_fp4_for_the_native_backend_alone(quant: Quant) -> None:
    _, weights, problem = bench(quant)
    of_x, of_h = roundings(weights, "triton_fp4")
    assert torch.equal(of_x(problem.x), through_fp4(problem.x, quant).double())
    assert torch.equal(of_h(problem.x.double()), of_x(problem.x))  # rounded to the compute dtype first
    assert torch.equal(roundings(weights)[0](problem.x), problem.x.double())
    assert torch.equal(roundings(weights, "triton")[1](problem.x), problem.x.double())


@each_format
def test_truth_holds_the_native_layer_and_not_the_weight_only_one(quant: Quant) -> None:
    source, weights, problem = bench(quant)
    out = fused_experts_reference(problem.x, weights, problem.routing, impl="triton_fp4").double()
    plain = fused_experts_reference(problem.x, weights, problem.routing).double()
    native, only = find_truth(source, weights, problem, 0, "triton_fp4"), find_truth(source, weights, problem, 0)

    def error(got: torch.Tensor, truth: Any) -> float:
        found = difference(got, truth.kernel).relative_l2
        assert found is not None
        return found

    assert error(out, native) <= native.budget
    assert error(plain, only) <= only.budget
    assert error(out, only) > 3 * only.budget
    assert error(plain, native) > 0.05


def test_truths_of_both_are_kept_apart() -> None:
    source, weights, problem = bench(Quant.NVFP4)
    cache = TruthCache()
    first = cache.find("key", source, weights, problem, 0)
    assert cache.find("key", source, weights, problem, 0, "triton") is first
    native = cache.find("key", source, weights, problem, 0, "triton_fp4")
    assert native is not first
    assert cache.find("key", source, weights, problem, 0, "triton_fp4") is native
    assert cache.find("key", source, weights, problem, 0) is first


@each_format
def test_arithmetic_and_rate(quant: Quant) -> None:
    words = describe(quant, backend="triton_fp4", capability=(10, 0))
    assert words.startswith("fp4 x fp4, float32 accumulation, ")
    assert ("one scale a token" in words) == (quant is Quant.NVFP4)
    assert describe(quant, backend="triton", capability=(9, 0)).startswith("weights unpacked to bf16")
    assert (rate_name(quant, "triton_fp4"), rate_name(quant)) == ("fp4", "bf16")
    assert DATASHEETS["B200"].rate("fp4") == 4 * DATASHEETS["B200"].rate("bf16")
    work, roofs = SampleWork(10**6, 10**12, 4), {"read": 1e12, "bf16": 1e15}
    # No rate of FP4 is measured: no floor, rather than one of another format.
    assert weigh([work], [10.0], quant, roofs, backend="triton_fp4").floor_us is None
    assert weigh([work], [2000.0], quant, roofs).floor_us == pytest.approx(1000.0)
    sheet = DATASHEETS["B200"]
    assert implausible_reason([work], [200.0], quant, sheet, L2.COLD, "triton_fp4") is None
    assert implausible_reason([work], [200.0], quant, sheet, L2.COLD)


@each_format
def test_support_matrix(quant: Quant, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(support, "c_compiler", lambda: "/usr/bin/gcc")
    assert "triton_fp4" in BACKENDS

    def said(name: str, capability: tuple[int, int] | None, quant: str = quant.value) -> list[str]:
        device = DeviceInfo(
            type="cpu" if capability is None else "cuda",
            name=name,
            torch_device="cpu" if capability is None else "cuda:0",
            capability=capability,
            memory_bytes=180 * 2**30,
        )
        spec = RunSpec.from_flat({"moe_backend": "triton_fp4", "quant": quant})
        return [reason.sentence for reason in find_reasons(spec, device) if reason.field == "moe_backend"]

    needs = "triton_fp4 needs FP4 units, which GPUs of compute capability 10.x and 12.x (Blackwell) have; "
    assert said("NVIDIA B200", (10, 0)) == []
    assert said("NVIDIA GeForce RTX 5090", (12, 0)) == []
    assert said("NVIDIA H200", (9, 0)) == [needs + "this device, NVIDIA H200, has 9.0."]
    assert said("Some CPU", None) == [needs + "this device, Some CPU, is of type cpu."]
    assert said("NVIDIA B200", (10, 0), "fp8_block") == ["triton_fp4 multiplies nvfp4 and mxfp4, not fp8_block."]
