"""Prefill attention in Triton: sequences of any lengths, a paged prefix, causal and windowed.

A program takes a block of rows of one sequence: queries times the heads of a group that PACK puts side by side, so
that a group's heads share the keys they read. It walks the prefix by its pages, then the new keys: whole tiles that all
rows see without a mask, the rest with one.

Shapes: B sequences, S new tokens, GROUP query heads to a head of keys, D and DV head sizes, M rows and N keys of a
tile.
"""

# Triton gives its decorator and its device functions no types.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

from moe_kernels.attention.triton_decode import load_pages, page_rows


@triton.jit
def find_block(cu_ptr, pid, batch, rows, TOKENS: tl.constexpr, BATCH_P2: tl.constexpr):
    """(sequence, its first row, its end, first token of the block within it) of block ``pid``.

    Sequence b has the blocks from ``cu[b] // TOKENS + b`` on, which are enough for it and start no earlier than those
    of the sequence before it end. What follows the last sequence counts as sequence ``batch``.

    Example: cu = [0, 5, 12], 14 rows, blocks of 4 tokens: sequences 0 and 1 start at blocks 0 and 2, the rest at
    12 // 4 + 2 = 5; blocks 0, 1 hold tokens 0 and 4 of sequence 0, blocks 2, 3 those 0 and 4 of sequence 1, block 4
    nothing, block 5 token 0 of the rest.
    """
    index = tl.arange(0, BATCH_P2)
    cu = tl.load(cu_ptr + index, mask=index <= batch, other=0)
    started = (index <= batch) & (cu // TOKENS + index <= pid)
    sequence = tl.sum(started.to(tl.int32), 0) - 1
    start = tl.minimum(tl.maximum(tl.load(cu_ptr + sequence), 0), rows)
    end = rows
    if sequence < batch:
        end = tl.minimum(tl.load(cu_ptr + sequence + 1), rows)
    token = (pid - (start // TOKENS + sequence)) * TOKENS
    return sequence, start, end, token


@triton.jit
def load_tile(
    ptr, rows, stride, valid,
    COLUMN: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """BLOCK columns from COLUMN on of rows at offsets ``rows``; zero past COLUMNS and, with MASKED, where not valid."""
    offs = COLUMN + tl.arange(0, BLOCK)
    ptrs = ptr + rows[:, None] + offs[None, :] * stride
    if MASKED and COLUMN + BLOCK > COLUMNS:
        tile = tl.load(ptrs, mask=valid[:, None] & (offs[None, :] < COLUMNS), other=0.0)
    elif MASKED:
        tile = tl.load(ptrs, mask=valid[:, None], other=0.0)
    elif COLUMN + BLOCK > COLUMNS:
        tile = tl.load(ptrs, mask=offs[None, :] < COLUMNS, other=0.0)
    else:
        tile = tl.load(ptrs)
    return tile


@triton.jit
def attend_tile(
    q, q_rest, acc, top, total, k_ptr, v_ptr, k_rows, v_rows, stride_kd, stride_vd, valid, seen, scale_log2,
    D: tl.constexpr, DV: tl.constexpr, D_MAIN: tl.constexpr, BLOCK_REST: tl.constexpr, BLOCK_DV: tl.constexpr,
    SHARED_V: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """(acc, top, total) with one more tile; with MASKED rows see the keys that ``seen`` says, all of them valid."""
    k = load_tile(k_ptr, k_rows, stride_kd, valid, 0, D_MAIN, D, MASKED)
    s = tl.dot(q, k.T, input_precision=PRECISION)
    if BLOCK_REST > 0:
        k_rest = load_tile(k_ptr, k_rows, stride_kd, valid, D_MAIN, BLOCK_REST, D, MASKED)
        s = tl.dot(q_rest, k_rest.T, s, input_precision=PRECISION)
    s = s * scale_log2
    if MASKED:
        s = tl.where(seen, s, float("-inf"))
    highest = tl.maximum(top, tl.max(s, 1))
    base = highest
    if MASKED:
        # A row may have seen nothing yet.
        base = tl.where(highest == float("-inf"), 0.0, highest)
    p = tl.exp2(s - base[:, None])
    shrink = tl.exp2(top - base)
    total = total * shrink + tl.sum(p, 1)
    if SHARED_V:
        v = k
    else:
        v = load_tile(v_ptr, v_rows, stride_vd, valid, 0, BLOCK_DV, DV, MASKED)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return acc, highest, total


@triton.jit(do_not_specialize=["rows", "batch", "blocks", "window", "max_prefix", "stride_tb"])
def prefill_kernel(
    q_ptr, k_ptr, v_ptr, cu_ptr, pk_ptr, pv_ptr, table_ptr, prefix_ptr, out_ptr,
    scale_log2, window, rows, batch, blocks, max_prefix,
    stride_qs, stride_qh, stride_qd, stride_ks, stride_kh, stride_kd, stride_vs, stride_vh, stride_vd,
    stride_pkp, stride_pks, stride_pkh, stride_pkd, stride_pvp, stride_pvs, stride_pvh, stride_pvd, stride_tb,
    BATCH_P2: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PACK: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, D_MAIN: tl.constexpr, BLOCK_REST: tl.constexpr, BLOCK_DV: tl.constexpr,
    SHARED_V: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write ``out[s, h]`` for all rows, zeros for those of no sequence. PAGE is 0 where there is no prefix."""
    TOKENS: tl.constexpr = BLOCK_M // PACK
    PACKS: tl.constexpr = (GROUP + PACK - 1) // PACK
    pid = tl.program_id(0)
    kv_head = pid % (KV_HEADS * PACKS) // PACKS
    # Later blocks see more keys when causal: they start first.
    block = blocks - 1 - pid // (KV_HEADS * PACKS)
    sequence, start, end, token = find_block(cu_ptr, block, batch, rows, TOKENS, BATCH_P2)
    length = end - start
    if token >= length:
        return
    offs_m = tl.arange(0, BLOCK_M)
    offs_dv = tl.arange(0, BLOCK_DV)
    query = token + offs_m // PACK
    offs_h = pid % PACKS * PACK + offs_m % PACK
    valid_m = (query < length) & (offs_h < GROUP) & (offs_m < TOKENS * PACK)
    row = start + query.to(tl.int64)
    head = kv_head * GROUP + offs_h
    out_mask = valid_m[:, None] & (offs_dv[None, :] < DV)
    if sequence == batch:
        out = out_ptr + (row * (KV_HEADS * GROUP) + head)[:, None] * DV + offs_dv[None, :]
        tl.store(out, tl.zeros([BLOCK_M, BLOCK_DV], out_ptr.dtype.element_ty), mask=out_mask)
        return

    q_rows = row * stride_qs + head.to(tl.int64) * stride_qh
    q = load_tile(q_ptr, q_rows, stride_qd, valid_m, 0, D_MAIN, D, True)
    q_rest = q
    if BLOCK_REST > 0:
        q_rest = load_tile(q_ptr, q_rows, stride_qd, valid_m, D_MAIN, BLOCK_REST, D, True)
    k_ptr += start.to(tl.int64) * stride_ks + kv_head.to(tl.int64) * stride_kh
    v_ptr += start.to(tl.int64) * stride_vs + kv_head.to(tl.int64) * stride_vh
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)

    # Positions and keys are counted from the first new token; the prefix lies below 0.
    lowest = 0
    if PAGE > 0:
        prefix = tl.minimum(tl.maximum(tl.load(prefix_ptr + sequence), 0), max_prefix)
        table_ptr += sequence.to(tl.int64) * stride_tb
        pk_ptr += kv_head.to(tl.int64) * stride_pkh
        pv_ptr += kv_head.to(tl.int64) * stride_pvh
        if WINDOWED:
            lowest = tl.maximum(prefix + token - window + 1, 0) // BLOCK_N * BLOCK_N
        page = load_pages(table_ptr, lowest, prefix, PAGE, BLOCK_N)
        for n in range(lowest, prefix, BLOCK_N):
            pk_rows = page_rows(page, n, stride_pkp, stride_pks, PAGE, BLOCK_N)
            pv_rows = page_rows(page, n, stride_pvp, stride_pvs, PAGE, BLOCK_N)
            page = load_pages(table_ptr, n + BLOCK_N, prefix, PAGE, BLOCK_N)
            key = n + tl.arange(0, BLOCK_N)
            valid = key < prefix
            if WINDOWED:
                # Pages that no row sees may have been given away.
                valid = valid & (key > prefix + token - window)
            seen = valid[None, :]
            if WINDOWED:
                seen = seen & (key[None, :] > prefix + query[:, None] - window)
            acc, top, total = attend_tile(
                q, q_rest, acc, top, total, pk_ptr, pv_ptr, pk_rows, pv_rows, stride_pkd, stride_pvd, valid, seen,
                scale_log2, D, DV, D_MAIN, BLOCK_REST, BLOCK_DV, SHARED_V, True, PRECISION,
            )  # fmt: skip

    slot = tl.arange(0, BLOCK_N).to(tl.int64)
    k_rows = slot * stride_ks
    v_rows = slot * stride_vs
    last = length
    whole = length // BLOCK_N * BLOCK_N
    if CAUSAL:
        last = tl.minimum(length, token + TOKENS)
        whole = (token + 1) // BLOCK_N * BLOCK_N
    if WINDOWED:
        whole = tl.maximum(token - window + 1, 0) // BLOCK_N * BLOCK_N
    else:
        for n in range(0, whole, BLOCK_N):
            first = tl.cast(n, tl.int64)
            acc, top, total = attend_tile(
                q, q_rest, acc, top, total, k_ptr + first * stride_ks, v_ptr + first * stride_vs, k_rows, v_rows,
                stride_kd, stride_vd, k_rows, k_rows,
                scale_log2, D, DV, D_MAIN, BLOCK_REST, BLOCK_DV, SHARED_V, False, PRECISION,
            )  # fmt: skip
    for n in range(whole, last, BLOCK_N):
        first = tl.cast(n, tl.int64)
        key = n + tl.arange(0, BLOCK_N)
        valid = key < last
        seen = valid[None, :]
        if CAUSAL:
            seen = seen & (key[None, :] <= query[:, None])
        if WINDOWED:
            seen = seen & (key[None, :] > query[:, None] - window)
        acc, top, total = attend_tile(
            q, q_rest, acc, top, total, k_ptr + first * stride_ks, v_ptr + first * stride_vs, k_rows, v_rows,
            stride_kd, stride_vd, valid, seen,
            scale_log2, D, DV, D_MAIN, BLOCK_REST, BLOCK_DV, SHARED_V, True, PRECISION,
        )  # fmt: skip
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    out = out_ptr + (row * (KV_HEADS * GROUP) + head)[:, None] * DV + offs_dv[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=out_mask)
