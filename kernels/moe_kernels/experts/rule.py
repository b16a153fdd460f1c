"""The tiles that a problem gets where nothing was measured for it."""

from __future__ import annotations

from dataclasses import replace

from moe_kernels.experts.tiles import ExpertsConfig, GemmConfig, Layout
from moe_kernels.formats import BLOCK, FORMATS
from moe_kernels.tuning.names import Problem
from moe_kernels.types import Quant

_DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


def rule(problem: Problem) -> ExpertsConfig:
    """Tiles by the rows an expert gets, and by what its weights are stored in."""
    scheme = Quant(problem.quant)
    form = FORMATS[scheme]
    rows, hidden, ffn = problem.num_tokens * problem.top_k, problem.hidden_size, problem.intermediate_size
    per_expert = rows / problem.num_experts
    if problem.dtype == "fp32":
        layout = Layout.INLINE if rows <= 128 else Layout.SORTED
        tile_k = 64 if scheme is Quant.FP8_BLOCK else 32
        gemm = _gemm(layout, 16 if per_expert <= 32 else 64, 32, tile_k, 8, 4, 2)
        return ExpertsConfig(up=gemm, down=gemm, pdl=False)
    if form.packed:
        up, down = _packed(rows, per_expert)
    elif form.activation:
        # A tensor map needs rows that are multiples of 16 bytes.
        up, down = _eight_bit(rows, per_expert, hidden % 16 == 0 and ffn % 16 == 0)
    elif problem.num_tokens == 1:
        up = _gemm(Layout.TOKEN, 1, _columns(problem.top_k * ffn), 256, 1, 4, 3)
        down = _gemm(Layout.TOKEN, 1, _columns(hidden), 256, 1, 4, 4)
    else:
        up, down = _wide(rows, per_expert)
    return ExpertsConfig(up=up, down=down, pdl=False)


def few_rows(problem: Problem) -> tuple[GemmConfig, GemmConfig]:
    """Tiles on tensor cores for a few routed rows: what stands in where a row of plain lanes cannot be used."""
    form = FORMATS[Quant(problem.quant)]
    rows = problem.num_tokens * problem.top_k
    if problem.dtype == "fp32":
        gemm = _gemm(Layout.INLINE if rows <= 128 else Layout.SORTED, 16, 32, 64, 8, 4, 2)
        return gemm, gemm
    per_expert = min(16.0, rows / problem.num_experts)
    if form.packed:
        return _packed(rows, per_expert)
    return _eight_bit(rows, per_expert, False) if form.activation else _wide(rows, per_expert)


def _wide(rows: int, per_expert: float) -> tuple[GemmConfig, GemmConfig]:
    if per_expert <= 16:
        layout = Layout.INLINE if rows <= 256 else Layout.SORTED
        return _gemm(layout, 16, 32, 128, 16, 4, 4), _gemm(layout, 16, 64, 128, 16, 4, 4)
    if per_expert <= 48:
        return _gemm(Layout.SORTED, 32, 64, 128, 16, 4, 3), _gemm(Layout.SORTED, 32, 128, 128, 16, 4, 3)
    if per_expert <= 128:
        return _gemm(Layout.SORTED, 64, 64, 64, 16, 4, 4), _gemm(Layout.SORTED, 64, 128, 64, 16, 4, 4)
    return _gemm(Layout.SORTED, 128, 128, 64, 16, 8, 3), _gemm(Layout.SORTED, 128, 256, 64, 16, 8, 3)


def _eight_bit(rows: int, per_expert: float, tensor_maps: bool) -> tuple[GemmConfig, GemmConfig]:
    if per_expert <= 16:
        layout = Layout.INLINE if rows <= 256 else Layout.SORTED
        return _gemm(layout, 16, 64, BLOCK, 16, 4, 4, swap=True), _gemm(layout, 16, 128, BLOCK, 16, 4, 4, swap=True)
    if per_expert <= 48:
        small = _gemm(Layout.SORTED, 32, 64, BLOCK, 16, 4, 4, swap=True)
        return small, small
    # Many small tiles: while one waits to scale what it has, another multiplies.
    up = _gemm(Layout.SORTED, 64, 64, BLOCK, 32, 4, 3)
    down = _gemm(Layout.SORTED, 64, 64 if per_expert <= 128 else 128, BLOCK, 8, 4, 3)
    return replace(up, use_tma=tensor_maps), replace(down, use_tma=tensor_maps)


def _packed(rows: int, per_expert: float) -> tuple[GemmConfig, GemmConfig]:
    if rows <= 16:
        return _gemm(Layout.INLINE, 16, 32, 256, 1, 2, 3, swap=True), _gemm(
            Layout.INLINE, 16, 32, 128, 1, 2, 4, swap=True
        )
    if per_expert <= 16:
        layout = Layout.INLINE if rows <= 256 else Layout.SORTED
        return _gemm(layout, 16, 64, 128, 16, 4, 4), _gemm(layout, 16, 128, 128, 16, 4, 4)
    if per_expert <= 64:
        up = _gemm(Layout.SORTED, 32, 64, 128, 16, 4, 3, swap=True)
        return up, _gemm(Layout.SORTED, 32, 128, 128, 16, 4, 3, swap=True)
    if per_expert <= 128:
        return _gemm(Layout.SORTED, 64, 64, 128, 16, 4, 3), _gemm(Layout.SORTED, 64, 64, 128, 16, 4, 3)
    return _gemm(Layout.SORTED, 128, 64, 64, 16, 8, 3), _gemm(Layout.SORTED, 128, 128, 64, 16, 8, 3)


def fit(config: ExpertsConfig, problem: Problem, shared_bytes: int) -> ExpertsConfig:
    """Take away stages, then columns, until the tiles in flight fit the shared memory."""
    form = FORMATS[Quant(problem.quant)]
    wide = _DTYPE_BYTES[problem.dtype]
    row_bytes = 1 if form.activation else wide
    # Unpacked weights pass through shared memory as the compute dtype, once.
    column_bytes = form.bits / 8
    extra = wide if form.weight_only else 0

    def fits(gemm: GemmConfig, tiles_of_w: int) -> bool:
        columns = tiles_of_w * gemm.block_n
        staged = gemm.num_stages * (gemm.block_m * row_bytes + columns * column_bytes) * gemm.block_k
        return staged + columns * gemm.block_k * extra + 4096 <= shared_bytes

    def fitted(gemm: GemmConfig, tiles_of_w: int) -> GemmConfig:
        while gemm.layout is not Layout.TOKEN and not fits(gemm, tiles_of_w):
            if gemm.num_stages > 2:
                gemm = replace(gemm, num_stages=gemm.num_stages - 1)
            elif gemm.block_n > 16:
                gemm = replace(gemm, block_n=gemm.block_n // 2)
            else:
                break
        return gemm

    return replace(config, up=fitted(config.up, 2), down=fitted(config.down, 1))


def _columns(total: int) -> int:
    """Columns a program such that some 400 programs share ``total`` of them."""
    return max(4, min(16, 1 << max(0, (total // 400).bit_length() - 1)))


def _gemm(
    layout: Layout, m: int, n: int, k: int, group: int, warps: int, stages: int, *, swap: bool = False
) -> GemmConfig:
    return GemmConfig(
        block_m=m,
        block_n=n,
        block_k=k,
        group_m=group,
        num_warps=warps,
        num_stages=stages,
        layout=layout,
        use_tma=False,
        swap_ab=swap,
        split_k=1,
    )
