"""Rotary position on queries and keys, with the norms before it and the write to paged caches after it.

Kernels are compiled without fused multiply-adds, so that a turn gives the bits of the plain code.

Shapes: S rows, H query heads, G key and value heads, C head size (below, of a latent: its size), R turned dimensions,
L = C + R.
"""

# Triton gives its decorator and its device functions no types.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

from moe_kernels.step.triton_common import rounded, through, wait


@triton.jit
def turned(low, high, cos_ptr, sin_ptr, half, HALF: tl.constexpr, DTYPE: tl.constexpr):
    """Halves ``[N, HALF]`` of float32 heads of one row, turned and rounded to DTYPE."""
    mask = half < HALF
    cos_low = tl.load(cos_ptr + half, mask=mask, other=0.0)[None, :]
    cos_high = tl.load(cos_ptr + HALF + half, mask=mask, other=0.0)[None, :]
    sin_low = tl.load(sin_ptr + half, mask=mask, other=0.0)[None, :]
    sin_high = tl.load(sin_ptr + HALF + half, mask=mask, other=0.0)[None, :]
    return rounded(low * cos_low + high * sin_low, DTYPE), rounded(high * cos_high + low * sin_high, DTYPE)


@triton.jit
def place(slots_ptr, row, slots_stride, num_slots, page_stride, slot_stride, PAGE: tl.constexpr):
    """(offset of a row's slot in a cache, whether the cache has that slot)."""
    slot = tl.load(slots_ptr + row * slots_stride).to(tl.int64)
    return slot // PAGE * page_stride + slot % PAGE * slot_stride, (slot >= 0) & (slot < num_slots)


