"""Tile configurations of the Triton kernels: what they hold, how they are written, and which one a problem gets.

A configuration is a dict in SGLang's key names. One dict may serve both GEMMs, or ``{"up": {...}, "down": {...}}``
gives each its own; ``"PDL"`` (programmatic dependent launch) may stand beside them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, NamedTuple

import torch

from moe_kernels.experts.tuned_h200 import TUNED
from moe_kernels.types import DTYPE_NAME, parse_choice


class Layout(StrEnum):
    """How a program finds its rows.

    ``sorted``: blocks made by ``moe_align``. ``inline``: blocks worked out by each program, for up to INLINE_MAX_ROWS
    routed rows. ``token``: no tensor cores, one row (up) or one token with all its experts (down) a program.
    """

    SORTED = "sorted"
    INLINE = "inline"
    TOKEN = "token"


INLINE_MAX_ROWS = 1024
_LAYOUTS = list(Layout)
_INT_KEYS = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "num_warps", "num_stages")
_GEMM_KEYS = (*_INT_KEYS, "LAYOUT", "USE_TMA")


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

    def as_dict(self) -> dict[str, Any]:
        """The same in SGLang's key names."""
        ints = (self.block_m, self.block_n, self.block_k, self.group_m, self.num_warps, self.num_stages)
        return {**dict(zip(_INT_KEYS, ints, strict=True)), "LAYOUT": self.layout.value, "USE_TMA": self.use_tma}


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsConfig:
    """Configuration of a whole ``fused_experts`` call."""

    up: GemmConfig
    down: GemmConfig
    pdl: bool

    def as_dict(self) -> dict[str, Any]:
        """The form that ``config=`` takes."""
        return {"up": self.up.as_dict(), "down": self.down.as_dict(), "PDL": self.pdl}


class ResolvedConfig(NamedTuple):
    """A configuration and one sentence on where it came from."""

    config: dict[str, Any]
    source: str


def flatten_config(config: Mapping[str, Any]) -> list[int]:
    """Check a configuration and write it as integers, the form in which it passes through an op schema.

    Raises:
        ValueError: a missing or unknown key, or a value out of range; the sentence names the key.
    """
    if "up" in config or "down" in config:
        for key in config:
            if key not in ("up", "down", "PDL"):
                raise ValueError(f"config key {key!r} is unknown beside 'up' and 'down'; allowed: up, down, PDL.")
        if "up" not in config or "down" not in config:
            raise ValueError("config must hold both 'up' and 'down', or one dict for both.")
        up, down = _flatten_gemm(config["up"], "up"), _flatten_gemm(config["down"], "down")
    else:
        both = {key: value for key, value in config.items() if key != "PDL"}
        up = down = _flatten_gemm(both, "config")
    if up[6] == down[6] == 0 and up[0] != down[0]:
        raise ValueError(f"up and down must share BLOCK_SIZE_M where both are sorted; got {up[0]} and {down[0]}.")
    return [*up, *down, int(bool(config.get("PDL", False)))]


