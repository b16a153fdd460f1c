"""Launcher of the Triton kernels: from tensors and a configuration to buffers, grids and launches.

Shapes: T tokens, N outputs, K inputs, S parts of a split sum.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from moe_kernels.experts.rules import TRITON_INTERPRETED
from moe_kernels.formats import BLOCK, FORMATS
from moe_kernels.projections.tiles import LinearConfig, LinearProblem, check_legal
from moe_kernels.projections.triton_gemm import linear_kernel
from moe_kernels.projections.triton_gemm4 import linear4_kernel
from moe_kernels.projections.triton_gemv import linear4_row_kernel, linear_row_kernel
from moe_kernels.projections.triton_rows import round_rows_kernel, sum_parts_kernel
from moe_kernels.quant.triton import block_kernel, launch_quantize
from moe_kernels.types import Quant

_INT32_MAX = 2**31 - 1
_legal = functools.lru_cache(maxsize=4096)(check_legal)
_FORM = {Quant.INT4: 0, Quant.NVFP4: 1, Quant.MXFP4: 2}
_X_SCALES = {"": 0, "tensor": 1, "token": 2, "block": 3}
_W_SCALES = {Quant.FP8_TENSOR: 1, Quant.FP8_CHANNEL: 2, Quant.INT8: 2, Quant.INT8_WEIGHT: 2, Quant.FP8_BLOCK: 3}
_STORED = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}


class Matrix(NamedTuple):
    """What ``LinearWeights`` stores."""

    w: torch.Tensor
    scale: torch.Tensor | None
    zero: torch.Tensor | None
    whole: torch.Tensor | None


def launch_linear(
    x_TK: torch.Tensor, matrix: Matrix, bias_N: torch.Tensor | None, problem: LinearProblem, config: LinearConfig
) -> torch.Tensor:
    """Return ``[T, N]`` in the dtype of ``x_TK``; nothing here waits for the device."""
    _legal(config, problem)
    out_TN = x_TK.new_empty(problem.num_tokens, problem.outputs)
    if problem.num_tokens == 0:
        return out_TN
    if x_TK.stride(1) != 1:
        x_TK = x_TK.contiguous()
    form = FORMATS[Quant(problem.quant)]
    # The first launch never starts early: what comes before it may be no kernel at all.
    early = False
    x, x_scale = x_TK, None
    if form.activation and not config.inside:
        x, x_scale = _quantize(x_TK, form.granularity, form.activation, config.pdl)
        early = config.pdl
    if config.lanes:
        _launch_rows(x, x_scale, matrix, bias_N, out_TN, problem, config, early)
        return out_TN
    if config.split_k == 1:
        _launch_tiles(x, x_scale, matrix, bias_N, out_TN, problem, config, early)
        return out_TN
    parts_STN = x_TK.new_empty(config.split_k, *out_TN.shape, dtype=torch.float32)
    _launch_tiles(x, x_scale, matrix, bias_N, parts_STN, problem, config, early)
    size = out_TN.numel()
    block = 512 if size <= 2**18 else 2048
    sum_parts_kernel[(_cdiv(size, block),)](
        parts_STN, out_TN, size, PARTS=config.split_k, BLOCK=block, WIDE=parts_STN.numel() > _INT32_MAX,
        PDL=config.pdl, num_warps=4, **_early(config.pdl),
    )  # fmt: skip
    return out_TN


def _quantize(x_TK: torch.Tensor, granularity: str, kind: str, pdl: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``quantize_activation``, every row in use; with ``pdl`` the next kernel may start early."""
    (rows, columns), stride = x_TK.shape, x_TK.stride(0)
    common: dict[str, Any] = {"C": columns, "WIDE": rows * max(stride, columns) > _INT32_MAX, "PDL": pdl}
    if granularity == "tensor":
        every_row = torch.zeros(rows, 1, dtype=torch.int32, device=x_TK.device)
        return launch_quantize(x_TK, granularity, kind, every_row, 1, False)
    q = torch.empty(rows, columns, dtype=_STORED[kind], device=x_TK.device)
    if granularity == "block":
        scale = torch.empty(rows, _cdiv(columns, BLOCK), dtype=torch.float32, device=x_TK.device)
        groups = min(16, _power_of_2(scale.shape[1])) if rows > 64 else 1
        block_kernel[(rows * _cdiv(scale.shape[1], groups),)](
            x_TK, q, scale, rows, stride, GROUPS=groups, num_warps=max(1, groups // 4), **common
        )
        return q, scale
    scale = torch.empty(rows, dtype=torch.float32, device=x_TK.device)
    width = _power_of_2(columns)
    round_rows_kernel[(rows,)](
        x_TK, q, scale, stride, C_P2=width, FP8=kind == "fp8", num_warps=min(16, max(1, width // 512)), **common
    )
    return q, scale


def _launch_rows(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    matrix: Matrix,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    problem: LinearProblem,
    config: LinearConfig,
    early: bool,
) -> None:
    scheme = Quant(problem.quant)
    form = FORMATS[scheme]
    grid = (problem.num_tokens * _cdiv(problem.outputs, config.block_n),)
    options = {
        "K": problem.inputs,
        "HAS_BIAS": bias is not None,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "STAGES": config.num_stages,
        "num_warps": config.num_warps,
        **_common(matrix, config, early),
    }
    sizes = (problem.num_tokens, problem.outputs, x.stride(0))
    if form.packed:
        linear4_row_kernel[grid](
            x, *_packed(matrix), _or(bias, x), out, *sizes, **_form(scheme, matrix, problem), **options
        )
        return
    linear_row_kernel[grid](
        x, _or(x_scale, x), matrix.w, _or(matrix.scale, matrix.w), _or(bias, x), out, *sizes,
        X_SCALES=_X_SCALES[form.granularity], W_SCALES=_W_SCALES.get(scheme, 0), INSIDE=config.inside,
        FP8=form.activation == "fp8", CHUNK=min(4096, _power_of_2(problem.inputs)), **options,
    )  # fmt: skip


def _launch_tiles(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    matrix: Matrix,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    problem: LinearProblem,
    config: LinearConfig,
    early: bool,
) -> None:
    scheme = Quant(problem.quant)
    form = FORMATS[scheme]
    tokens, outputs = problem.num_tokens, problem.outputs
    grid = (_cdiv(tokens, config.block_m) * _cdiv(outputs, config.block_n), config.split_k)
    options = {
        "K": problem.inputs,
        "HAS_BIAS": bias is not None,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "GROUP_M": config.group_m,
        "SPLIT_K": config.split_k,
        "SWAP": config.swap_ab,
        "USE_TMA": config.use_tma,
        # Rows of the last block count, too: their addresses are made, though not read.
        "WIDE_ROWS": (tokens + config.block_m) * max(x.stride(0), outputs) > _INT32_MAX,
        "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        **_common(matrix, config, early),
    }
    sizes = (tokens, outputs, x.stride(0))
    if form.packed:
        w, *scales = _packed(matrix)
        linear4_kernel[grid](
            x, w, _descriptor(w, config, config.block_k // 2), *scales, _or(bias, x), out, *sizes,
            ASM=x.dtype == torch.bfloat16 and not TRITON_INTERPRETED, **_form(scheme, matrix, problem), **options,
        )  # fmt: skip
        return
    linear_kernel[grid](
        x, _or(x_scale, x), matrix.w, _descriptor(matrix.w, config, config.block_k), _or(matrix.scale, matrix.w),
        _or(bias, x), out, *sizes, X_SCALES=4 if config.inside else _X_SCALES[form.granularity],
        W_SCALES=_W_SCALES.get(scheme, 0),
        # Tensor cores add up e4m3 products with some 14 bits only: a tile's sum moves on to float32.
        IMPRECISE=config.block_k if form.activation == "fp8" else 0, **options,
    )  # fmt: skip


def _cdiv(length: int, block: int) -> int:
    # Triton's own take microseconds of every launch.
    return -(-length // block)


def _power_of_2(length: int) -> int:
    return 1 << max(0, length - 1).bit_length()


def _common(matrix: Matrix, config: LinearConfig, early: bool) -> dict[str, Any]:
    wide = matrix.w.numel() > _INT32_MAX
    return {"WIDE_W": wide, "PREFETCH": config.prefetch, "PDL": config.pdl, **_early(early)}


def _early(early: bool) -> dict[str, bool]:
    """The launch option that lets a kernel start while the one before it ends."""
    return {"launch_pdl": True} if early else {}


def _or(tensor: torch.Tensor | None, stand_in: torch.Tensor) -> torch.Tensor:
    """A kernel takes a tensor everywhere, also where it will not read one."""
    return stand_in if tensor is None else tensor


def _packed(matrix: Matrix) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    assert matrix.scale is not None
    return matrix.w, matrix.scale, _or(matrix.zero, matrix.w), _or(matrix.whole, matrix.w)


def _form(scheme: Quant, matrix: Matrix, problem: LinearProblem) -> dict[str, Any]:
    group = problem.group_size if scheme is Quant.INT4 else FORMATS[scheme].scale_columns
    return {"FORM": _FORM[scheme], "GROUP": group, "HAS_ZERO": matrix.zero is not None}


def _descriptor(weight: torch.Tensor, config: LinearConfig, columns: int) -> Any:
    """Tensor map of the weights, or the tensor itself as a stand-in."""
    if not config.use_tma:
        return weight
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(weight, [config.block_n, columns])
