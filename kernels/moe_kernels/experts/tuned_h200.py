"""Tile configurations measured on an NVIDIA H200: (E, D, F, K, dtype) -> token count -> configuration.

Each was the fastest of some 50 a GEMM and of the best pairs as a whole layer, in a CUDA graph with a cold L2.
"""

from __future__ import annotations

from typing import Any


def _gemm(
    layout: str, m: int, n: int, k: int, group: int, warps: int, stages: int, tma: bool = False
) -> dict[str, Any]:
    return {
        "LAYOUT": layout,
        "BLOCK_SIZE_M": m,
        "BLOCK_SIZE_N": n,
        "BLOCK_SIZE_K": k,
        "GROUP_SIZE_M": group,
        "num_warps": warps,
        "num_stages": stages,
        "USE_TMA": tma,
    }


def _pair(up: dict[str, Any], down: dict[str, Any], pdl: bool = False) -> dict[str, Any]:
    return {"up": up, "down": down, "PDL": pdl}


# fmt: off
TUNED: dict[tuple[int, int, int, int, str], dict[int, dict[str, Any]]] = {
    (8, 4096, 14336, 2, "bf16"): {  # mixtral-8x7b
        1: _pair(_gemm("token", 1, 2, 1024, 1, 2, 4),
            _gemm("token", 1, 8, 512, 1, 4, 3)),
        8: _pair(_gemm("inline", 16, 32, 256, 1, 4, 5),
            _gemm("inline", 16, 128, 128, 1, 4, 4), pdl=True),
        32: _pair(_gemm("inline", 16, 64, 128, 1, 4, 6),
            _gemm("inline", 16, 128, 128, 1, 4, 4), pdl=True),
        128: _pair(_gemm("sorted", 64, 64, 128, 16, 4, 4),
            _gemm("sorted", 64, 128, 128, 16, 4, 4), pdl=True),
        1024: _pair(_gemm("sorted", 128, 128, 64, 32, 8, 4, tma=True),
            _gemm("sorted", 128, 256, 64, 32, 8, 4, tma=True), pdl=True),
        4096: _pair(_gemm("sorted", 128, 128, 64, 8, 8, 4, tma=True),
            _gemm("sorted", 128, 256, 64, 32, 8, 4, tma=True), pdl=True),
    },
    (128, 2048, 768, 8, "bf16"): {  # qwen3-30b-a3b
        1: _pair(_gemm("token", 1, 8, 256, 1, 4, 1),
            _gemm("token", 1, 8, 512, 1, 2, 4)),
        8: _pair(_gemm("inline", 16, 32, 128, 1, 4, 4),
            _gemm("inline", 16, 128, 128, 1, 4, 3)),
        32: _pair(_gemm("sorted", 16, 32, 256, 16, 4, 3),
            _gemm("sorted", 16, 128, 128, 16, 4, 4)),
        128: _pair(_gemm("sorted", 16, 32, 256, 16, 4, 3),
            _gemm("sorted", 16, 128, 128, 16, 4, 3)),
        1024: _pair(_gemm("sorted", 128, 128, 64, 8, 8, 4, tma=True),
            _gemm("sorted", 128, 256, 64, 8, 8, 4), pdl=True),
        4096: _pair(_gemm("sorted", 128, 128, 64, 8, 8, 4, tma=True),
            _gemm("sorted", 128, 256, 64, 32, 8, 4, tma=True), pdl=True),
    },
    (64, 2048, 1408, 6, "bf16"): {  # deepseek-v2-lite
        1: _pair(_gemm("token", 1, 2, 512, 1, 2, 1),
            _gemm("token", 1, 8, 512, 1, 4, 4)),
        8: _pair(_gemm("inline", 16, 64, 128, 1, 4, 4),
            _gemm("inline", 16, 128, 128, 1, 4, 3), pdl=True),
        32: _pair(_gemm("sorted", 16, 32, 256, 16, 4, 3),
            _gemm("sorted", 16, 128, 128, 16, 4, 4)),
        128: _pair(_gemm("sorted", 32, 64, 128, 16, 4, 3),
            _gemm("sorted", 32, 128, 128, 16, 4, 3)),
        1024: _pair(_gemm("sorted", 128, 128, 64, 8, 8, 4, tma=True),
            _gemm("sorted", 128, 128, 64, 8, 8, 3, tma=True), pdl=True),
        4096: _pair(_gemm("sorted", 128, 128, 64, 8, 8, 4, tma=True),
            _gemm("sorted", 128, 256, 64, 32, 8, 4, tma=True), pdl=True),
    },
    (64, 3584, 2560, 8, "bf16"): {  # qwen2-57b-a14b
        1: _pair(_gemm("token", 1, 2, 512, 1, 2, 1),
            _gemm("token", 1, 8, 512, 1, 2, 3)),
        8: _pair(_gemm("inline", 16, 32, 128, 16, 4, 4),
            _gemm("inline", 16, 64, 128, 16, 4, 4)),
        32: _pair(_gemm("sorted", 16, 32, 256, 16, 4, 3),
            _gemm("sorted", 16, 128, 128, 16, 4, 4)),
        128: _pair(_gemm("sorted", 32, 64, 128, 16, 4, 3),
            _gemm("sorted", 32, 128, 128, 16, 4, 3)),
        1024: _pair(_gemm("sorted", 128, 128, 64, 32, 8, 4, tma=True),
            _gemm("sorted", 128, 256, 64, 8, 8, 4), pdl=True),
        4096: _pair(_gemm("sorted", 128, 128, 64, 8, 8, 4, tma=True),
            _gemm("sorted", 128, 256, 64, 32, 8, 4, tma=True), pdl=True),
    },
    (256, 7168, 2048, 8, "bf16"): {  # deepseek-v3
        1: _pair(_gemm("token", 1, 2, 512, 1, 2, 1),
            _gemm("token", 1, 16, 256, 1, 2, 4)),
        8: _pair(_gemm("inline", 16, 32, 128, 16, 4, 4),
            _gemm("inline", 16, 64, 128, 16, 4, 4)),
        32: _pair(_gemm("sorted", 16, 64, 256, 16, 4, 3),
            _gemm("sorted", 16, 128, 128, 16, 4, 4), pdl=True),
        128: _pair(_gemm("sorted", 16, 64, 128, 1, 4, 4),
            _gemm("sorted", 16, 128, 128, 1, 4, 4), pdl=True),
        1024: _pair(_gemm("sorted", 64, 64, 128, 1, 4, 4),
            _gemm("sorted", 64, 128, 64, 8, 4, 3, tma=True), pdl=True),
        4096: _pair(_gemm("sorted", 128, 128, 64, 8, 8, 3, tma=True),
            _gemm("sorted", 128, 256, 64, 8, 8, 4), pdl=True),
    },
}
