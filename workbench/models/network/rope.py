"""Rotary position embedding.

Shapes: S rows, H heads, R turned dimensions.

A pair `(x[i], x[i + R/2])` at position p turns by the angle `p * frequency[i]`. Where a checkpoint's pairs are
neighbours, the rows that make queries and keys are put in this order when they are loaded (`halves_order`): the scores
are the same.
"""

from __future__ import annotations

from math import ceil, floor, log, pi

import torch
from torch import nn

from workbench.models.network.rope_config import RopeConfig

Turn = tuple[torch.Tensor, torch.Tensor]
"""Cosine, and sine with the sign that its half takes: float32 `[S, 1, R]` each."""


class Rope(nn.Module):
    """Cosines and sines of positions: angles in float64, at any position, with nothing kept per position.

    Attributes:
        frequencies: float64 `[R / 2]`.
        magnitude: multiplies cosine and sine.
        part: of the network, for profiles.
    """

    part = "rope"

    def __init__(self, config: RopeConfig, dim: int, device: torch.device | str) -> None:
        super().__init__()
        self.frequencies = rope_frequencies(config, dim).to(device)
        self.magnitude = config.magnitude

    def forward(self, positions_S: torch.Tensor) -> Turn:
        """The turn of int64 positions."""
        angles_S1R = positions_S.to(torch.float64)[:, None, None] * self.frequencies
        cos, sin = angles_S1R.cos() * self.magnitude, angles_S1R.sin() * self.magnitude
        return torch.cat((cos, cos), -1).to(torch.float32), torch.cat((-sin, sin), -1).to(torch.float32)


def turned(x_SHR: torch.Tensor, turn: Turn) -> torch.Tensor:
    """Turn every head of every row, in float32, rounded once: `[S, H, R]` in the dtype of `x_SHR`.

    With R = 4 and angles a, b: `x0 cos a - x2 sin a, x1 cos b - x3 sin b, x2 cos a + x0 sin a, x3 cos b + x1 sin b`.
    """
    cos_S1R, sin_S1R = turn
    other_SHR = x_SHR.roll(x_SHR.shape[-1] // 2, -1)
    return (x_SHR * cos_S1R + other_SHR * sin_S1R).to(x_SHR.dtype)


def halves_order(dim: int) -> torch.Tensor:
    """Where each dimension comes from when pairs of neighbours are put a half apart: R = 6 -> 0 2 4 1 3 5."""
    return torch.cat((torch.arange(0, dim, 2), torch.arange(1, dim, 2)))


def rope_frequencies(config: RopeConfig, dim: int) -> torch.Tensor:
    """Radians a position, for each pair: float64 `[dim / 2]` on the CPU.

    `none`: `theta ** (-2 i / dim)`. `linear`: divided by `factor`. `llama3`: long wavelengths are divided, short ones
    kept, with a smooth passage between. `yarn`: the same by how often a pair turns within the original context
    (https://arxiv.org/abs/2309.00071).
    """
    plain = config.theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    if config.kind == "none":
        return plain
    stretched = plain / config.factor
    if config.kind == "linear":
        return stretched
    if config.kind == "llama3":
        turns = config.original_max_position * plain / (2 * pi)
        low, high = config.low_freq_factor, config.high_freq_factor
        keep = ((turns - low) / (high - low)).clamp(0, 1)
    else:
        keep = 1 - _yarn_ramp(config, dim)
    return plain * keep + stretched * (1 - keep)


def _yarn_ramp(config: RopeConfig, dim: int) -> torch.Tensor:
    """0 for the pairs that are kept, rising to 1 for those that are stretched: float64 `[dim / 2]`."""

    def pair_with(turns: float) -> float:
        """The (fractional) pair that turns so often within the original context."""
        return dim * log(config.original_max_position / (turns * 2 * pi)) / (2 * log(config.theta))

    low, high = pair_with(config.beta_fast), pair_with(config.beta_slow)
    if config.truncate:
        low, high = floor(low), ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    return ((torch.arange(dim // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
