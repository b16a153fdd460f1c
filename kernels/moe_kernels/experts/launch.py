"""One GEMM each: from tensors and a configuration to a grid and a kernel's arguments.

Shapes: T tokens, D model, F ffn, E experts, K experts per token, N = T*K routed rows.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from moe_kernels.align.api import Alignment
from moe_kernels.align.reference import max_blocks
from moe_kernels.experts.layer import StoredLayer
from moe_kernels.experts.rules import TRITON_INTERPRETED
from moe_kernels.experts.tiles import ExpertsConfig, GemmConfig, Layout
from moe_kernels.experts.triton_gemm import down_kernel, up_kernel
from moe_kernels.experts.triton_gemm4 import down4_kernel, up4_kernel
from moe_kernels.experts.triton_gemv import down_token_kernel, up_row_kernel
from moe_kernels.experts.triton_gemv4 import down4_token_kernel, up4_row_kernel
from moe_kernels.types import Quant

_INT32_MAX = 2**31 - 1
_FORM = {Quant.INT4: 0, Quant.NVFP4: 1, Quant.MXFP4: 2}
_X_SCALES = {"": 0, "tensor": 1, "token": 2, "block": 3}
_W_SCALES = {Quant.FP8_TENSOR: 1, Quant.FP8_CHANNEL: 2, Quant.INT8: 2, Quant.INT8_WEIGHT: 2, Quant.FP8_BLOCK: 3}
_TL_DTYPE = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class Activations(NamedTuple):
    """Rows that a GEMM reads: values, and their scales where they are quantised."""

    values: torch.Tensor
    scale: torch.Tensor | None


class Out(IntEnum):
    """What a GEMM writes; ``triton_gemm`` says more."""

    PLAIN = 0
    BLOCKS = 1
    PARTS = 2
    ATOMIC = 3


def launch_up(
    x: Activations,
    layer: StoredLayer,
    out: torch.Tensor,
    out_scale: torch.Tensor | None,
    kind: Out,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    alignment: Alignment | None,
    config: ExpertsConfig,
    weight_on_input: bool,
    dtype: torch.dtype,
) -> None:
    """Write ``out``: h ``[N, F]`` (e4m3 with ``out_scale``), or sums ``[S, N, 2F]``; dropped rows stay unwritten."""
    up, ffn, num_rows = config.up, layer.intermediate_size, ids_TK.numel()
    hidden, stride = x.values.shape[1], x.values.stride(0)
    shape = {"E": layer.num_experts, "K": ids_TK.shape[1], "D": hidden, "F": ffn}
    options = {
        "ON_INPUT": weight_on_input,
        "WIDE_W": 2 * ffn * layer.w1.shape[2] > _INT32_MAX,
        "PDL": config.pdl,
        **pdl_option(config.pdl),
    }
    scales = _scales(layer, x)
    if up.layout is Layout.TOKEN:
        grid = (num_rows * triton.cdiv(ffn, up.block_n),)
        if layer.form.packed:
            up4_row_kernel[grid](
                x.values, *_packed(layer, up=True), out, weights_TK, ids_TK, num_rows, stride,
                **shape, **_form(layer), **_row_options(up), **options,
            )  # fmt: skip
        else:
            up_row_kernel[grid](
                x.values, _or(x.scale, ids_TK), layer.w1, _or(layer.w1_scale, layer.w1), out, weights_TK, ids_TK,
                num_rows, stride, **shape, **scales, **_row_options(up), **options,
            )  # fmt: skip
        return
    blocks, *rows = row_blocks(ids_TK, alignment, layer.num_experts, up)
    grid2 = (blocks * triton.cdiv(ffn, up.block_n), up.split_k)
    options["WIDE_ROWS"] = max(x.values.shape[0] * stride, (num_rows + 1) * ffn) > _INT32_MAX
    options |= _gemm_options(up, num_rows, dtype)
    if layer.form.packed:
        up4_kernel[grid2](
            x.values, layer.w1, _descriptor(layer.w1, up, up.block_k // 2), *_packed(layer, up=True)[1:], out,
            weights_TK, ids_TK, *rows, num_rows, stride, OUT=int(kind),
            ASM=_pairs(dtype), **shape, **_form(layer), **options,
        )  # fmt: skip
        return
    up_kernel[grid2](
        x.values, _or(x.scale, ids_TK), layer.w1, _descriptor(layer.w1, up, up.block_k), _or(layer.w1_scale, layer.w1),
        out, _or(out_scale, out), weights_TK, ids_TK, *rows, num_rows, stride, OUT=int(kind), ROUND=_TL_DTYPE[dtype],
        IMPRECISE=_imprecise(layer, up), **shape, **scales, **options,
    )  # fmt: skip


def launch_down(
    h: Activations,
    layer: StoredLayer,
    out: torch.Tensor,
    kind: Out,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    alignment: Alignment | None,
    config: ExpertsConfig,
    weight_on_input: bool,
) -> None:
    """Write ``out``: each routed row's weighted output ``[N, D]``, parts of it ``[S, N, D]``, or sums ``[T, D]``."""
    down, num_rows, ffn = config.down, ids_TK.numel(), h.values.shape[1]
    hidden = out.shape[-1]
    blocks, *rows = row_blocks(ids_TK, alignment, layer.num_experts, down)
    grid = (blocks * triton.cdiv(hidden, down.block_n), down.split_k)
    options = {
        "E": layer.num_experts,
        "K": ids_TK.shape[1],
        "D": hidden,
        "F": ffn,
        "OUT": int(kind),
        "ON_INPUT": weight_on_input,
        "WIDE_W": hidden * layer.w2.shape[2] > _INT32_MAX,
        "WIDE_ROWS": (num_rows + 1) * max(ffn, hidden) > _INT32_MAX,
        "PDL": config.pdl,
        **pdl_option(config.pdl),
        **_gemm_options(down, num_rows, h.values.dtype),
    }
    if layer.form.packed:
        down4_kernel[grid](
            h.values, layer.w2, _descriptor(layer.w2, down, down.block_k // 2), *_packed(layer, up=False)[1:], out,
            weights_TK, ids_TK, *rows, num_rows, ASM=_pairs(h.values.dtype), **_form(layer), **options,
        )  # fmt: skip
        return
    down_kernel[grid](
        h.values, _or(h.scale, ids_TK), layer.w2, _descriptor(layer.w2, down, down.block_k),
        _or(layer.w2_scale, layer.w2), out, weights_TK, ids_TK, *rows, num_rows, IMPRECISE=_imprecise(layer, down),
        **_scales(layer, h), **options,
    )  # fmt: skip


def launch_down_token(
    h: Activations,
    layer: StoredLayer,
    out_TD: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    config: ExpertsConfig,
    weight_on_input: bool,
) -> None:
    """Write ``out_TD``, the weighted sum over each token's experts, in one kernel."""
    down, hidden, ffn = config.down, out_TD.shape[1], h.values.shape[1]
    num_tokens, top_k = ids_TK.shape
    grid = (num_tokens * triton.cdiv(hidden, down.block_n),)
    options = {
        "E": layer.num_experts,
        "K": top_k,
        "D": hidden,
        "F": ffn,
        "ON_INPUT": weight_on_input,
        "WIDE_W": hidden * layer.w2.shape[2] > _INT32_MAX,
        "PDL": config.pdl,
        **pdl_option(config.pdl),
        **_row_options(down),
    }
    if layer.form.packed:
        down4_token_kernel[grid](
            h.values, *_packed(layer, up=False), out_TD, weights_TK, ids_TK, num_tokens, **_form(layer), **options
        )
        return
    down_token_kernel[grid](
        h.values, _or(h.scale, ids_TK), layer.w2, _or(layer.w2_scale, layer.w2), out_TD, weights_TK, ids_TK,
        num_tokens, **_scales(layer, h), **options,
    )  # fmt: skip


def pdl_option(pdl: bool) -> dict[str, bool]:
    """The launch option that lets a kernel start while the one before it ends."""
    return {"launch_pdl": True} if pdl else {}


def _or(tensor: torch.Tensor | None, stand_in: torch.Tensor) -> torch.Tensor:
    """A kernel takes a tensor everywhere, also where it will not read one."""
    return stand_in if tensor is None else tensor


def _scales(layer: StoredLayer, rows: Activations) -> dict[str, int]:
    x_scales = _X_SCALES[layer.form.granularity]
    if x_scales == 3 and rows.scale is None:
        x_scales = 4
    return {"X_SCALES": x_scales, "W_SCALES": _W_SCALES.get(layer.quant, 0)}


def _imprecise(layer: StoredLayer, config: GemmConfig) -> int:
    """Columns after which a sum moves on to float32: tensor cores add up e4m3 products with some 14 bits only."""
    return config.block_k if layer.form.activation == "fp8" else 0


def _packed(layer: StoredLayer, *, up: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    weight, scale, zero, whole = (
        (layer.w1, layer.w1_scale, layer.w1_zero, layer.w1_global)
        if up
        else (layer.w2, layer.w2_scale, layer.w2_zero, layer.w2_global)
    )
    assert scale is not None
    return weight, scale, _or(zero, weight), _or(whole, weight)


def _form(layer: StoredLayer) -> dict[str, Any]:
    return {
        "FORM": _FORM[layer.quant],
        "GROUP": layer.columns_a_scale,
        "HAS_ZERO": layer.w1_zero is not None,
    }


def _pairs(dtype: torch.dtype) -> bool:
    """Whether nibbles are unpacked two at a time, by instructions that the interpreter does not know."""
    return dtype == torch.bfloat16 and not TRITON_INTERPRETED


def row_blocks(
    ids_TK: torch.Tensor, alignment: Alignment | None, num_experts: int, config: GemmConfig
) -> tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Most blocks of rows there can be, and the alignment tensors (stand-ins where rows are worked out inline)."""
    if config.layout is Layout.INLINE:
        return ids_TK.numel(), ids_TK, ids_TK, ids_TK
    assert alignment is not None
    return max_blocks(ids_TK.numel(), num_experts, config.block_m), *alignment


def _descriptor(weight: torch.Tensor, config: GemmConfig, columns: int) -> Any:
    """Tensor-map of all experts' rows under one another, or the tensor itself as a stand-in."""
    if not config.use_tma:
        return weight
    if weight.shape[2] * weight.element_size() % 16:
        raise ValueError(
            f"USE_TMA needs weight rows that are multiples of 16 bytes; these have {weight.shape[2]} of {weight.dtype}."
        )
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(weight.view(-1, weight.shape[2]), [config.block_n, columns])


def _row_options(config: GemmConfig) -> dict[str, int]:
    return {
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "STAGES": config.num_stages,
        "num_warps": config.num_warps,
    }


def _gemm_options(config: GemmConfig, num_rows: int, dtype: torch.dtype) -> dict[str, Any]:
    inline = config.layout is Layout.INLINE
    return {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "GROUP_M": config.group_m,
        "SPLIT_K": config.split_k,
        "SWAP": config.swap_ab,
        "INLINE": inline,
        "ROWS_P2": max(16, triton.next_power_of_2(num_rows)) if inline else 16,
        "USE_TMA": config.use_tma,
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }
