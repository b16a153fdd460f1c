"""Tile configurations of the Triton kernels: what they hold, how they are written, and which one a problem gets.

A configuration is a dict in SGLang's key names. One dict may serve both GEMMs, or ``{"up": {...}, "down": {...}}``
gives each its own; ``"PDL"`` (programmatic dependent launch) may stand beside them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from moe_kernels.experts.rule import fit, rule
from moe_kernels.experts.rule_fp4 import SOURCE as FP4_SOURCE
from moe_kernels.experts.rule_fp4 import fp4_config
from moe_kernels.experts.tiles import INLINE_MAX_ROWS as INLINE_MAX_ROWS
from moe_kernels.experts.tiles import INT_KEYS, ExpertsConfig, GemmConfig, Layout
from moe_kernels.tuning.lookup import Found, find_config
from moe_kernels.tuning.names import Problem
from moe_kernels.types import DTYPE_NAME, Impl, Quant, parse_choice

_LAYOUTS = list(Layout)
_GEMM_KEYS = (*INT_KEYS, "LAYOUT", "USE_TMA", "SWAP_AB", "SPLIT_K")
_GEMM_INTS = 10
MAX_SPLIT_K = 64


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
    return [*up, *down, int(_boolean(config.get("PDL", False), "PDL", "config"))]


def _flatten_gemm(gemm: Any, where: str) -> list[int]:
    if not isinstance(gemm, Mapping):
        raise ValueError(f"{where} must be a dict of {', '.join(_GEMM_KEYS)}; got {gemm!r}.")
    for key in gemm:
        if key not in _GEMM_KEYS:
            raise ValueError(f"config key {key!r} of {where} is unknown; allowed: {', '.join(_GEMM_KEYS)}.")
    for key in INT_KEYS:
        if key not in gemm:
            raise ValueError(f"config of {where} lacks {key}; needed: {', '.join(INT_KEYS)}.")
    layout = _LAYOUTS.index(parse_choice(Layout, gemm.get("LAYOUT", Layout.SORTED.value), "LAYOUT"))
    block_m, block_n, block_k, group_m, num_warps, num_stages = (gemm[key] for key in INT_KEYS)
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
    use_tma, swap_ab = (_boolean(gemm.get(key, False), key, where) for key in ("USE_TMA", "SWAP_AB"))
    if use_tma and token:
        raise ValueError(f"USE_TMA of {where} must be False where LAYOUT is token.")
    if swap_ab and token:
        raise ValueError(f"SWAP_AB of {where} must be False where LAYOUT is token.")
    split_k = gemm.get("SPLIT_K", 1)
    if not isinstance(split_k, int) or isinstance(split_k, bool) or not 1 <= split_k <= MAX_SPLIT_K:
        raise ValueError(f"SPLIT_K of {where} must be an integer from 1 to {MAX_SPLIT_K}; got {split_k!r}.")
    return [block_m, block_n, block_k, group_m, num_warps, num_stages, layout, int(use_tma), int(swap_ab), split_k]


def _boolean(value: Any, key: str, where: str) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{key} of {where} must be True or False; got {value!r}.")
    return value


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
            swap_ab=bool(part[8]),
            split_k=part[9],
        )

    end = _GEMM_INTS
    return ExpertsConfig(up=gemm(flat[:end]), down=gemm(flat[end : 2 * end]), pdl=bool(flat[2 * end]))


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


_chosen: dict[tuple[Problem, Target], tuple[Found, ExpertsConfig]] = {}


def default_config(problem: Problem, target: Target = H200) -> tuple[ExpertsConfig, str]:
    """The configuration used where none is given, and one sentence on where it came from.

    A tuned row serves the GPU it was measured on; where there is none, a rule does, with as many stages as the shared
    memory of ``target`` holds.
    """
    found = find_config(problem, target.name, target.shared_bytes)
    known = _chosen.get((problem, target))
    if known is None or known[0] is not found:
        if found.config is not None:
            config = unflatten_config(tuple(flatten_config(found.config)))
        else:
            config = fit(rule(problem), problem, target.shared_bytes)
        if len(_chosen) >= 4096:
            _chosen.clear()
        known = _chosen[problem, target] = (found, config)
    source = found.source if found.config is not None else f"Default rule. {found.source}"
    return known[1], source


def resolve_config(
    *,
    num_tokens: int,
    num_experts: int,
    hidden_size: int,
    intermediate_size: int,
    top_k: int,
    dtype: torch.dtype,
    quant: str | None = None,
    group_size: int = 0,
    device: torch.device | None = None,
    impl: str = "triton",
) -> ResolvedConfig:
    """Say which tile configuration the Triton implementation takes for a problem when ``config`` is None.

    ``dtype`` is that of the activations, ``quant`` the format of the weights (None: as ``dtype``), ``group_size`` that
    of int4, ``device`` the GPU it is for; None means an H200. ``top_k`` counts shared experts that are in the weights.
    ``impl`` is ``"triton"`` or ``"triton_fp4"``.

    Raises:
        ValueError: ``dtype`` is none of float32, bfloat16, float16; an unknown ``quant`` or ``impl``.
    """
    if impl not in (Impl.TRITON.value, Impl.TRITON_FP4.value):
        raise ValueError(f"impl must be triton or triton_fp4; got {impl!r}.")
    if dtype not in DTYPE_NAME:
        raise ValueError(f"dtype must be one of {', '.join(DTYPE_NAME.values())}; got {dtype}.")
    scheme = parse_choice(Quant, DTYPE_NAME[dtype] if quant is None else str(quant), "quant")
    target = H200 if device is None else target_of(device)
    problem = Problem(
        num_tokens, num_experts, hidden_size, intermediate_size, top_k, scheme.value, DTYPE_NAME[dtype], group_size
    )
    if impl == Impl.TRITON_FP4.value:
        return ResolvedConfig(fp4_config(problem, target.shared_bytes).as_dict(), FP4_SOURCE)
    config, source = default_config(problem, target)
    return ResolvedConfig(config.as_dict(), source)
