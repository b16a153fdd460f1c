"""The layer as a function: what is passed on to which implementation, and how its weights are marked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from moe_kernels import Quant
from moe_kernels.testing.oracle import random_problem

from workbench.modes import Reduction
from workbench.runtime import inputs
from workbench.runtime.inputs import Inputs, layer_function


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    seen: list[dict[str, Any]] = []

    def fused(x: torch.Tensor, weights: object, routing: object, **options: Any) -> torch.Tensor:
        seen.append(options)
        return x

    monkeypatch.setattr(inputs, "fused_experts", fused)
    return seen


def test_splits_are_for_triton_alone(calls: list[dict[str, Any]]) -> None:
    x, weights, routing = random_problem(3, 2, 8, 4, 1)
    for impl in ("triton", "reference", "package.module:function"):
        function = layer_function(weights, impl, split_k=4, reduction=Reduction.ATOMIC)
        Inputs(x, routing).call(function)
    assert calls == [
        {"impl": "triton", "split_k": 4, "reduction": "atomic"},
        {"impl": "reference"},
        {"impl": "package.module:function"},
    ]
    assert type(calls[0]["reduction"]) is str
    calls.clear()
    Inputs(x, routing).call(layer_function(weights, "triton"))
    assert calls == [{"impl": "triton", "split_k": None, "reduction": "deterministic"}]


@pytest.mark.parametrize("quant", list(Quant))
def test_every_tensor_of_the_weights_is_fixed_in_size_and_address(quant: Quant) -> None:
    _, weights, _ = random_problem(3, 2, 40, 24, 1, quant.value)
    layer_function(weights, "reference")
    tensors = weights.tensors()
    assert {"w1", "w2"} <= set(tensors)
    for name, tensor in tensors.items():
        assert tensor._dynamo_static_input_type, name
        assert tensor._dynamo_static_indices == set(range(tensor.dim())), name
