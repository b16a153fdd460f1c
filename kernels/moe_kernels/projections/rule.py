"""The tiles that a product gets.

Shapes: T tokens, N outputs, K inputs.

A few rows are bound by the bytes of weights: what counts is that every multiprocessor has enough of them on their way.
One row goes over plain lanes, some eight programs a multiprocessor; 2 to 64 rows go over tensor cores, the sum over K
split until every multiprocessor has two programs or more. Above that tiles grow, and are split only where they are too
few.
"""

from __future__ import annotations

from dataclasses import replace

from moe_kernels.formats import BLOCK, FORMATS, Format
from moe_kernels.names import Quant
from moe_kernels.projections.tiles import LinearConfig, LinearProblem

# Multiprocessors that the rule counts on: those of an H200.
_PROCESSORS = 132
_DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


def rule(problem: LinearProblem, *, hopper: bool = True) -> LinearConfig:
    """Tiles for a problem, whatever the shared memory; ``hopper``: tensor maps and early starts can be used."""
    form = FORMATS[Quant(problem.quant)]
    if problem.num_tokens == 1 and not form.packed:
        config = _lanes(problem, form)
    elif problem.dtype == "fp32":
        # Exact products in float32 run on plain lanes, too: small tiles keep them in registers.
        tall = 16 if problem.num_tokens <= 32 else 64
        config = LinearConfig(block_m=tall, block_n=32, block_k=64 if form.quantized else 32, num_stages=2)
        config = _split(config, problem, 2)
    elif form.packed:
        config = _packed(problem)
    elif form.activation:
        config = _eight_bit(problem)
    else:
        config = _wide(problem)
    launches = (1 if form.activation and not config.inside else 0) + (1 if config.split_k > 1 else 0)
    if not hopper or launches == 0:
        return replace(config, pdl=False, use_tma=config.use_tma and hopper)
    # While activations are rounded, weights are on their way already.
    ahead = 512 if form.activation and not config.inside and problem.num_tokens <= 64 else 0
    return replace(config, pdl=True, prefetch=ahead)


def _lanes(problem: LinearProblem, form: Format) -> LinearConfig:
    programs = 8 * _PROCESSORS
    columns = 128 * 16 * 8 // form.bits  # 16 bytes a thread and row of weights
    block_k = min(columns, max(BLOCK, _power_above(problem.inputs)))
    block_n = max(1, min(4 if form.bits == 8 else 8, _power_below(problem.outputs // programs)))
    inside = bool(form.activation)
    # While the largest activation is looked for, weights are on their way already.
    ahead = 2048 if form.granularity in ("tensor", "token") else 0
    return LinearConfig(
        block_m=1, block_n=block_n, block_k=block_k, num_stages=3, lanes=True, inside=inside, prefetch=ahead
    )


def _wide(problem: LinearProblem) -> LinearConfig:
    """Weights that are multiplied as 16 bits: stored so, or int8_weight."""
    tokens, maps = problem.num_tokens, _maps(problem)
    if tokens <= 16:
        return _split(LinearConfig(block_m=16, block_n=32, block_k=256, num_stages=4), problem, 2)
    if tokens <= 32:
        return _split(LinearConfig(block_m=32, block_n=64, block_k=128, num_stages=4), problem, 2)
    if tokens <= 64:
        return _split(LinearConfig(block_m=64, block_n=64, block_k=128, num_stages=4), problem, 2)
    if tokens <= 256:
        return _split(LinearConfig(block_m=64, block_n=128, block_k=64, num_stages=4, use_tma=maps), problem, 1)
    config = LinearConfig(block_m=128, block_n=256, block_k=64, num_warps=8, num_stages=4, use_tma=maps)
    if _tiles(config, problem) < _PROCESSORS:
        config = replace(config, block_n=128)
    return config


def _eight_bit(problem: LinearProblem) -> LinearConfig:
    tokens, maps = problem.num_tokens, _maps(problem)
    blocked = problem.quant == Quant.FP8_BLOCK.value
    if tokens <= 64:
        tall = 16 if tokens <= 16 else 32 if tokens <= 32 else 64
        config = LinearConfig(block_m=tall, block_n=64, block_k=BLOCK, num_stages=6 if tall < 64 else 4, swap_ab=True)
        return _split(replace(config, inside=blocked and tokens <= 16), problem, 2)
    if blocked:
        # Many small tiles: while one waits to scale what it has, another multiplies.
        return LinearConfig(block_m=64, block_n=64 if tokens <= 512 else 128, block_k=BLOCK, use_tma=maps)
    if tokens <= 256:
        return _split(LinearConfig(block_m=64, block_n=128, block_k=BLOCK, num_stages=4, use_tma=maps), problem, 1)
    return LinearConfig(block_m=128, block_n=128, block_k=BLOCK, num_warps=8, num_stages=4, use_tma=maps)


def _packed(problem: LinearProblem) -> LinearConfig:
    tokens = problem.num_tokens
    if tokens <= 16:
        config = LinearConfig(block_m=16, block_n=32, block_k=256, num_warps=2, num_stages=3, swap_ab=True)
        return _split(config, problem, 4)
    if tokens <= 32:
        return _split(LinearConfig(block_m=32, block_n=64, block_k=128, num_stages=4), problem, 3)
    if tokens <= 64:
        return _split(LinearConfig(block_m=64, block_n=64, block_k=128, num_stages=4), problem, 2)
    if tokens <= 256:
        return _split(LinearConfig(block_m=64, block_n=64, block_k=128), problem, 2)
    return LinearConfig(block_m=128, block_n=128, block_k=64, num_warps=8)


def _split(config: LinearConfig, problem: LinearProblem, a_processor: int) -> LinearConfig:
    """Split the sum until there are some ``a_processor`` programs a multiprocessor; a part keeps two steps or more."""
    wanted = a_processor * _PROCESSORS / _tiles(config, problem)
    steps = -(-problem.inputs // config.block_k)
    parts = 1
    while parts * 1.4 < wanted and parts < 16 and steps >= 4 * parts:
        parts *= 2
    return replace(config, split_k=parts)


def _tiles(config: LinearConfig, problem: LinearProblem) -> int:
    return -(-max(1, problem.num_tokens) // config.block_m) * -(-problem.outputs // config.block_n)


def _maps(problem: LinearProblem) -> bool:
    """Whether rows of weights are multiples of the 16 bytes that a tensor map needs."""
    return problem.inputs * FORMATS[Quant(problem.quant)].bits % 128 == 0


def _power_below(value: int) -> int:
    return 1 << max(0, value.bit_length() - 1)


def _power_above(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()


def fit(config: LinearConfig, problem: LinearProblem, shared_bytes: int) -> LinearConfig:
    """Take away stages, then outputs, until the tiles in flight fit the shared memory."""
    form = FORMATS[Quant(problem.quant)]
    wide = _DTYPE_BYTES[problem.dtype]
    x_bytes = 1 if form.activation and not config.inside else wide
    # Unpacked weights, and activations rounded inside, pass through shared memory once more.
    w_extra, x_extra = (wide if form.weight_only else 0), (1 if config.inside else 0)

    def needed() -> float:
        rows = 0 if config.lanes else config.block_m
        staged = config.num_stages * (rows * x_bytes + config.block_n * form.bits / 8)
        return (staged + config.block_n * w_extra + rows * x_extra) * config.block_k + 4096

    while needed() > shared_bytes:
        if config.num_stages > 2:
            config = replace(config, num_stages=config.num_stages - 1)
        elif config.block_n > (1 if config.lanes else 16):
            config = replace(config, block_n=config.block_n // 2)
        else:
            break
    return config
