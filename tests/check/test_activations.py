"""Activations as a scheme leaves them: by hand, at ties and edges, and for part of a call as for the whole."""

from __future__ import annotations

import math

import pytest
import torch
from moe_kernels import ExpertWeights, Quant, Routing
from moe_kernels.formats import FORMATS
from moe_kernels.testing.oracle import random_problem

from workbench.check.activations import quantized, roundings, with_fixed_scales
from workbench.check.oracle import dequantized, oracle

E4M3 = sorted(
    {s * (1 + m / 8) * 2.0**e for s in (-1, 1) for m in range(8) for e in range(-6, 9) if (m, e) != (7, 8)}
    | {s * m / 8 * 2.0**-6 for s in (-1, 1) for m in range(8)}
)


def nearest(value: float, kind: str) -> float:
    """The stored number nearest to `value`, the even one of two that are as near."""
    if kind == "int8":
        return float(round(max(-127.0, min(127.0, value))))
    value = max(-448.0, min(448.0, value))
    near = min(abs(candidate - value) for candidate in E4M3)
    both = [index for index, candidate in enumerate(E4M3) if abs(candidate - value) == near]
    middle = len(E4M3) // 2
    return E4M3[both[0] if len(both) == 1 else next(i for i in both if (i - middle) % 2 == 0)]


def by_hand(x: torch.Tensor, kind: str, most: float, groups: list[list[tuple[int, int]]]) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=torch.float64)
    for group in groups:
        largest = torch.tensor(max(abs(float(x[at])) for at in group), dtype=torch.float32)
        scale, inverse = largest / most, most / largest
        for at in group:
            scaled = float(torch.tensor(float(x[at]), dtype=torch.float32) * inverse)
            out[at] = nearest(scaled, kind) * float(scale)
    return out


@pytest.mark.parametrize(
    ("kind", "most", "granularity"),
    [("fp8", 448.0, g) for g in ("token", "block", "tensor")] + [("int8", 127.0, "token")],
)
def test_each_number_is_the_nearest_one_that_is_stored(kind: str, most: float, granularity: str) -> None:
    rows, columns = 3, 135
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    groups = {
        "token": [[(r, c) for c in range(columns)] for r in range(rows)],
        "block": [[(r, c) for c in part] for r in range(rows) for part in (range(128), range(128, columns))],
        "tensor": [[(r, c) for r in range(rows) for c in range(columns)]],
    }[granularity]
    assert torch.equal(quantized(x, kind, granularity), by_hand(x, kind, most, groups))


def test_ties_go_to_even_and_fixed_scales_saturate() -> None:
    one = torch.ones(1)
    x = torch.tensor([[0.5, 1.5, 2.5, -0.5, -1.5, 0.0, 0.0]])
    x[0, 5:] = torch.tensor([127.0, -127.0])
    assert quantized(x, "int8", "token").tolist() == [[0, 2, 2, 0, -2, 127, -127]]
    x = torch.tensor([[17.0, 19.0, 1000.0, -1000.0, 2.0**-10, 3 * 2.0**-10]])
    assert quantized(x, "fp8", "tensor", one).tolist() == [[16, 20, 448, -448, 0, 2.0**-8]]


@pytest.mark.parametrize("granularity", ["token", "block", "tensor"])
def test_what_is_not_finite_counts_for_no_scale(granularity: str) -> None:
    x = torch.ones(2, 130)
    x[0, 3], x[0, 4] = float("inf"), float("nan")
    got = quantized(x, "fp8", granularity)
    finite = torch.isfinite(x)
    torch.testing.assert_close(got[finite], torch.ones_like(got[finite]), rtol=1e-7, atol=0)
    assert bool(torch.isnan(got[0, 4]))
    assert not quantized(torch.zeros(3, 5), "fp8", granularity).any()


@pytest.mark.parametrize("quant", list(Quant))
def test_formats_without_activation_scales_leave_activations_alone(quant: Quant) -> None:
    _, weights, _ = random_problem(3, 2, 40, 24, 2, quant.value)
    x = torch.randn(3, 40).to(weights.dtype)
    of_x, of_h = roundings(weights)
    assert of_x(x).dtype == torch.float64
    assert torch.equal(of_x(x), x.double()) == (FORMATS[quant].activation == "")
    h = torch.randn(3, 24, dtype=torch.float64)
    assert torch.equal(of_h(h), h) == (FORMATS[quant].activation == "")


def test_part_of_a_call_gets_the_scales_of_the_whole() -> None:
    x, weights, routing = random_problem(21, 4, 40, 24, 2, "fp8_tensor")
    x[17] *= 8.0  # the row that decides both scales, and is not among those looked at
    x[5] *= 1000.0  # would decide them, but names no expert
    routing.topk_ids[5] = -1
    fixed = with_fixed_scales(weights, x, routing)
    assert fixed.x_scale is not None
    assert fixed.h_scale is not None
    assert float(fixed.x_scale) == pytest.approx(float(x[17].abs().max()) / 448)
    kept = torch.arange(21) != 5
    used = Routing(routing.topk_weights[kept], routing.topk_ids[kept])
    whole = oracle(x[kept], used, dequantized(fixed), 4, roundings(fixed))
    part = Routing(routing.topk_weights[:3], routing.topk_ids[:3])
    few = oracle(x[:3], part, dequantized(fixed), 4, roundings(fixed))
    torch.testing.assert_close(few, whole[:3], rtol=1e-12, atol=1e-12)
    alone = oracle(x[:3], part, dequantized(weights), 4, roundings(weights))
    assert float((few - alone).norm() / few.norm()) > 1e-3
    assert with_fixed_scales(fixed, x, routing) is fixed
    _, other, _ = random_problem(3, 2, 40, 24, 2, "fp8_channel")
    assert with_fixed_scales(other, x, routing) is other


def test_no_row_in_use_gives_scales_that_divide() -> None:
    x, weights, routing = random_problem(3, 4, 40, 24, 2, "fp8_tensor")
    routing.topk_ids.fill_(-1)
    fixed = with_fixed_scales(weights, x, routing)
    assert fixed.x_scale is not None
    assert 0 < float(fixed.x_scale) < math.inf
    assert not oracle(x, routing, dequantized(fixed), 4, roundings(fixed)).any()


def test_a_static_scale_is_the_one_that_is_used() -> None:
    _, master, _ = random_problem(5, 3, 40, 24, 2)
    scales = {"x_scale": torch.tensor([0.5]), "h_scale": torch.tensor([0.25])}
    weights = ExpertWeights.from_dense(master.w1, master.w2, "fp8_tensor", **scales)
    of_x, of_h = roundings(weights)
    x = torch.tensor([[1.0, 3.3, 1e4]]).to(torch.bfloat16)
    assert of_x(x).tolist() == [[1.0, 3.25, 224.0]]
    assert of_h(x.double()).tolist() == [[1.0, 3.25, 112.0]]
