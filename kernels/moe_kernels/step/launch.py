"""Launchers of the kernels of a step: strides, tiles and grids. Nothing here waits for the device.

With ``pdl`` a kernel may start while the one before it on its stream ends, and reads but weights before it has; the one
before must be a kernel. A device below compute capability 9.0 has no such starts and is not asked for one.

Shapes as in ``reference``.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from moe_kernels.experts.rules import TRITON_INTERPRETED
from moe_kernels.projections.triton_rows import sum_parts_kernel
from moe_kernels.step.triton_heads import head_row_kernel, head_tile_kernel
from moe_kernels.step.triton_router import router_row_kernel, router_tile_kernel
from moe_kernels.step.triton_rows import add_rms_norm_kernel, silu_mul_kernel
from moe_kernels.step.triton_turn import latent_turn_kernel, turn_kernel

_INT32_MAX = 2**31 - 1
# A row up to here is held by one program; wider ones are read twice.
_WIDEST = 16384
# Rows for which every program of the router reads its expert's weights on plain lanes.
_FEW_ROWS = 8


def launch_norm(
    x_SD: torch.Tensor,
    delta_SD: torch.Tensor | None,
    also_SD: torch.Tensor | None,
    weight_D: torch.Tensor,
    eps: float,
    pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (sum, normed); without ``delta_SD`` the sum is an empty tensor."""
    rows, width = x_SD.shape
    out = x_SD.new_empty(rows, width)
    total = out.new_empty(0) if delta_SD is None else torch.empty_like(out)
    if out.numel() == 0:
        return total, out
    x_SD = _dense(x_SD)
    delta = x_SD if delta_SD is None else _dense(delta_SD)
    also = delta if also_SD is None else _dense(also_SD)
    add = 0 if delta_SD is None else 1 if also_SD is None else 2
    block = min(_WIDEST, _power_of_2(width))
    add_rms_norm_kernel[(rows,)](
        x_SD, delta, also, weight_D.contiguous(), total, out, x_SD.stride(0), delta.stride(0), also.stride(0), eps,
        D=width, BLOCK=block, ADD=add, num_warps=_warps(block, 256), **_early(pdl, out),
    )  # fmt: skip
    return total, out


def launch_silu_mul(gate_up_SF2: torch.Tensor, pdl: bool = False) -> torch.Tensor:
    """Return ``[S, F]``."""
    rows, channels = gate_up_SF2.shape[0], gate_up_SF2.shape[1] // 2
    out = gate_up_SF2.new_empty(rows, channels)
    if out.numel() == 0:
        return out
    x = _dense(gate_up_SF2)
    # Few rows are spread over as many programs as there are.
    block = min(_power_of_2(channels), 256 if rows <= 8 else 1024)
    silu_mul_kernel[(rows * _cdiv(channels, block),)](
        x, out, x.stride(0), F=channels, BLOCK=block, num_warps=_warps(block, 256), **_early(pdl, out)
    )
    return out


