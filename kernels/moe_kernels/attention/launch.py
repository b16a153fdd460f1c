"""Launchers of the Triton attention kernels: strides, tiles and grids.

Shapes: B sequences, S new tokens, H query heads, Hkv heads of keys and values, D and Dv head sizes, P pages.
"""

from __future__ import annotations

import functools
import math

import torch

from moe_kernels.attention.sdpa import is_front
from moe_kernels.attention.tiles import (
    H200_SHARED,
    H200_SMS,
    DecodeShape,
    DecodeTiles,
    decode_tiles,
    head_split,
    num_splits,
    power_of_two,
)
from moe_kernels.attention.triton_decode import decode_kernel
from moe_kernels.attention.triton_merge import merge_kernel

_LOG2_E = math.log2(math.e)


@functools.cache
def device_limits(device: torch.device) -> tuple[int, int]:
    """(multiprocessors, bytes of shared memory that a program may take); an H200's where there is no GPU."""
    if device.type != "cuda":
        return H200_SMS, H200_SHARED
    found = torch.cuda.get_device_properties(device)
    return found.multi_processor_count, int(getattr(found, "shared_memory_per_block_optin", 48 * 1024))


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
    sms, shared_bytes = device_limits(q_BHD.device)
    tiles = DecodeTiles.from_ints(config) if config else decode_tiles(shape, shared_bytes)
    rows = batch * kv_heads * -(-group // tiles.block_h)
    max_keys = page_table_BP.shape[1] * page_size
    splits = splits or num_splits(tiles, rows, max_keys, sms)
    part, lse = out, out
    if splits > 1:
        part = q_BHD.new_empty(batch, heads, splits, v_size, dtype=torch.float32)
        lse = q_BHD.new_empty(batch, heads, splits, dtype=torch.float32)
    block_dv = max(16, power_of_two(v_size))
    decode_kernel[(rows, splits)](
        q_BHD, k_cache, v_cache, page_table_BP, seq_lens_B, part, lse, scale * _LOG2_E, window, max_keys, splits,
        *q_BHD.stride(), *k_cache.stride(), *v_cache.stride(), page_table_BP.stride(0),
        KV_HEADS=kv_heads, GROUP=group, D=size, DV=v_size, PAGE=page_size,
        D_MAIN=main, BLOCK_REST=rest, BLOCK_DV=block_dv, SHARED_V=shared_v,
        WINDOWED=window > 0, SPLIT=splits > 1, LEAST_KEYS=tiles.least_keys,
        BLOCK_H=tiles.block_h, BLOCK_N=tiles.block_n, SWAP=bool(tiles.swap), AHEAD=bool(tiles.ahead),
        PRECISION="ieee" if q_BHD.dtype == torch.float32 else "tf32",
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    if splits > 1:
        merge_kernel[(batch * heads, 1)](
            part, lse, out, splits, DV=v_size, BLOCK_DV=block_dv, SPLITS_P2=power_of_two(splits), BLOCK_S=8, num_warps=4
        )
    return out
