"""Launcher of the Triton kernels: buffers, the choice between kernels, and the order of launches.

Shapes: T tokens, D model, F ffn, E experts, K experts per token, N = T*K routed rows, S parts of a split sum.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton

from moe_kernels.align.api import Alignment
from moe_kernels.align.triton import launch_align
from moe_kernels.experts.launch import Activations, Out, launch_down, launch_down_token, launch_up, pdl_option
from moe_kernels.experts.layer import StoredLayer
from moe_kernels.experts.tiles import INLINE_MAX_ROWS, ExpertsConfig, GemmConfig, Layout
from moe_kernels.experts.triton_sum import activate_kernel, sum_kernel
from moe_kernels.formats import BLOCK
from moe_kernels.quant.triton import launch_quantize
from moe_kernels.types import Quant

_INT32_MAX = 2**31 - 1
# Weights of one matrix of an expert up to which a row a program rounds its own activations.
_SMALL_EXPERT = 2**22


def launch_experts(
    x_TD: torch.Tensor,
    layer: StoredLayer,
    topk_weights_TK: torch.Tensor,
    topk_ids_TK: torch.Tensor,
    config: ExpertsConfig,
    *,
    weight_on_input: bool = False,
    atomic: bool = False,
) -> torch.Tensor:
    """Return ``[T, D]`` in the dtype of ``x_TD``; nothing here waits for the device."""
    num_tokens, hidden = x_TD.shape
    num_rows = topk_ids_TK.numel()
    if num_tokens == 0:
        return x_TD.new_empty(num_tokens, hidden)
    check_legal(config, layer, num_rows)
    if atomic and config.pdl and max(config.up.split_k, config.down.split_k) > 1:
        # Sums are zeroed by a memset, behind which no kernel may start early.
        config = replace(config, pdl=False)
    if x_TD.stride(1) != 1 or (config.up.layout is Layout.TOKEN and num_tokens * x_TD.stride(0) > _INT32_MAX):
        x_TD = x_TD.contiguous()
    ids, weights = topk_ids_TK.contiguous(), topk_weights_TK.contiguous()
    alignment = None
    for gemm in (config.up, config.down):
        if gemm.layout is Layout.SORTED and alignment is None:
            alignment = Alignment(*launch_align(ids, layer.num_experts, gemm.block_m))

    x = _quantize_x(x_TD, layer, ids, config)
    h = _up(x, layer, ids, weights, alignment, config, weight_on_input, atomic, x_TD.dtype)
    return _down(h, layer, ids, weights, alignment, config, weight_on_input, atomic, x_TD.new_empty(num_tokens, hidden))


def check_legal(config: ExpertsConfig, layer: StoredLayer, num_rows: int) -> None:
    """Refuse a configuration that the format or the number of rows does not allow; ValueError names the key."""
    for name, gemm in (("up", config.up), ("down", config.down)):
        if gemm.layout is Layout.INLINE and num_rows > INLINE_MAX_ROWS:
            raise ValueError(
                f"LAYOUT inline of {name} takes up to {INLINE_MAX_ROWS} routed rows, not {num_rows}; use sorted."
            )
        if gemm.layout is Layout.TOKEN and gemm.split_k > 1:
            raise ValueError(f"SPLIT_K of {name} must be 1 where LAYOUT is token; got {gemm.split_k}.")
        widest = max(layer.intermediate_size, layer.w2.shape[1])
        if gemm.layout is Layout.TOKEN and num_rows * widest > _INT32_MAX:
            raise ValueError(f"LAYOUT token of {name} does not reach {num_rows} rows of {widest} columns; use sorted.")
        if layer.form.quantized and gemm.block_k < 32:
            raise ValueError(f"BLOCK_SIZE_K of {name} must be at least 32 for {layer.quant}; got {gemm.block_k}.")
        if layer.quant is not Quant.FP8_BLOCK:
            continue
        if gemm.layout is Layout.TOKEN and gemm.block_n > BLOCK:
            raise ValueError(
                f"BLOCK_SIZE_N of {name} must be at most 128 for fp8_block where LAYOUT is token; got {gemm.block_n}."
            )
        if gemm.layout is Layout.TOKEN and gemm.block_k % BLOCK:
            raise ValueError(
                f"BLOCK_SIZE_K of {name} must be a multiple of 128 for fp8_block where LAYOUT is token; "
                f"got {gemm.block_k}."
            )
        if gemm.layout is not Layout.TOKEN and gemm.block_k not in (64, BLOCK):
            raise ValueError(f"BLOCK_SIZE_K of {name} must be 64 or 128 for fp8_block; got {gemm.block_k}.")


def _quantizes_inside(layer: StoredLayer, gemm: GemmConfig) -> bool:
    """Whether a GEMM rounds its activations itself, a row a program: it saves a launch, and costs time in proportion to
    the weights, so that small experts alone gain.
    """
    if layer.quant is not Quant.FP8_BLOCK or gemm.layout is not Layout.TOKEN:
        return False
    return layer.w2[0].numel() <= _SMALL_EXPERT


def _quantize_x(x_TD: torch.Tensor, layer: StoredLayer, ids_TK: torch.Tensor, config: ExpertsConfig) -> Activations:
    form = layer.form
    if not form.activation or _quantizes_inside(layer, config.up):
        return Activations(x_TD, None)
    static = layer.x_scale
    q, scale = launch_quantize(
        x_TD, form.granularity, form.activation, ids_TK, layer.num_experts, False, static_scale=static, pdl=config.pdl
    )
    return Activations(q, scale)


def _up(
    x: Activations,
    layer: StoredLayer,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    alignment: Alignment | None,
    config: ExpertsConfig,
    weight_on_input: bool,
    atomic: bool,
    dtype: torch.dtype,
) -> Activations:
    """The activated intermediate ``[N, F]``, as the down kernel takes it."""
    form, ffn, num_rows = layer.form, layer.intermediate_size, ids_TK.numel()
    up, parts = config.up, config.up.split_k
    blocked = layer.quant is Quant.FP8_BLOCK and not _quantizes_inside(layer, config.down)
    new = x.values.new_empty
    if blocked and parts == 1 and up.layout is not Layout.TOKEN and up.block_n % BLOCK == 0:
        h = Activations(
            new(num_rows, ffn, dtype=torch.float8_e4m3fn), new(num_rows, triton.cdiv(ffn, BLOCK), dtype=torch.float32)
        )
        launch_up(
            x, layer, h.values, h.scale, Out.BLOCKS, ids_TK, weights_TK, alignment, config, weight_on_input, dtype
        )
        return h
    h_NF = new(num_rows, ffn, dtype=dtype)
    if parts == 1:
        launch_up(x, layer, h_NF, None, Out.PLAIN, ids_TK, weights_TK, alignment, config, weight_on_input, dtype)
    else:
        out = Out.ATOMIC if atomic else Out.PARTS
        shape = (1 if atomic else parts, num_rows, 2 * ffn)
        # Sums that are added to start at zero in every call, and so in every replay.
        sums = (x.values.new_zeros if atomic else new)(shape, dtype=torch.float32)
        launch_up(x, layer, sums, None, out, ids_TK, weights_TK, alignment, config, weight_on_input, dtype)
        block_f = min(1024, triton.next_power_of_2(ffn))
        activate_kernel[(num_rows * triton.cdiv(ffn, block_f),)](
            sums, ids_TK, h_NF, num_rows, E=layer.num_experts, F=ffn, PARTS=shape[0], BLOCK_F=block_f,
            PDL=config.pdl, num_warps=4, **pdl_option(config.pdl),
        )  # fmt: skip
    if not form.activation or _quantizes_inside(layer, config.down):
        return Activations(h_NF, None)
    q, scale = launch_quantize(
        h_NF, form.granularity, form.activation, ids_TK, layer.num_experts, True, static_scale=layer.h_scale,
        pdl=config.pdl,
    )  # fmt: skip
    return Activations(q, scale)


def _down(
    h: Activations,
    layer: StoredLayer,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    alignment: Alignment | None,
    config: ExpertsConfig,
    weight_on_input: bool,
    atomic: bool,
    out_TD: torch.Tensor,
) -> torch.Tensor:
    down, num_rows, hidden = config.down, ids_TK.numel(), out_TD.shape[1]
    if down.layout is Layout.TOKEN:
        launch_down_token(h, layer, out_TD, ids_TK, weights_TK, config, weight_on_input)
        return out_TD
    if down.split_k > 1 and atomic:
        sums_TD = out_TD.new_zeros(out_TD.shape, dtype=torch.float32)
        launch_down(h, layer, sums_TD, Out.ATOMIC, ids_TK, weights_TK, alignment, config, weight_on_input)
        return sums_TD.to(out_TD.dtype)
    if down.split_k > 1:
        y = out_TD.new_empty(down.split_k, num_rows, hidden, dtype=torch.float32)
        launch_down(h, layer, y, Out.PARTS, ids_TK, weights_TK, alignment, config, weight_on_input)
    else:
        y = out_TD.new_empty(1, num_rows, hidden)
        launch_down(h, layer, y, Out.PLAIN, ids_TK, weights_TK, alignment, config, weight_on_input)
    launch_sum(y, ids_TK, out_TD, layer.num_experts, config.pdl)
    return out_TD


def launch_sum(y_SND: torch.Tensor, ids_TK: torch.Tensor, out_TD: torch.Tensor, num_experts: int, pdl: bool) -> None:
    """Write ``out_TD``, the sum over each token's rows of all parts of ``y_SND``."""
    (num_tokens, top_k), hidden, parts = ids_TK.shape, out_TD.shape[1], y_SND.shape[0]
    # 16 bytes a thread and row.
    block_d = min(triton.next_power_of_2(hidden), 4096 // y_SND.element_size() * (2 if num_tokens > 64 else 1) // 2)
    sum_kernel[(num_tokens * triton.cdiv(hidden, block_d),)](
        y_SND, ids_TK, out_TD, y_SND.shape[1], E=num_experts, K=top_k, D=hidden, PARTS=parts, BLOCK_D=block_d,
        WIDE_ROWS=(num_tokens + 1) * top_k * parts * hidden > _INT32_MAX, PDL=pdl, num_warps=4, **pdl_option(pdl),
    )  # fmt: skip