def _flatten_gemm(gemm: Mapping[str, Any], where: str) -> list[int]:
    for key in gemm:
        if key not in _GEMM_KEYS:
            raise ValueError(f"config key {key!r} of {where} is unknown; allowed: {', '.join(_GEMM_KEYS)}.")
    for key in _INT_KEYS:
        if key not in gemm:
            raise ValueError(f"config of {where} lacks {key}; needed: {', '.join(_INT_KEYS)}.")
    layout = _LAYOUTS.index(parse_choice(Layout, gemm.get("LAYOUT", Layout.SORTED.value), "LAYOUT"))
    block_m, block_n, block_k, group_m, num_warps, num_stages = (gemm[key] for key in _INT_KEYS)
    token = layout == 2
    if block_m != 1 if token else not _power_of_two(block_m, 16, 256):
        allowed = "1 where LAYOUT is token" if token else "a power of two from 16 to 256"
        raise ValueError(f"BLOCK_SIZE_M of {where} must be {allowed}; got {block_m!r}.")
    smallest = 1 if token else 16
    for key, value, low, high in (
        ("BLOCK_SIZE_N", block_n, smallest, 256),
        ("BLOCK_SIZE_K", block_k, 16, 2048),
        ("num_warps", num_warps, 1, 16),
    ):
        if not _power_of_two(value, low, high):
            raise ValueError(f"{key} of {where} must be a power of two from {low} to {high}; got {value!r}.")
    for key, value, high in (("GROUP_SIZE_M", group_m, 1024), ("num_stages", num_stages, 16)):
        if not isinstance(value, int) or not 1 <= value <= high:
            raise ValueError(f"{key} of {where} must be an integer from 1 to {high}; got {value!r}.")
    use_tma = bool(gemm.get("USE_TMA", False))
    if use_tma and token:
        raise ValueError(f"USE_TMA of {where} must be False where LAYOUT is token.")
    return [block_m, block_n, block_k, group_m, num_warps, num_stages, layout, int(use_tma)]


def _power_of_two(value: Any, low: int, high: int) -> bool:
    return isinstance(value, int) and low <= value <= high and value & (value - 1) == 0


@functools.lru_cache(maxsize=1024)
def unflatten_config(flat: tuple[int, ...]) -> ExpertsConfig:
    """The inverse of ``flatten_config``."""

    def gemm(part: Sequence[int]) -> GemmConfig:
        return GemmConfig(
            block_m=part[0],
            block_n=part[1],
            block_k=part[2],
            group_m=part[3],
            num_warps=part[4],
            num_stages=part[5],
            layout=_LAYOUTS[part[6]],
            use_tma=bool(part[7]),
        )

    return ExpertsConfig(up=gemm(flat[0:8]), down=gemm(flat[8:16]), pdl=bool(flat[16]))


class Target(NamedTuple):
    """What of a GPU decides about tiles: its name and the shared memory, in bytes, that one block may take."""

    name: str
    shared_bytes: int


H200 = Target("NVIDIA H200", 232448)


@functools.cache
def target_of(device: torch.device) -> Target:
    """The GPU that ``device`` is; a device that is none (interpreted kernels) counts as an H200."""
    if device.type != "cuda":
        return H200
    found = torch.cuda.get_device_properties(device)
    # What a kernel may opt in to; without that number, what every CUDA device has.
    return Target(found.name, int(getattr(found, "shared_memory_per_block_optin", 48 * 1024)))


@functools.lru_cache(maxsize=1024)
def default_config(
    num_tokens: int,
    num_experts: int,
    hidden_size: int,
    intermediate_size: int,
    top_k: int,
    dtype: torch.dtype,
    target: Target = H200,
) -> tuple[ExpertsConfig, str]:
    """The configuration used where none is given, and one sentence on where it came from.

    Tuned entries serve the GPU they were measured on; another gets the default rule, with as many stages as its shared
    memory holds.
    """
    name = DTYPE_NAME[dtype]
    shape = (num_experts, hidden_size, intermediate_size, top_k)
    tuned = TUNED.get((*shape, name))
    problem = f"E={num_experts}, D={hidden_size}, F={intermediate_size}, K={top_k}, {name}"
    if tuned and "H200" in target.name:
        # The next larger tuned count serves; its layout is then legal for fewer rows too.
        nearest = min((m for m in tuned if m >= num_tokens), default=max(tuned))
        config = unflatten_config(tuple(flatten_config(tuned[nearest])))
        exact = "" if nearest == num_tokens else f", nearest tuned count to {num_tokens}"
        return config, f"Tuned on NVIDIA H200 for {problem} at {nearest} tokens{exact}."
    config = _fit(_heuristic(num_tokens, *shape, dtype), dtype, target.shared_bytes)
    where = f" on {target.name}" if tuned else ""
    return config, f"Default rule: no tuned entry for {problem}{where}."


