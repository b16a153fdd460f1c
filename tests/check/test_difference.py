"""Differences are scale-aware and never a number where something was not finite."""

from __future__ import annotations

import pytest
import torch

from workbench.check.difference import difference

WANT = torch.tensor([[3.0, 4.0], [0.0, 0.0]])


def test_known_numbers() -> None:
    found = difference(torch.tensor([[3.0, 4.0], [0.0, 0.5]]), WANT)
    assert found.relative_l2 == pytest.approx(0.1)
    assert found.max_over_rms == pytest.approx(0.5 / 2.5)
    assert found.dissimilarity == pytest.approx(1 - 2 * 25 / (25 + 25.25))


def test_a_dropped_scale_is_seen() -> None:
    found = difference(0.5 * WANT, WANT)
    assert found.relative_l2 == pytest.approx(0.5)
    assert found.dissimilarity == pytest.approx(0.2)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_not_finite_is_none(bad: float) -> None:
    spoilt = WANT.clone()
    spoilt[1, 1] = bad
    for pair in ((spoilt, WANT), (WANT, spoilt)):
        assert difference(*pair).model_dump() == {"relative_l2": None, "max_over_rms": None, "dissimilarity": None}


def test_zeros_and_shapes() -> None:
    zeros = torch.zeros(2, 2)
    assert difference(zeros, zeros).relative_l2 == 0.0
    assert difference(WANT, zeros).relative_l2 is None
    assert difference(zeros, WANT).relative_l2 == 1.0
    assert difference(WANT[:1], WANT).relative_l2 is None
    assert difference(torch.empty(0, 3), torch.empty(0, 3)).relative_l2 == 0.0


def test_it_is_computed_in_float64() -> None:
    want = torch.full((4096,), 1.0, dtype=torch.float64)
    assert difference(want + 1e-12, want).relative_l2 == pytest.approx(1e-12, rel=1e-3)
