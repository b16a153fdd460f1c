"""Launcher of the Triton kernels: grids, buffers and the choice between row layouts.

Shapes: T tokens, D model, F ffn, E experts, K experts per token, N = T*K routed rows.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from moe_kernels.align.api import Alignment
from moe_kernels.align.reference import max_blocks
from moe_kernels.align.triton import launch_align
from moe_kernels.experts.config import INLINE_MAX_ROWS, ExpertsConfig, GemmConfig, Layout
from moe_kernels.experts.triton_gemm import down_kernel, up_kernel
from moe_kernels.experts.triton_gemv import down_token_kernel, sum_kernel, up_row_kernel

_INT32_MAX = 2**31 - 1
_SUM_ELEMENTS = 4096


def launch_experts(
    x_TD: torch.Tensor,
    w1_E2FD: torch.Tensor,
    w2_EDF: torch.Tensor,
    topk_weights_TK: torch.Tensor,
    topk_ids_TK: torch.Tensor,
    config: ExpertsConfig,
) -> torch.Tensor:
    """Return ``[T, D]`` in the dtype of ``x_TD``; nothing here waits for the device."""
    num_tokens, hidden = x_TD.shape
    top_k, ffn = topk_ids_TK.shape[1], w2_EDF.shape[2]
    num_rows = num_tokens * top_k
    out_TD = x_TD.new_empty(num_tokens, hidden)
    if num_tokens == 0:
        return out_TD
    for name, gemm in (("up", config.up), ("down", config.down)):
        if gemm.layout is Layout.INLINE and num_rows > INLINE_MAX_ROWS:
            raise ValueError(
                f"LAYOUT inline of {name} takes up to {INLINE_MAX_ROWS} routed rows, not {num_rows}; use sorted."
            )
    if x_TD.stride(1) != 1 or (config.up.layout is Layout.TOKEN and num_tokens * x_TD.stride(0) > _INT32_MAX):
        x_TD = x_TD.contiguous()
    ids, topk_weights = topk_ids_TK.contiguous(), topk_weights_TK.contiguous()
    alignment = None
    for gemm in (config.up, config.down):
        if gemm.layout is Layout.SORTED and alignment is None:
            alignment = Alignment(*launch_align(ids, w1_E2FD.shape[0], gemm.block_m))

    h_NF = x_TD.new_empty(num_rows, ffn)
    launch_up(x_TD, w1_E2FD, h_NF, ids, alignment, config.up, config.pdl)
    if config.down.layout is Layout.TOKEN:
        launch_down_token(h_NF, w2_EDF, out_TD, topk_weights, ids, config.down, config.pdl)
        return out_TD
    y_ND = x_TD.new_empty(num_rows, hidden)
    launch_down(h_NF, w2_EDF, y_ND, topk_weights, ids, alignment, config.down, config.pdl)
    launch_sum(y_ND, ids, out_TD, w1_E2FD.shape[0], config.pdl)
    return out_TD


def launch_up(
    x_TD: torch.Tensor,
    w1_E2FD: torch.Tensor,
    h_NF: torch.Tensor,
    ids_TK: torch.Tensor,
    alignment: Alignment | None,
    config: GemmConfig,
    pdl: bool,
) -> None:
    """Write ``h_NF``, the activated product of gate and up; rows of dropped ids stay unwritten."""
    num_experts, rows2, hidden = w1_E2FD.shape
    ffn, top_k, num_rows = rows2 // 2, ids_TK.shape[1], ids_TK.numel()
    wide_w = rows2 * hidden > _INT32_MAX
    if config.layout is Layout.TOKEN:
        grid = (num_rows * triton.cdiv(ffn, config.block_n),)
        up_row_kernel[grid](
            x_TD, w1_E2FD, h_NF, ids_TK, num_rows, x_TD.stride(0),
            E=num_experts, K=top_k, D=hidden, F=ffn, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
            STAGES=config.num_stages, WIDE_W=wide_w, PDL=pdl, num_warps=config.num_warps, **_launch_options(pdl),
        )  # fmt: skip
        return
    blocks, sorted_rows, block_experts, num_padded = _blocks(ids_TK, alignment, num_experts, config)
    up_kernel[(blocks * triton.cdiv(ffn, config.block_n),)](
        x_TD, w1_E2FD, _descriptor(w1_E2FD, config), h_NF, ids_TK, sorted_rows, block_experts, num_padded, num_rows,
        x_TD.stride(0), E=num_experts, K=top_k, D=hidden, F=ffn, WIDE_W=wide_w,
        WIDE_ROWS=max(x_TD.shape[0] * x_TD.stride(0), (num_rows + 1) * ffn) > _INT32_MAX, PDL=pdl,
        **_gemm_options(config, num_rows, x_TD.dtype), **_launch_options(pdl),
    )  # fmt: skip


def launch_down(
    h_NF: torch.Tensor,
    w2_EDF: torch.Tensor,
    y_ND: torch.Tensor,
    topk_weights_TK: torch.Tensor,
    ids_TK: torch.Tensor,
    alignment: Alignment | None,
    config: GemmConfig,
    pdl: bool,
) -> None:
    """Write ``y_ND``, each routed row's weighted output; rows of dropped ids stay unwritten."""
    num_experts, hidden, ffn = w2_EDF.shape
    num_rows = ids_TK.numel()
    blocks, sorted_rows, block_experts, num_padded = _blocks(ids_TK, alignment, num_experts, config)
    down_kernel[(blocks * triton.cdiv(hidden, config.block_n),)](
        h_NF, w2_EDF, _descriptor(w2_EDF, config), y_ND, topk_weights_TK, ids_TK, sorted_rows, block_experts,
        num_padded, num_rows, E=num_experts, D=hidden, F=ffn, WIDE_W=hidden * ffn > _INT32_MAX,
        WIDE_ROWS=(num_rows + 1) * max(ffn, hidden) > _INT32_MAX, PDL=pdl,
        **_gemm_options(config, num_rows, h_NF.dtype), **_launch_options(pdl),
    )  # fmt: skip


