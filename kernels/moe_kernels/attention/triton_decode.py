"""Decode attention in Triton, for grouped queries and for latent heads alike.

A program takes the heads of one group (or a block of them), one sequence and one of its parts; keys and values are
read once for all of those heads. Parts are merged by `triton_merge`. With latent heads values are the first columns of
the keys and are not read again.

The tile of keys is the left operand where SWAP is set: Hopper's tensor cores take 64 rows of that, and 8 columns of
the right one, so that few heads waste less.

Shapes: B sequences, H query heads, GROUP of them to a head of keys, D and DV head sizes, N keys of a tile.
"""

# Triton gives its decorator and its device functions no types.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_pages(table_ptr, n, end, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Pages of keys from ``n`` on: one where a page holds whole tiles, else one a key; 0 past ``end``."""
    if PAGE % BLOCK_N == 0:
        return tl.load(table_ptr + n // PAGE, mask=n < end, other=0)
    else:
        key = n + tl.arange(0, BLOCK_N)
        return tl.load(table_ptr + key // PAGE, mask=key < end, other=0)


@triton.jit
def page_rows(page, n, stride_page, stride_slot, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Offsets of a tile's slots, int64 ``[BLOCK_N]``: a cache may hold more than 2^31 elements."""
    slot = (n + tl.arange(0, BLOCK_N)) % PAGE
    return page.to(tl.int64) * stride_page + slot.to(tl.int64) * stride_slot


@triton.jit(do_not_specialize=["stride_tb", "max_keys", "window", "num_splits", "least_keys"])
def decode_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, lens_ptr, out_ptr, lse_ptr, scale_log2, window, max_keys, num_splits, least_keys,
    stride_qb, stride_qh, stride_qd, stride_kp, stride_ks, stride_kh, stride_kd,
    stride_vp, stride_vs, stride_vh, stride_vd, stride_tb,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PAGE: tl.constexpr,
    D_MAIN: tl.constexpr, BLOCK_REST: tl.constexpr, BLOCK_DV: tl.constexpr, SHARED_V: tl.constexpr,
    WINDOWED: tl.constexpr, SPLIT: tl.constexpr, PDL: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, SWAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write ``out[b, h]``, or with SPLIT ``out[b, h, part]`` in float32 beside its logarithm of sums to base 2.

    D is cut into D_MAIN, a power of two, and a rest that BLOCK_REST holds (0 for none). A tile's pages are looked up
    one tile ahead, so that they wait for nothing when its keys are asked for.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    HEAD_BLOCKS: tl.constexpr = (GROUP + BLOCK_H - 1) // BLOCK_H
    pid = tl.program_id(0)
    part = tl.program_id(1)
    batch = pid // (KV_HEADS * HEAD_BLOCKS)
    kv_head = pid % (KV_HEADS * HEAD_BLOCKS) // HEAD_BLOCKS
    offs_h = pid % HEAD_BLOCKS * BLOCK_H + tl.arange(0, BLOCK_H)
    valid_h = offs_h < GROUP
    head = kv_head * GROUP + offs_h
    offs_main = tl.arange(0, D_MAIN)
    offs_dv = tl.arange(0, BLOCK_DV)

    end = tl.minimum(tl.maximum(tl.load(lens_ptr + batch), 0), max_keys)
    begin = 0
    first = 0
    if WINDOWED:
        begin = tl.maximum(end - window, 0)
        first = begin // BLOCK_N * BLOCK_N
    if SPLIT:
        tiles = tl.cdiv(tl.cdiv(end - first, num_splits), BLOCK_N)
        keys = tl.maximum(tiles * BLOCK_N, least_keys)
        first += part * keys
        end = tl.minimum(end, first + keys)

    q_ptr += batch.to(tl.int64) * stride_qb
    q_rows = head[:, None].to(tl.int64) * stride_qh
    q_mask = valid_h[:, None] & (offs_main[None, :] < D)
    q = tl.load(q_ptr + q_rows + offs_main[None, :] * stride_qd, mask=q_mask, other=0.0)
    if BLOCK_REST > 0:
        offs_rest = D_MAIN + tl.arange(0, BLOCK_REST)
        valid_rest = offs_rest[None, :] < D
        q_rest = tl.load(q_ptr + q_rows + offs_rest[None, :] * stride_qd, mask=valid_h[:, None] & valid_rest, other=0.0)

    table_ptr += batch.to(tl.int64) * stride_tb
    k_ptr += kv_head.to(tl.int64) * stride_kh
    v_ptr += kv_head.to(tl.int64) * stride_vh
    top = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    if SWAP:
        acc = tl.zeros([BLOCK_DV, BLOCK_H], tl.float32)
    else:
        acc = tl.zeros([BLOCK_H, BLOCK_DV], tl.float32)
    page = load_pages(table_ptr, first, end, PAGE, BLOCK_N)
    for n in range(first, end, BLOCK_N):
        rows = page_rows(page, n, stride_kp, stride_ks, PAGE, BLOCK_N)
        if not SHARED_V:
            v_rows = page_rows(page, n, stride_vp, stride_vs, PAGE, BLOCK_N)
        page = load_pages(table_ptr, n + BLOCK_N, end, PAGE, BLOCK_N)
        key = n + tl.arange(0, BLOCK_N)
        valid = key < end
        if WINDOWED:
            valid = valid & (key >= begin)
        # Slots that count for nothing are read as zeros: 0 times what they hold might be NaN.
        k_mask = valid[:, None]
        if D_MAIN > D:
            k_mask = k_mask & (offs_main[None, :] < D)
        k = tl.load(k_ptr + rows[:, None] + offs_main[None, :] * stride_kd, mask=k_mask, other=0.0)
        if SWAP:
            s = tl.dot(k, q.T, input_precision=PRECISION)
        else:
            s = tl.dot(q, k.T, input_precision=PRECISION)
        if BLOCK_REST > 0:
            k_rest = tl.load(
                k_ptr + rows[:, None] + offs_rest[None, :] * stride_kd, mask=valid[:, None] & valid_rest, other=0.0
            )
            if SWAP:
                s = tl.dot(k_rest, q_rest.T, s, input_precision=PRECISION)
            else:
                s = tl.dot(q_rest, k_rest.T, s, input_precision=PRECISION)
        if SHARED_V:
            v = k
        else:
            v_mask = valid[:, None] & (offs_dv[None, :] < DV)
            v = tl.load(v_ptr + v_rows[:, None] + offs_dv[None, :] * stride_vd, mask=v_mask, other=0.0)
        # Every tile holds a key that counts, so that no maximum is -inf.
        if SWAP:
            s = tl.where(valid[:, None], s * scale_log2, float("-inf"))
            highest = tl.maximum(top, tl.max(s, 0))
            p = tl.exp2(s - highest[None, :])
            shrink = tl.exp2(top - highest)
            total = total * shrink + tl.sum(p, 0)
            acc = tl.dot(v.T, p.to(v.dtype), acc * shrink[None, :], input_precision=PRECISION)
        else:
            s = tl.where(valid[None, :], s * scale_log2, float("-inf"))
            highest = tl.maximum(top, tl.max(s, 1))
            p = tl.exp2(s - highest[:, None])
            shrink = tl.exp2(top - highest)
            total = total * shrink + tl.sum(p, 1)
            acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        top = highest

    # A part without keys: zeros, whose logarithm of sums is -inf, as its maximum.
    total = tl.where(total == 0.0, 1.0, total)
    share = 1.0 / total
    rows_out = batch.to(tl.int64) * (KV_HEADS * GROUP) + head
    if SPLIT:
        rows_out = rows_out * num_splits + part
        tl.store(lse_ptr + rows_out, top + tl.log2(total), mask=valid_h)
    if SWAP:
        acc = acc * share[None, :]
        out = out_ptr + rows_out[None, :] * DV + offs_dv[:, None]
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=valid_h[None, :] & (offs_dv[:, None] < DV))
    else:
        acc = acc * share[:, None]
        out = out_ptr + rows_out[:, None] * DV + offs_dv[None, :]
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=valid_h[:, None] & (offs_dv[None, :] < DV))