def resolve_config(
    *,
    num_tokens: int,
    num_experts: int,
    hidden_size: int,
    intermediate_size: int,
    top_k: int,
    dtype: torch.dtype,
    device: torch.device | None = None,
) -> ResolvedConfig:
    """Say which tile configuration the Triton implementation takes for a problem when ``config`` is None.

    ``device`` is the GPU it is for; None means an H200.

    Raises:
        ValueError: ``dtype`` is none of float32, bfloat16, float16.
    """
    if dtype not in DTYPE_NAME:
        raise ValueError(f"dtype must be one of {', '.join(DTYPE_NAME.values())}; got {dtype}.")
    target = H200 if device is None else target_of(device)
    config, source = default_config(num_tokens, num_experts, hidden_size, intermediate_size, top_k, dtype, target)
    return ResolvedConfig(config.as_dict(), source)


def _heuristic(tokens: int, experts: int, hidden: int, ffn: int, top_k: int, dtype: torch.dtype) -> ExpertsConfig:
    rows = tokens * top_k
    if dtype == torch.float32:
        layout = Layout.INLINE if rows <= 128 else Layout.SORTED
        gemm = _gemm(layout, 16 if rows <= 32 * experts else 64, 32, 32, 8, 4, 2)
        return ExpertsConfig(up=gemm, down=gemm, pdl=False)
    if tokens == 1:
        up = _gemm(Layout.TOKEN, 1, _columns(top_k * ffn), 256, 1, 4, 3)
        down = _gemm(Layout.TOKEN, 1, _columns(hidden), 256, 1, 4, 4)
        return ExpertsConfig(up=up, down=down, pdl=False)
    per_expert = rows / experts
    if per_expert <= 16:
        layout = Layout.INLINE if rows <= 256 else Layout.SORTED
        up = _gemm(layout, 16, 32, 128, 16, 4, 4)
        down = _gemm(layout, 16, 64, 128, 16, 4, 4)
    elif per_expert <= 48:
        up = _gemm(Layout.SORTED, 32, 64, 128, 16, 4, 3)
        down = _gemm(Layout.SORTED, 32, 128, 128, 16, 4, 3)
    elif per_expert <= 128:
        up = _gemm(Layout.SORTED, 64, 64, 64, 16, 4, 4)
        down = _gemm(Layout.SORTED, 64, 128, 64, 16, 4, 4)
    else:
        up = _gemm(Layout.SORTED, 128, 128, 64, 16, 8, 3)
        down = _gemm(Layout.SORTED, 128, 256, 64, 16, 8, 3)
    return ExpertsConfig(up=up, down=down, pdl=False)


def _fit(config: ExpertsConfig, dtype: torch.dtype, shared_bytes: int) -> ExpertsConfig:
    """Take away stages, then columns, until the tiles in flight fit the shared memory."""

    def fit(gemm: GemmConfig, tiles_of_w: int) -> GemmConfig:
        while gemm.layout is not Layout.TOKEN:
            rows = gemm.block_m + tiles_of_w * gemm.block_n
            if gemm.num_stages * rows * gemm.block_k * dtype.itemsize + 4096 <= shared_bytes:
                break
            if gemm.num_stages > 2:
                gemm = replace(gemm, num_stages=gemm.num_stages - 1)
            elif gemm.block_n > 16:
                gemm = replace(gemm, block_n=gemm.block_n // 2)
            else:
                break
        return gemm

    return replace(config, up=fit(config.up, 2), down=fit(config.down, 1))


def _columns(total: int) -> int:
    """Columns a program such that some 400 programs share ``total`` of them."""
    return max(4, min(16, 1 << max(0, (total // 400).bit_length() - 1)))


def _gemm(layout: Layout, m: int, n: int, k: int, group: int, warps: int, stages: int) -> GemmConfig:
    return GemmConfig(
        block_m=m,
        block_n=n,
        block_k=k,
        group_m=group,
        num_warps=warps,
        num_stages=stages,
        layout=layout,
        use_tma=False,
    )