def launch_down_token(
    h_NF: torch.Tensor,
    w2_EDF: torch.Tensor,
    out_TD: torch.Tensor,
    topk_weights_TK: torch.Tensor,
    ids_TK: torch.Tensor,
    config: GemmConfig,
    pdl: bool,
) -> None:
    """Write ``out_TD``, the weighted sum over each token's experts, in one kernel."""
    num_experts, hidden, ffn = w2_EDF.shape
    num_tokens, top_k = ids_TK.shape
    down_token_kernel[(num_tokens * triton.cdiv(hidden, config.block_n),)](
        h_NF, w2_EDF, out_TD, topk_weights_TK, ids_TK, num_tokens, E=num_experts, K=top_k, D=hidden, F=ffn,
        BLOCK_N=config.block_n, BLOCK_K=config.block_k, STAGES=config.num_stages, WIDE_W=hidden * ffn > _INT32_MAX,
        PDL=pdl, num_warps=config.num_warps, **_launch_options(pdl),
    )  # fmt: skip


def launch_sum(y_ND: torch.Tensor, ids_TK: torch.Tensor, out_TD: torch.Tensor, num_experts: int, pdl: bool) -> None:
    """Write ``out_TD``, the sum over each token's rows of ``y_ND``."""
    (num_tokens, top_k), hidden = ids_TK.shape, out_TD.shape[1]
    top_k_p2 = triton.next_power_of_2(top_k)
    block_d = min(triton.next_power_of_2(hidden), 1024, max(16, _SUM_ELEMENTS // top_k_p2))
    sum_kernel[(num_tokens * triton.cdiv(hidden, block_d),)](
        y_ND, ids_TK, out_TD, E=num_experts, K=top_k, D=hidden, K_P2=top_k_p2, BLOCK_D=block_d,
        WIDE_ROWS=(num_tokens + 1) * top_k * hidden > _INT32_MAX, PDL=pdl, num_warps=4, **_launch_options(pdl),
    )  # fmt: skip


def _blocks(
    ids_TK: torch.Tensor, alignment: Alignment | None, num_experts: int, config: GemmConfig
) -> tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Most blocks of rows there can be, and the alignment tensors (stand-ins where rows are worked out inline)."""
    if config.layout is Layout.INLINE:
        return ids_TK.numel(), ids_TK, ids_TK, ids_TK
    assert alignment is not None
    return max_blocks(ids_TK.numel(), num_experts, config.block_m), *alignment


def _descriptor(weight: torch.Tensor, config: GemmConfig) -> Any:
    """Tensor-map of all experts' rows under one another, or the tensor itself as a stand-in."""
    if not config.use_tma:
        return weight
    if weight.shape[2] * weight.element_size() % 16:
        raise ValueError(
            f"USE_TMA needs weight rows that are multiples of 16 bytes; these have {weight.shape[2]} of {weight.dtype}."
        )
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(weight.view(-1, weight.shape[2]), [config.block_n, config.block_k])


def _gemm_options(config: GemmConfig, num_rows: int, dtype: torch.dtype) -> dict[str, Any]:
    inline = config.layout is Layout.INLINE
    return {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "GROUP_M": config.group_m,
        "INLINE": inline,
        "ROWS_P2": max(16, triton.next_power_of_2(num_rows)) if inline else 16,
        "USE_TMA": config.use_tma,
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }


def _launch_options(pdl: bool) -> dict[str, Any]:
    return {"launch_pdl": True} if pdl else {}