@triton.jit(do_not_specialize=["num_slots"])
def turn_kernel(
    qkv_ptr, cos_ptr, sin_ptr, k_cache_ptr, v_cache_ptr, slots_ptr, q_weight_ptr, k_weight_ptr, out_ptr,
    qkv_stride, cos_stride, sin_stride, slots_stride, k_page, k_slot, k_head, k_column, v_page, v_slot, v_head,
    v_column, num_slots, eps, H: tl.constexpr, G: tl.constexpr, C: tl.constexpr, HALF_P2: tl.constexpr,
    HEADS: tl.constexpr, PAGE: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """HEADS heads of one row a program: queries and keys to ``out [S, H + G, C]``, keys and values to their caches."""
    DTYPE: tl.constexpr = qkv_ptr.dtype.element_ty
    HALF: tl.constexpr = C // 2
    GROUPS: tl.constexpr = (H + 2 * G + HEADS - 1) // HEADS
    row = (tl.program_id(0) // GROUPS).to(tl.int64)
    head = tl.program_id(0) % GROUPS * HEADS + tl.arange(0, HEADS)
    half = tl.arange(0, HALF_P2)
    there = (head < H + 2 * G)[:, None] & (half < HALF)[None, :]
    is_turned, is_query = (head < H + G)[:, None], (head < H)[:, None]
    if NORM:
        # Weights do not come from the kernel before.
        q_low = tl.load(q_weight_ptr + half, mask=half < HALF, other=0.0).to(tl.float32)[None, :]
        q_high = tl.load(q_weight_ptr + HALF + half, mask=half < HALF, other=0.0).to(tl.float32)[None, :]
        k_low = tl.load(k_weight_ptr + half, mask=half < HALF, other=0.0).to(tl.float32)[None, :]
        k_high = tl.load(k_weight_ptr + HALF + half, mask=half < HALF, other=0.0).to(tl.float32)[None, :]
    wait(PDL)
    x_ptrs = qkv_ptr + row * qkv_stride + head[:, None] * C + half[None, :]
    own_low = tl.load(x_ptrs, mask=there, other=0.0)
    own_high = tl.load(x_ptrs + HALF, mask=there, other=0.0)
    low, high = own_low.to(tl.float32), own_high.to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(low * low + high * high, axis=1) / C + eps)[:, None]
        low = through(tl.where(is_query, q_low, k_low) * (low * scale), DTYPE)
        high = through(tl.where(is_query, q_high, k_high) * (high * scale), DTYPE)
    low, high = turned(low, high, cos_ptr + row * cos_stride, sin_ptr + row * sin_stride, half, HALF, DTYPE)
    out_ptrs = out_ptr + row * (H + G) * C + head[:, None] * C + half[None, :]
    tl.store(out_ptrs, low, mask=there & is_turned)
    tl.store(out_ptrs + HALF, high, mask=there & is_turned)

    half = half.to(tl.int64)[None, :]
    offset, kept = place(slots_ptr, row, slots_stride, num_slots, k_page, k_slot, PAGE)
    k_ptrs = k_cache_ptr + offset + (head - H).to(tl.int64)[:, None] * k_head + half * k_column
    is_key = there & is_turned & (head >= H)[:, None] & kept
    tl.store(k_ptrs, low, mask=is_key)
    tl.store(k_ptrs + HALF * k_column, high, mask=is_key)
    offset, kept = place(slots_ptr, row, slots_stride, num_slots, v_page, v_slot, PAGE)
    v_ptrs = v_cache_ptr + offset + (head - H - G).to(tl.int64)[:, None] * v_head + half * v_column
    is_value = there & (head >= H + G)[:, None] & kept
    tl.store(v_ptrs, own_low, mask=is_value)
    tl.store(v_ptrs + HALF * v_column, own_high, mask=is_value)


@triton.jit(do_not_specialize=["num_slots"])
def latent_turn_kernel(
    q_ptr, down_ptr, cos_ptr, sin_ptr, weight_ptr, cache_ptr, slots_ptr, latent_ptr, out_ptr,
    q_stride, down_stride, cos_stride, sin_stride, slots_stride, page_stride, slot_stride, column_stride, out_stride,
    out_head, num_slots, eps, H: tl.constexpr, N: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    C_P2: tl.constexpr, HALF_P2: tl.constexpr, HEADS: tl.constexpr, PAGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Of one row, the first program has the latent and the shared key, every other HEADS heads of the query."""
    DTYPE: tl.constexpr = down_ptr.dtype.element_ty
    HALF: tl.constexpr = R // 2
    GROUPS: tl.constexpr = (H + HEADS - 1) // HEADS + 1
    row = (tl.program_id(0) // GROUPS).to(tl.int64)
    group = tl.program_id(0) % GROUPS
    half = tl.arange(0, HALF_P2)
    cos_ptr += row * cos_stride
    sin_ptr += row * sin_stride
    if group == 0:
        column = tl.arange(0, C_P2)
        mask = column < C
        weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
        wait(PDL)
        down_ptr += row * down_stride
        latent_ptr += row * (C + R)
        offset, kept = place(slots_ptr, row, slots_stride, num_slots, page_stride, slot_stride, PAGE)
        cache_ptr += offset
        x = tl.load(down_ptr + column, mask=mask, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, axis=0) / C + eps)
        latent = rounded(weight * (x * scale), DTYPE)
        tl.store(latent_ptr + column, latent, mask=mask)
        tl.store(cache_ptr + column.to(tl.int64) * column_stride, latent, mask=mask & kept)
        one = tl.arange(0, 1)[:, None] + C + half[None, :]
        real = (half < HALF)[None, :]
        key_low = tl.load(down_ptr + one, mask=real, other=0.0).to(tl.float32)
        key_high = tl.load(down_ptr + HALF + one, mask=real, other=0.0).to(tl.float32)
        key_low, key_high = turned(key_low, key_high, cos_ptr, sin_ptr, half, HALF, DTYPE)
        tl.store(latent_ptr + one, key_low, mask=real)
        tl.store(latent_ptr + HALF + one, key_high, mask=real)
        tl.store(cache_ptr + one.to(tl.int64) * column_stride, key_low, mask=real & kept)
        tl.store(cache_ptr + (HALF + one).to(tl.int64) * column_stride, key_high, mask=real & kept)
    else:
        wait(PDL)
        head = (group - 1) * HEADS + tl.arange(0, HEADS)
        inside = (head < H)[:, None] & (half < HALF)[None, :]
        x_ptrs = q_ptr + row * q_stride + head[:, None] * (N + R) + N + half[None, :]
        low = tl.load(x_ptrs, mask=inside, other=0.0).to(tl.float32)
        high = tl.load(x_ptrs + HALF, mask=inside, other=0.0).to(tl.float32)
        low, high = turned(low, high, cos_ptr, sin_ptr, half, HALF, DTYPE)
        out_ptrs = out_ptr + row * out_stride + head[:, None] * out_head + C + half[None, :]
        tl.store(out_ptrs, low, mask=inside)
        tl.store(out_ptrs + HALF, high, mask=inside)
