"""Launchers of the Triton attention kernels: strides, tiles and grids.

Shapes: B sequences, S new tokens, H query heads, Hkv heads of keys and values, D and Dv head sizes, P pages.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch

from moe_kernels.attention.sdpa import is_front
from moe_kernels.attention.tiles import (
    H200_SHARED,
    H200_SMS,
    DecodeShape,
    DecodeTiles,
    PrefillShape,
    PrefillTiles,
    decode_bytes,
    decode_tiles,
    head_split,
    num_splits,
    power_of_two,
    prefill_bytes,
    prefill_tiles,
)
from moe_kernels.attention.triton_decode import decode_kernel
from moe_kernels.attention.triton_merge import merge_kernel
from moe_kernels.attention.triton_prefill import prefill_kernel
from moe_kernels.attention.types import PagedPrefix
from moe_kernels.experts.rules import TRITON_INTERPRETED

_LOG2_E = math.log2(math.e)


class Limits(NamedTuple):
    """What launches depend on of a device.

    Attributes:
        sms: multiprocessors.
        shared_bytes: shared memory that a program may take.
        dependent: whether a kernel may start while the one before it ends.
    """

    sms: int
    shared_bytes: int
    dependent: bool


@functools.cache
def device_limits(device: torch.device) -> Limits:
    """The limits of a GPU; an H200's where there is none."""
    if device.type != "cuda":
        return Limits(H200_SMS, H200_SHARED, not TRITON_INTERPRETED)
    found = torch.cuda.get_device_properties(device)
    # What a kernel may opt in to; without that number, what every CUDA device has.
    shared = int(getattr(found, "shared_memory_per_block_optin", 48 * 1024))
    return Limits(found.multi_processor_count, shared, found.major >= 9)


def _check_fit(shape: DecodeShape | PrefillShape, needed: int, shared_bytes: int) -> None:
    if needed > shared_bytes:
        raise NotImplementedError(
            f"Triton attention needs {needed} bytes of shared memory for head sizes {shape.head_dim} and "
            f"{shape.v_head_dim} of {shape.bytes} bytes, and this device has {shared_bytes}; use impl 'sdpa'."
        )


def launch_decode(
    q_BHD: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table_BP: torch.Tensor,
    seq_lens_B: torch.Tensor,
    scale: float,
    window: int,
    splits: int,
    config: list[int],
) -> torch.Tensor:
    """Return ``[B, H, Dv]``; a window or number of splits of 0, or no ``config``, means none or the default."""
    (batch, heads, size), (_, page_size, kv_heads, v_size) = q_BHD.shape, v_cache.shape
    out = q_BHD.new_empty(batch, heads, v_size)
    if batch == 0:
        return out
    main, rest = head_split(size)
    group = heads // kv_heads
    shared_v = main == v_size and is_front(v_cache, k_cache)
    shape = DecodeShape(group, size, v_size, shared_v, q_BHD.element_size())
    limits = device_limits(q_BHD.device)
    tiles = DecodeTiles.from_ints(config) if config else decode_tiles(shape, limits.shared_bytes)
    if not config:
        _check_fit(shape, decode_bytes(tiles, shape), limits.shared_bytes)
    rows = batch * kv_heads * -(-group // tiles.block_h)
    max_keys = page_table_BP.shape[1] * page_size
    splits = splits or num_splits(tiles, rows, max_keys, limits.sms)
    part, lse = out, out
    pdl = splits > 1 and bool(tiles.pdl) and limits.dependent
    if splits > 1:
        part = q_BHD.new_empty(batch, heads, splits, v_size, dtype=torch.float32)
        lse = q_BHD.new_empty(batch, heads, splits, dtype=torch.float32)
    block_dv = max(16, power_of_two(v_size))
    decode_kernel[(rows, splits)](
        q_BHD, k_cache, v_cache, page_table_BP, seq_lens_B, part, lse, scale * _LOG2_E, window, max_keys, splits,
        tiles.least_keys, *q_BHD.stride(), *k_cache.stride(), *v_cache.stride(), page_table_BP.stride(0),
        KV_HEADS=kv_heads, GROUP=group, D=size, DV=v_size, PAGE=page_size,
        D_MAIN=main, BLOCK_REST=rest, BLOCK_DV=block_dv, SHARED_V=shared_v,
        WINDOWED=window > 0, SPLIT=splits > 1, PDL=pdl,
        BLOCK_H=tiles.block_h, BLOCK_N=tiles.block_n, SWAP=bool(tiles.swap),
        PRECISION="ieee" if q_BHD.dtype == torch.float32 else "tf32",
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    if splits > 1:
        columns = min(128, block_dv)
        merge_kernel[(batch * heads, -(-v_size // columns))](
            part, lse, out, splits, DV=v_size, BLOCK_DV=columns, BLOCK_LSE=128, BLOCK_S=16, PDL=pdl,
            num_warps=4, **({"launch_pdl": True} if pdl else {}),
        )  # fmt: skip
    return out


def launch_prefill(
    q_SHD: torch.Tensor,
    k_SHD: torch.Tensor,
    v_SHD: torch.Tensor,
    cu_seqlens: torch.Tensor,
    scale: float,
    causal: bool,
    window: int,
    prefix: PagedPrefix | None,
    config: list[int],
) -> torch.Tensor:
    """Return ``[S, H, Dv]``; a window of 0, or no ``config``, means none or the default."""
    (rows, heads, size), (_, kv_heads, v_size) = q_SHD.shape, v_SHD.shape
    out = q_SHD.new_empty(rows, heads, v_size)
    if rows == 0:
        return out
    main, rest = head_split(size)
    group, batch = heads // kv_heads, cu_seqlens.shape[0] - 1
    shared_v = main == v_size and is_front(v_SHD, k_SHD)
    pages: tuple[torch.Tensor, ...] = (k_SHD, v_SHD, cu_seqlens, cu_seqlens)
    page_size, max_prefix = 0, 0
    paged_strides: tuple[int, ...] = (0,) * 9
    if prefix is not None:
        pages = prefix
        page_size = prefix.k_cache.shape[1]
        max_prefix = prefix.page_table_BP.shape[1] * page_size
        paged_strides = (*prefix.k_cache.stride(), *prefix.v_cache.stride(), prefix.page_table_BP.stride(0))
        shared_v = shared_v and is_front(prefix.v_cache, prefix.k_cache)
    shape = PrefillShape(group, size, v_size, shared_v, q_SHD.element_size())
    limits = device_limits(q_SHD.device)
    tiles = PrefillTiles.from_ints(config) if config else prefill_tiles(shape, limits.shared_bytes)
    if not config:
        _check_fit(shape, prefill_bytes(tiles, shape), limits.shared_bytes)
    pack = min(tiles.pack, group, tiles.block_m)
    blocks = rows // (tiles.block_m // pack) + batch + 1
    prefill_kernel[(blocks * kv_heads * -(-group // pack),)](
        q_SHD, k_SHD, v_SHD, cu_seqlens, *pages, out, scale * _LOG2_E, window, rows, batch, blocks, max_prefix,
        *q_SHD.stride(), *k_SHD.stride(), *v_SHD.stride(), *paged_strides,
        BATCH_P2=power_of_two(batch + 1), KV_HEADS=kv_heads, GROUP=group, PACK=pack, D=size, DV=v_size,
        D_MAIN=main, BLOCK_REST=rest, BLOCK_DV=max(16, power_of_two(v_size)), SHARED_V=shared_v,
        CAUSAL=causal, WINDOWED=window > 0, PAGE=page_size,
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, PRECISION="ieee" if q_SHD.dtype == torch.float32 else "tf32",
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    return out