def launch_turn(
    qkv_SN: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots_S: torch.Tensor,
    heads: int,
    kv_heads: int,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    pdl: bool = False,
) -> torch.Tensor:
    """Return ``[S, H + G, C]``: queries, then keys."""
    rows, (pages, page_size, _, size) = qkv_SN.shape[0], k_cache.shape
    out = qkv_SN.new_empty(rows, heads + kv_heads, size)
    if rows == 0:
        return out
    qkv, cos, sin = _dense(qkv_SN), _dense(cos), _dense(sin)
    q_weight, k_weight = (out if w is None else w.contiguous() for w in (q_norm, k_norm))
    half = _power_of_2(size // 2)
    together = min(_power_of_2(heads + 2 * kv_heads), max(1, 512 // half))
    turn_kernel[(rows * _cdiv(heads + 2 * kv_heads, together),)](
        qkv, cos, sin, k_cache, v_cache, slots_S, q_weight, k_weight, out, qkv.stride(0), cos.stride(0),
        sin.stride(0), slots_S.stride(0), *k_cache.stride(), *v_cache.stride(), pages * page_size, eps,
        H=heads, G=kv_heads, C=size, HALF_P2=half, HEADS=together, PAGE=page_size, NORM=q_norm is not None,
        num_warps=_warps(together * half, 128), enable_fp_fusion=False, **_early(pdl, out),
    )  # fmt: skip
    return out


def launch_latent_turn(
    q_SM: torch.Tensor,
    down_SK: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv_norm: torch.Tensor,
    latent_cache: torch.Tensor,
    q_out_SHL: torch.Tensor,
    slots_S: torch.Tensor,
    nope_dim: int,
    eps: float,
    pdl: bool = False,
) -> torch.Tensor:
    """Return ``[S, L]``; the cache and the last R columns of ``q_out_SHL`` are written."""
    (rows, heads, width), rank = q_out_SHL.shape, kv_norm.shape[0]
    out = down_SK.new_empty(rows, width)
    if rows == 0:
        return out
    if q_out_SHL.stride(2) != 1:
        raise ValueError(f"q_out must be dense in its last dimension; it has strides {q_out_SHL.stride()}.")
    q, down, cos, sin = _dense(q_SM), _dense(down_SK)[:, -width:], _dense(cos), _dense(sin)
    half = _power_of_2((width - rank) // 2)
    together = min(_power_of_2(heads), max(1, 512 // half))
    pages, page_size, _ = latent_cache.shape
    latent_turn_kernel[(rows * (_cdiv(heads, together) + 1),)](
        q, down, cos, sin, kv_norm.contiguous(), latent_cache, slots_S, out, q_out_SHL, q.stride(0), down.stride(0),
        cos.stride(0), sin.stride(0), slots_S.stride(0), *latent_cache.stride(), q_out_SHL.stride(0),
        q_out_SHL.stride(1), pages * page_size, eps, H=heads, N=nope_dim, R=width - rank, C=rank,
        C_P2=_power_of_2(rank), HALF_P2=half, HEADS=together, PAGE=page_size, num_warps=4, enable_fp_fusion=False,
        **_early(pdl, out),
    )  # fmt: skip
    return out


def launch_head_products(a_SHI: torch.Tensor, w_HIJ: torch.Tensor, out_SHJ: torch.Tensor, pdl: bool = False) -> None:
    """Write ``a[s, h] . w[h]``; all of any strides."""
    (rows, heads, inputs), outputs = a_SHI.shape, w_HIJ.shape[2]
    if out_SHJ.numel() == 0:
        return
    sizes = {"IN": inputs, "OUT": outputs}
    strides = (*a_SHI.stride(), *w_HIJ.stride(), *out_SHJ.stride())
    if rows == 1:
        block_i = min(512, _power_of_2(inputs))
        block_j = min(max(1, 8192 // block_i), _power_of_2(outputs))
        head_row_kernel[(heads * _cdiv(outputs, block_j), rows)](
            a_SHI, w_HIJ, out_SHJ, *strides, **sizes, BLOCK_I=block_i, BLOCK_J=block_j,
            num_warps=_warps(block_i * block_j, 1024), **_early(pdl, out_SHJ),
        )  # fmt: skip
        return
    whole = a_SHI.element_size() == 4
    block_m = 16 if rows <= 16 else 32 if rows <= 32 else 64 if rows <= 256 or whole else 128
    block_i = min(max(16, _power_of_2(inputs)), 32 if whole else 128 if block_m < 64 else 64)
    block_j = min(max(16, _power_of_2(outputs)), 128 if block_m == 128 else 64)
    head_tile_kernel[(_cdiv(rows, block_m) * _cdiv(outputs, block_j) * heads,)](
        a_SHI, w_HIJ, out_SHJ, rows, *strides, **sizes, BLOCK_M=block_m, BLOCK_I=block_i, BLOCK_J=block_j,
        num_warps=8 if block_m == 128 else 4, num_stages=3, **_early(pdl, out_SHJ),
    )  # fmt: skip


def launch_router(x_SD: torch.Tensor, weight_ED: torch.Tensor, pdl: bool = False) -> torch.Tensor:
    """Return float32 logits ``[S, E]``."""
    (rows, width), experts = x_SD.shape, weight_ED.shape[0]
    out = x_SD.new_empty(rows, experts, dtype=torch.float32)
    if out.numel() == 0:
        return out
    x, w = _dense(x_SD), _dense(weight_ED)
    sizes = {"E": experts, "D": width}
    if rows <= _FEW_ROWS:
        together = _power_of_2(rows)
        block = min(_power_of_2(width), 2048 if together <= 4 else 1024)
        router_row_kernel[(experts, 1)](
            x, w, out, rows, x.stride(0), w.stride(0), **sizes, ROWS=together, BLOCK=block,
            num_warps=_warps(block, 256), **_early(pdl, out),
        )  # fmt: skip
        return out
    block_m = 16 if rows <= 16 else 32 if rows <= 32 else 64
    block_e, block = (16 if rows <= 64 else 32), 64
    tiles = _cdiv(rows, block_m) * _cdiv(experts, block_e)
    # Parts of a sum, as many as fill a GPU, of at least four steps each.
    split = max(1, min(16, 128 // tiles, _cdiv(width, 4 * block)))
    parts = out if split == 1 else out.new_empty(split, rows, experts)
    router_tile_kernel[(tiles, split)](
        x, w, parts, rows, x.stride(0), w.stride(0), **sizes, BLOCK_M=block_m, BLOCK_E=block_e, BLOCK=block,
        SPLIT=split, num_warps=4, num_stages=3 if x.element_size() == 2 else 2, **_early(pdl, out),
    )  # fmt: skip
    if split > 1:
        size = out.numel()
        sum_parts_kernel[(_cdiv(size, 512),)](
            parts, out, size, PARTS=split, BLOCK=512, WIDE=parts.numel() > _INT32_MAX, num_warps=4,
            **_early(True, out),
        )  # fmt: skip
    return out


def _early(pdl: bool, tensor: torch.Tensor) -> dict[str, Any]:
    return {"PDL": True, "launch_pdl": True} if pdl and _dependent(tensor.device) else {"PDL": False}


@functools.cache
def _dependent(device: torch.device) -> bool:
    """Whether a kernel there may start while the one before it ends."""
    if device.type != "cuda":
        return not TRITON_INTERPRETED
    return torch.cuda.get_device_capability(device) >= (9, 0)


def _dense(x: torch.Tensor) -> torch.Tensor:
    """``x`` with its last dimension dense; rows may keep a stride."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _warps(size: int, each: int) -> int:
    return min(16, max(1, size // each))


def _power_of_2(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)
