"""How far one tensor is from another, whatever their scale."""

from __future__ import annotations

import math

import torch

from workbench.record import Difference


def difference(got: torch.Tensor, want: torch.Tensor) -> Difference:
    """Compare in float64; every number is None where a value of either is not finite.

    Where `want` is zero throughout: 0 for an equal `got`, else None, since no relative error exists.
    """
    got, want = got.double(), want.double()
    if got.shape != want.shape or not bool(torch.isfinite(got).all()) or not bool(torch.isfinite(want).all()):
        return Difference(relative_l2=None, max_over_rms=None, dissimilarity=None)
    if want.numel() == 0:
        return Difference(relative_l2=0.0, max_over_rms=0.0, dissimilarity=0.0)
    error = got - want
    squares = float(want.square().sum())
    both = squares + float(got.square().sum())
    if squares == 0.0:
        same = 0.0 if both == 0.0 else None
        return Difference(relative_l2=same, max_over_rms=same, dissimilarity=same)
    return Difference(
        relative_l2=math.sqrt(float(error.square().sum()) / squares),
        max_over_rms=float(error.abs().max()) / math.sqrt(squares / want.numel()),
        dissimilarity=1.0 - 2.0 * float((got * want).sum()) / both,
    )
