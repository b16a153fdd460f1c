"""Tiles and launch options of the two GEMMs, as the launchers take them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

INLINE_MAX_ROWS = 1024
INT_KEYS = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "num_warps", "num_stages")


class Layout(StrEnum):
    """How a program finds its rows.

    ``sorted``: blocks made by ``moe_align``. ``inline``: blocks worked out by each program, for up to INLINE_MAX_ROWS
    routed rows. ``token``: no tensor cores, one row (up) or one token with all its experts (down) a program.
    """

    SORTED = "sorted"
    INLINE = "inline"
    TOKEN = "token"


@dataclass(frozen=True, kw_only=True, slots=True)
class GemmConfig:
    """Tiles and launch options of one of the two GEMMs."""

    block_m: int
    block_n: int
    block_k: int
    group_m: int
    num_warps: int
    num_stages: int
    layout: Layout
    use_tma: bool
    swap_ab: bool
    split_k: int

    def as_dict(self) -> dict[str, Any]:
        """The same in SGLang's key names."""
        ints = (self.block_m, self.block_n, self.block_k, self.group_m, self.num_warps, self.num_stages)
        return {
            **dict(zip(INT_KEYS, ints, strict=True)),
            "LAYOUT": self.layout.value,
            "USE_TMA": self.use_tma,
            "SWAP_AB": self.swap_ab,
            "SPLIT_K": self.split_k,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsConfig:
    """Configuration of a whole ``fused_experts`` call."""

    up: GemmConfig
    down: GemmConfig
    pdl: bool

    def as_dict(self) -> dict[str, Any]:
        """The form that ``config=`` takes."""
        return {"up": self.up.as_dict(), "down": self.down.as_dict(), "PDL": self.pdl}
