"""Tiles of the kernels on FP4 units: which are legal, and the ones that a problem gets."""

from __future__ import annotations

import functools
from dataclasses import replace

from moe_kernels.experts.tiles import INLINE_MAX_ROWS, ExpertsConfig, GemmConfig, Layout
from moe_kernels.tuning.names import Problem

# What the left operand of a product needs on compute capability 10 to run on FP4 units: with less Triton turns to bf16.
LEFT_ROWS, LEAST_K, WARPS = 128, 64, (4, 8)
MOST_COLUMNS = 256
SOURCE = "Default rule for FP4 units; nothing is tuned for them."


@functools.lru_cache(maxsize=1024)
def fp4_config(problem: Problem, shared_bytes: int) -> ExpertsConfig:
    """Tiles by the rows an expert gets: weights on the left while rows do not fill 128, in what shared memory holds."""
    rows = problem.num_tokens * problem.top_k
    per_expert = rows / problem.num_experts
    layout = Layout.INLINE if rows <= 128 else Layout.SORTED
    if per_expert <= 64:
        block_m = 16 if per_expert <= 16 else 32 if per_expert <= 32 else 64
        gemm = _gemm(layout, block_m, group_m=16, num_warps=4, swap_ab=True)
    else:
        gemm = _gemm(Layout.SORTED, LEFT_ROWS, group_m=8, num_warps=8, swap_ab=False)
    return ExpertsConfig(up=_fitted(gemm, 2, shared_bytes), down=_fitted(gemm, 1, shared_bytes), pdl=False)


def _gemm(layout: Layout, block_m: int, *, group_m: int, num_warps: int, swap_ab: bool) -> GemmConfig:
    return GemmConfig(
        block_m=block_m,
        block_n=LEFT_ROWS,
        block_k=256,
        group_m=group_m,
        num_warps=num_warps,
        num_stages=3,
        layout=layout,
        use_tma=False,
        swap_ab=swap_ab,
        split_k=1,
    )


def _fitted(gemm: GemmConfig, tiles_of_w: int, shared_bytes: int) -> GemmConfig:
    while True:
        a_row = gemm.block_k // 2 + gemm.block_k // 16
        staged = gemm.num_stages * (gemm.block_m + tiles_of_w * gemm.block_n) * a_row
        # Sums pass through shared memory on their way out.
        if staged + gemm.block_m * gemm.block_n * 4 <= shared_bytes or gemm.block_k == LEAST_K:
            return gemm
        fewer = gemm.num_stages > 2
        gemm = replace(gemm, num_stages=gemm.num_stages - 1) if fewer else replace(gemm, block_k=gemm.block_k // 2)


def check_fp4(config: ExpertsConfig, num_rows: int) -> None:
    """Refuse what these kernels do not know and what would leave the FP4 units; ValueError names the key."""
    for name, gemm in (("up", config.up), ("down", config.down)):
        if gemm.layout is Layout.TOKEN:
            raise ValueError(f"LAYOUT of {name} must be sorted or inline for triton_fp4; got token.")
        if gemm.layout is Layout.INLINE and num_rows > INLINE_MAX_ROWS:
            raise ValueError(
                f"LAYOUT inline of {name} takes up to {INLINE_MAX_ROWS} routed rows, not {num_rows}; use sorted."
            )
        if gemm.split_k != 1:
            raise ValueError(f"SPLIT_K of {name} must be 1 for triton_fp4; got {gemm.split_k}.")
        if gemm.use_tma:
            raise ValueError(f"USE_TMA of {name} must be False for triton_fp4.")
        if gemm.block_k < LEAST_K:
            raise ValueError(f"BLOCK_SIZE_K of {name} must be at least {LEAST_K} for triton_fp4; got {gemm.block_k}.")
        if gemm.num_warps not in WARPS:
            raise ValueError(f"num_warps of {name} must be 4 or 8 for triton_fp4; got {gemm.num_warps}.")
        # One product takes gate's columns and up's.
        sides = 2 if name == "up" else 1
        if gemm.block_n * sides > MOST_COLUMNS:
            raise ValueError(
                f"BLOCK_SIZE_N of {name} must be at most {MOST_COLUMNS // sides} for triton_fp4; got {gemm.block_n}."
            )
        if gemm.swap_ab and gemm.block_n * sides < LEFT_ROWS:
            raise ValueError(
                f"BLOCK_SIZE_N of {name} must be at least {LEFT_ROWS // sides} for triton_fp4 where SWAP_AB is set; "
                f"got {gemm.block_n}."
            )
        if not gemm.swap_ab and gemm.block_m < LEFT_ROWS:
            raise ValueError(
                f"BLOCK_SIZE_M of {name} must be at least {LEFT_ROWS} for triton_fp4 without SWAP_AB; "
                f"got {gemm.block_m}."
            )
