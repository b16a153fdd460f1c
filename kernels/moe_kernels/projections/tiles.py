"""Tiles and launch options of one product, as the launcher takes them.

Shapes: T tokens, N outputs, K inputs.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields
from typing import Any, NamedTuple

from moe_kernels.formats import BLOCK, FORMATS
from moe_kernels.names import Quant

# Rows up to which one scale for all of them may be worked out by every program.
INSIDE_ROWS = 16
MAX_SPLIT_K = 64


class LinearProblem(NamedTuple):
    """What a choice of tiles depends on.

    Attributes:
        num_tokens, outputs, inputs: T, N, K.
        quant: format of the weights.
        dtype: of activations and result: ``"fp32"``, ``"bf16"`` or ``"fp16"``.
        group_size: columns of one int4 scale; 0 for other formats.
    """

    num_tokens: int
    outputs: int
    inputs: int
    quant: str
    dtype: str
    group_size: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearConfig:
    """Tiles and launch options.

    Attributes:
        block_m, block_n, block_k: rows, outputs and columns of a tile; ``block_m`` counts on tensor cores only.
        group_m: blocks of rows that walk the outputs side by side.
        num_warps, num_stages: of a program.
        split_k: parts of the sum over K, added in fixed order by a second kernel.
        lanes: multiply on plain lanes, one row a program; else on tensor cores.
        swap_ab: weights are the left operand, of which Hopper's tensor cores take at least 64 rows.
        use_tma: read weights through a tensor map.
        inside: quantise activations in the product, which saves a launch: on tensor cores fp8_block alone.
        prefetch: bytes of every row of weights that a program asks the L2 cache for before all else; 0 for none.
        pdl: start each kernel but the first while the one before it ends.
    """

    block_m: int
    block_n: int
    block_k: int
    group_m: int = 8
    num_warps: int = 4
    num_stages: int = 3
    split_k: int = 1
    lanes: bool = False
    swap_ab: bool = False
    use_tma: bool = False
    inside: bool = False
    prefetch: int = 0
    pdl: bool = False

    def flat(self) -> list[int]:
        """The form in which it passes through an op schema."""
        return [int(value) for value in astuple(self)]


_NAMES = tuple(field.name for field in fields(LinearConfig))
_BOOLEANS = ("lanes", "swap_ab", "use_tma", "inside", "pdl")


def unflatten(flat: list[int]) -> LinearConfig:
    """The inverse of ``LinearConfig.flat``."""
    named: dict[str, Any] = dict(zip(_NAMES, flat, strict=True))
    return LinearConfig(**{name: bool(value) if name in _BOOLEANS else value for name, value in named.items()})


def check_legal(config: LinearConfig, problem: LinearProblem) -> None:
    """Refuse a configuration that the kernels, the format or the sizes do not allow; ValueError names the field."""
    form = FORMATS[Quant(problem.quant)]
    lanes = config.lanes
    for name, low, high in (
        ("block_m", 1 if lanes else 16, 256),
        ("block_n", 1 if lanes else 16, 256),
        ("block_k", 32 if form.quantized else 16, 4096 if lanes else 512),
        ("num_warps", 1, 16),
    ):
        value = getattr(config, name)
        if not low <= value <= high or value & (value - 1):
            raise ValueError(f"{name} must be a power of two from {low} to {high}; got {value}.")
    if not 1 <= config.split_k <= (1 if lanes else MAX_SPLIT_K):
        raise ValueError(f"split_k must be from 1 to {MAX_SPLIT_K}, and 1 where lanes is True; got {config.split_k}.")
    for name, high in (("group_m", 1024), ("num_stages", 16)):
        if not 1 <= getattr(config, name) <= high:
            raise ValueError(f"{name} must be from 1 to {high}; got {getattr(config, name)}.")
    if config.prefetch and (not 128 <= config.prefetch <= 65536 or config.prefetch & (config.prefetch - 1)):
        raise ValueError(f"prefetch must be 0 or a power of two from 128 to 65536; got {config.prefetch}.")
    if lanes and (config.swap_ab or config.use_tma):
        raise ValueError("swap_ab and use_tma must be False where lanes is True.")
    _check_inside(config, problem, form.activation, form.granularity)
    if problem.quant == Quant.FP8_BLOCK.value:
        _check_blocks(config)
    row_bytes = _row_bytes(problem, form.bits)
    if config.use_tma and row_bytes % 16:
        raise ValueError(f"use_tma needs rows of weights that are multiples of 16 bytes; these have {row_bytes}.")


def _check_inside(config: LinearConfig, problem: LinearProblem, activation: str, granularity: str) -> None:
    if not config.inside:
        return
    if not activation:
        raise ValueError(f"inside must be False for {problem.quant}, which does not quantise activations.")
    if not config.lanes and granularity != "block":
        raise ValueError(f"inside must be False for {problem.quant} where lanes is False.")
    if granularity == "tensor" and problem.num_tokens > INSIDE_ROWS:
        raise ValueError(f"inside must be False for fp8_tensor with more than {INSIDE_ROWS} rows.")


def _check_blocks(config: LinearConfig) -> None:
    if config.lanes and (config.block_n > BLOCK or config.block_k % BLOCK):
        raise ValueError("For fp8_block on lanes block_n must be at most 128 and block_k a multiple of 128.")
    if not config.lanes and (config.block_k not in (64, BLOCK) or (config.inside and config.block_k != BLOCK)):
        raise ValueError("For fp8_block block_k must be 128, or 64 where inside is False.")


def _row_bytes(problem: LinearProblem, bits: int) -> int:
    if bits == 4:
        return -(-problem.inputs // 32) * 16
    return problem.inputs * bits // 8
