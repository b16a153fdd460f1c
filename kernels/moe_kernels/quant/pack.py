"""Four-bit values in bytes: of every 16 columns, byte j (0..7) holds column j low and column 8 + j high.

Both nibbles of a byte then share every scale, and the columns of either are read in runs of 8.

Shapes: N rows, K columns, padded to whole units of 32.
"""

from __future__ import annotations

import torch

from moe_kernels.formats import PACK_RUN, PACK_UNIT

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def pad_columns(values_NK: torch.Tensor, unit: int = PACK_UNIT) -> torch.Tensor:
    """``values_NK`` with zeros up to a multiple of ``unit`` columns."""
    return torch.nn.functional.pad(values_NK, (0, -values_NK.shape[1] % unit))


def pack_nibbles(nibbles_NK: torch.Tensor) -> torch.Tensor:
    """Pack uint8 ``[N, K]`` of values 0 to 15, K a multiple of 32, into uint8 ``[N, K / 2]``.

    Example: the first byte of a row is ``column 0 | column 8 << 4``.
    """
    rows, columns = nibbles_NK.shape
    runs = nibbles_NK.view(rows, columns // (2 * PACK_RUN), 2, PACK_RUN)
    return (runs[:, :, 0] | (runs[:, :, 1] << 4)).reshape(rows, columns // 2)


def unpack_nibbles(packed_NB: torch.Tensor) -> torch.Tensor:
    """The inverse of ``pack_nibbles``; any leading dimensions."""
    *lead, size = packed_NB.shape
    runs = packed_NB.view(*lead, size // PACK_RUN, 1, PACK_RUN)
    return torch.cat((runs & 15, runs >> 4), dim=-2).reshape(*lead, 2 * size)


def to_e2m1(values: torch.Tensor) -> torch.Tensor:
    """Nibbles ``sign << 3 | exponent << 1 | mantissa`` of the nearest values, ties to the even mantissa, saturated."""
    magnitude = values.abs()
    # Midpoints between neighbours; at 0.75, 1.75, 3.5 the upper neighbour is the even one, elsewhere the lower.
    nibble = torch.zeros_like(magnitude, dtype=torch.uint8)
    for middle, up_at_tie in ((0.25, 0), (0.75, 1), (1.25, 0), (1.75, 1), (2.5, 0), (3.5, 1), (5.0, 0)):
        nibble += (magnitude >= middle) if up_at_tie else (magnitude > middle)
    return nibble | (torch.signbit(values).to(torch.uint8) << 3)


def from_e2m1(nibbles: torch.Tensor) -> torch.Tensor:
    """The float32 values of nibbles."""
    table = torch.tensor((*E2M1, *(-value for value in E2M1)), dtype=torch.float32, device=nibbles.device)
    return table[nibbles.to(torch.int32)]
