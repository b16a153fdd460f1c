"""The oracle against a loop by hand, on chosen rows, with experts that are asked for only when chosen."""

from __future__ import annotations

import pytest
import torch
from moe_kernels import ExpertWeights, Quant, Routing, fused_experts
from moe_kernels.testing.oracle import random_problem, tag_expected, tag_problem

from workbench.check.activations import roundings, with_fixed_scales
from workbench.check.budget import kernel_budget
from workbench.check.difference import difference
from workbench.check.oracle import MAX_ROWS, checked_rows, dequantized, oracle, plain_layer


def by_hand(x: torch.Tensor, weights: ExpertWeights, routing: Routing) -> torch.Tensor:
    w1, w2 = (w.double() for w in weights.dequantize())
    ffn = w2.shape[2]
    of_x, of_h = roundings(weights)
    rows = of_x(x)
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(x.shape[0]):
        for k in range(routing.topk_ids.shape[1]):
            e = int(routing.topk_ids[t, k])
            if 0 <= e < w1.shape[0]:
                both = w1[e] @ rows[t]
                gate, up = both[:ffn], both[ffn:]
                h = of_h((gate / (1 + (-gate).exp()) * up)[None])[0]
                out[t] += float(routing.topk_weights[t, k]) * (w2[e] @ h)
    return out


@pytest.mark.parametrize("quant", list(Quant))
def test_it_equals_a_loop_by_hand(quant: Quant) -> None:
    x, weights, routing = random_problem(7, 5, 24, 12, 3, quant.value)
    routing.topk_ids[2, 1] = -1
    routing.topk_ids[3, 0] = 5
    weights = with_fixed_scales(weights, x, routing)
    found = oracle(x, routing, dequantized(weights), 5, roundings(weights))
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, by_hand(x, weights, routing), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("quant", list(Quant))
def test_plain_code_of_the_dtype_is_near_and_the_specification_nearer(quant: Quant) -> None:
    x, weights, routing = random_problem(33, 5, 136, 72, 3, quant.value)
    weights = with_fixed_scales(weights, x, routing)
    problem = (x, routing, dequantized(weights), 5, roundings(weights))
    want = oracle(*problem)
    eager = difference(plain_layer(*problem, x.dtype), want).relative_l2
    reference = difference(fused_experts(x, weights, routing, impl="reference"), want).relative_l2
    assert eager is not None
    assert reference is not None
    assert 0 < eager < 0.03
    assert reference <= kernel_budget(eager, x.dtype, 136)


def test_the_closed_form() -> None:
    x, weights = tag_problem(4, 6, 16, 8)
    ids = torch.tensor([[0, 5], [1, 1], [2, -1], [6, 3]], dtype=torch.int32)
    routing = Routing(torch.tensor([[0.25, 0.5], [1.0, 1.0], [2.0, 1.0], [1.0, 0.5]]), ids)
    found = oracle(x, routing, dequantized(weights), 6)
    torch.testing.assert_close(found, tag_expected(routing, 6)[:, None].expand(4, 16), rtol=1e-6, atol=0)


def test_only_chosen_experts_are_asked_for() -> None:
    x, weights, routing = random_problem(3, 8, 16, 8, 2)
    routing.topk_ids.copy_(torch.tensor([[1, 6], [6, 1], [1, -1]]))
    asked = []

    def expert(index: int) -> tuple[torch.Tensor, torch.Tensor]:
        asked.append(index)
        return dequantized(weights)(index)

    oracle(x, routing, expert, 8)
    assert asked == [1, 6]


def test_rows_that_are_checked() -> None:
    assert checked_rows(1, 0).tolist() == [0]
    assert checked_rows(MAX_ROWS, 0).tolist() == list(range(MAX_ROWS))
    for tokens in (MAX_ROWS + 1, 100_000):
        rows = checked_rows(tokens, 3)
        assert len(rows) == len(rows.unique()) == MAX_ROWS
        assert rows[0] == 0
        assert rows[-1] == tokens - 1
        assert torch.equal(rows, checked_rows(tokens, 3))
    assert not torch.equal(checked_rows(100_000, 3), checked_rows(100_000, 4))


def test_budgets() -> None:
    assert kernel_budget(0.003, torch.bfloat16, 4096) == pytest.approx(2 * (0.003 + 2**-8 + 2**-24 * 64))
    assert kernel_budget(0.0, torch.float16, 1) == pytest.approx(2 * (2**-11 + 2**-24))
    # float32: far below what TF32 (2**-11) would give, far above a change of the order of sums.
    assert 1e-6 < kernel_budget(2e-7, torch.float32, 14336) < 2**-13
