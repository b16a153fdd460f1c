"""Launcher of the kernels on FP4 units: activations to FP4, gate and up, the intermediate to FP4, down, and the sum.

Shapes: T tokens, D model, F ffn, E experts, K experts per token, N = T*K routed rows.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from moe_kernels.align.api import Alignment
from moe_kernels.align.triton import launch_align
from moe_kernels.experts.launch import pdl_option, row_blocks
from moe_kernels.experts.layer import StoredLayer
from moe_kernels.experts.rule_fp4 import check_fp4
from moe_kernels.experts.tiles import ExpertsConfig, GemmConfig, Layout
from moe_kernels.experts.triton import launch_sum
from moe_kernels.experts.triton_fp4 import down_fp4_kernel, up_fp4_kernel
from moe_kernels.quant.fp4 import Fp4Rows
from moe_kernels.quant.triton_fp4 import launch_fp4
from moe_kernels.types import Quant

_INT32_MAX = 2**31 - 1


def launch_experts_fp4(
    x_TD: torch.Tensor,
    layer: StoredLayer,
    topk_weights_TK: torch.Tensor,
    topk_ids_TK: torch.Tensor,
    config: ExpertsConfig,
    *,
    weight_on_input: bool = False,
) -> torch.Tensor:
    """Return ``[T, D]`` in the dtype of ``x_TD``; nothing here waits for the device."""
    num_tokens, hidden = x_TD.shape
    num_rows, ffn = topk_ids_TK.numel(), layer.intermediate_size
    if num_tokens == 0:
        return x_TD.new_empty(num_tokens, hidden)
    check_fp4(config, num_rows)
    ids, weights = topk_ids_TK.contiguous(), topk_weights_TK.contiguous()
    alignment = None
    for gemm in (config.up, config.down):
        if gemm.layout is Layout.SORTED and alignment is None:
            alignment = Alignment(*launch_align(ids, layer.num_experts, gemm.block_m))
    common = {
        "E": layer.num_experts,
        "K": ids.shape[1],
        "D": hidden,
        "F": ffn,
        "NVFP4": layer.quant is Quant.NVFP4,
        "ON_INPUT": weight_on_input,
        "WIDE_ROWS": (num_rows + 1) * max(hidden, ffn) > _INT32_MAX,
        "PDL": config.pdl,
        **pdl_option(config.pdl),
    }

    x = launch_fp4(x_TD, layer.quant, config.pdl)
    h_NF = x_TD.new_empty(num_rows, ffn)
    blocks, *rows = row_blocks(ids, alignment, layer.num_experts, config.up)
    up_fp4_kernel[(blocks * triton.cdiv(ffn, config.up.block_n),)](
        *_operand(x), layer.w1, layer.w1_scale, _or(layer.w1_global, layer.w1), h_NF, weights, ids, *rows, num_rows,
        WIDE_W=2 * ffn * layer.w1.shape[2] > _INT32_MAX, **common, **_options(config.up, num_rows),
    )  # fmt: skip

    # Rows of dropped ids hold whatever was there, and so does what is made of them; nobody reads either.
    h = launch_fp4(h_NF, layer.quant, config.pdl)
    y_ND = x_TD.new_empty(num_rows, hidden)
    blocks, *rows = row_blocks(ids, alignment, layer.num_experts, config.down)
    down_fp4_kernel[(blocks * triton.cdiv(hidden, config.down.block_n),)](
        *_operand(h), layer.w2, layer.w2_scale, _or(layer.w2_global, layer.w2), y_ND, weights, ids, *rows, num_rows,
        WIDE_W=hidden * layer.w2.shape[2] > _INT32_MAX, **common, **_options(config.down, num_rows),
    )  # fmt: skip
    out_TD = x_TD.new_empty(num_tokens, hidden)
    launch_sum(y_ND[None], ids, out_TD, layer.num_experts, config.pdl)
    return out_TD


def _operand(rows: Fp4Rows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return rows.data, rows.scale, _or(rows.whole, rows.data)


def _or(tensor: torch.Tensor | None, stand_in: torch.Tensor) -> torch.Tensor:
    """A kernel takes a tensor everywhere, also where it will not read one."""
    return stand_in if tensor is None else tensor


def _options(config: GemmConfig, num_rows: int) -> dict[str, Any]:
    inline = config.layout is Layout.INLINE
    return {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "GROUP_M": config.group_m,
        "SWAP": config.swap_ab,
        "INLINE": inline,
        "ROWS_P2": max(16, triton.next_power_of_2(num_rows)) if inline else 16,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }
