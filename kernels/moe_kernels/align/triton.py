"""Token alignment in Triton: one kernel up to a few thousand rows, two beyond.

Order within an expert is kept, and there are no atomics on global memory, so that results repeat.

Each expert has its own program, which finds where its rows start from the counts of the experts before it and then
writes its rows in order. Up to ``ONE_PASS_ROWS`` rows every program counts for itself; beyond, the rows are cut into
segments, counted by a first kernel.

Shapes: N routed rows, E experts, EP a power of two above E (the spare bin takes dropped ids), S segments.
"""

# Triton gives its decorator and its device functions no types.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from moe_kernels.align.reference import max_blocks

ONE_PASS_ROWS = 4096
_MAX_SEGMENTS = 16
_CHUNK = 1024
_INT32_MAX = 2**31 - 1


@triton.jit(do_not_specialize=["num_rows"])
def count_kernel(ids_ptr, counts_ptr, num_rows, segment_rows, E: tl.constexpr, EP: tl.constexpr, CHUNK: tl.constexpr):
    """Write ``counts[s, :]``, the histogram of segment s."""
    segment = tl.program_id(0)
    start = segment * segment_rows
    end = tl.minimum(start + segment_rows, num_rows)
    counts = tl.zeros([EP], dtype=tl.int32)
    for first in range(start, end, CHUNK):
        row = first + tl.arange(0, CHUNK)
        ids = tl.load(ids_ptr + row, mask=row < end, other=E)
        ids = tl.where((ids >= 0) & (ids < E), ids, E)
        counts += tl.histogram(ids, EP)
    tl.store(counts_ptr + segment * EP + tl.arange(0, EP), counts)


@triton.jit(do_not_specialize=["num_rows", "num_blocks"])
def scatter_kernel(
    ids_ptr, counts_ptr, sorted_rows_ptr, block_experts_ptr, num_padded_ptr,
    num_rows, segment_rows, num_blocks, segments,
    E: tl.constexpr, EP: tl.constexpr, SP: tl.constexpr, BLOCK_M: tl.constexpr, CHUNK: tl.constexpr,
    COUNTED: tl.constexpr,
):  # fmt: skip
    """Program (e, s) writes the rows of expert e that lie in segment s; the last segment also pads."""
    expert = tl.program_id(0)
    segment = tl.program_id(1)
    bins = tl.arange(0, EP)
    if COUNTED:
        table_row = tl.arange(0, SP)[:, None]
        table = tl.load(counts_ptr + table_row * EP + bins[None, :], mask=table_row < segments, other=0)
        counts = tl.sum(table, axis=0)
        before = tl.sum(tl.where((table_row < segment) & (bins[None, :] == expert), table, 0))
    else:
        counts = tl.zeros([EP], dtype=tl.int32)
        for first in range(0, num_rows, CHUNK):
            row = first + tl.arange(0, CHUNK)
            ids = tl.load(ids_ptr + row, mask=row < num_rows, other=E)
            ids = tl.where((ids >= 0) & (ids < E), ids, E)
            counts += tl.histogram(ids, EP)
        before = 0
    blocks = tl.where(bins < E, (counts + BLOCK_M - 1) // BLOCK_M, 0)
    total_blocks = tl.sum(blocks)
    first_block = tl.sum(tl.where(bins < expert, blocks, 0))
    own_blocks = tl.sum(tl.where(bins == expert, blocks, 0))
    own_rows = tl.sum(tl.where(bins == expert, counts, 0))

    slot = first_block * BLOCK_M + before
    start = segment * segment_rows
    end = tl.minimum(start + segment_rows, num_rows)
    for first in range(start, end, CHUNK):
        row = first + tl.arange(0, CHUNK)
        hit = (tl.load(ids_ptr + row, mask=row < end, other=-1) == expert).to(tl.int32)
        rank = tl.cumsum(hit, 0) - 1
        tl.store(sorted_rows_ptr + slot + rank, row, mask=hit != 0)
        slot += tl.sum(hit)

    if segment == segments - 1:
        pad = own_rows + tl.arange(0, BLOCK_M)
        tl.store(sorted_rows_ptr + first_block * BLOCK_M + pad, num_rows + pad * 0, mask=pad < own_blocks * BLOCK_M)
        for first in range(0, own_blocks, CHUNK):
            block = first + tl.arange(0, CHUNK)
            tl.store(block_experts_ptr + first_block + block, expert + block * 0, mask=block < own_blocks)
        # The unused tail is shared out among the programs.
        for first in range(total_blocks * BLOCK_M + expert * CHUNK, num_blocks * BLOCK_M, E * CHUNK):
            tail = first + tl.arange(0, CHUNK)
            tl.store(sorted_rows_ptr + tail, num_rows + tail * 0, mask=tail < num_blocks * BLOCK_M)
        for first in range(total_blocks + expert * CHUNK, num_blocks, E * CHUNK):
            block = first + tl.arange(0, CHUNK)
            tl.store(block_experts_ptr + block, block * 0 - 1, mask=block < num_blocks)
        if expert == 0:
            tl.store(num_padded_ptr, total_blocks * BLOCK_M)


def launch_align(
    topk_ids: torch.Tensor, num_experts: int, block_m: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (sorted_rows, block_experts, num_padded) as ``moe_align`` describes them."""
    ids = topk_ids.contiguous()
    num_rows = ids.numel()
    num_blocks = max_blocks(num_rows, num_experts, block_m)
    if num_blocks * block_m > _INT32_MAX:
        raise ValueError(
            f"{num_rows} routed rows need {num_blocks * block_m} slots; at most {_INT32_MAX} fit in int32."
        )
    sorted_rows = ids.new_empty(num_blocks * block_m)
    block_experts = ids.new_empty(num_blocks)
    if num_rows == 0:
        return sorted_rows, block_experts, ids.new_zeros(1)
    num_padded = ids.new_empty(1)
    # At least 128 bins, so that four warps each own some.
    bins = max(128, triton.next_power_of_2(num_experts + 1))
    counted = num_rows > ONE_PASS_ROWS
    segment_rows, segments, counts = num_rows, 1, ids
    if counted:
        segment_rows = max(ONE_PASS_ROWS, triton.cdiv(num_rows, _MAX_SEGMENTS))
        segments = triton.cdiv(num_rows, segment_rows)
        counts = ids.new_empty(segments * bins)
        count_kernel[(segments,)](
            ids, counts, num_rows, segment_rows, E=num_experts, EP=bins, CHUNK=_CHUNK, num_warps=4
        )
    chunk = min(_CHUNK, max(128, triton.next_power_of_2(num_rows)))
    scatter_kernel[(num_experts, segments)](
        ids, counts, sorted_rows, block_experts, num_padded, num_rows, segment_rows, num_blocks, segments,
        E=num_experts, EP=bins, SP=triton.next_power_of_2(segments), BLOCK_M=block_m, CHUNK=chunk, COUNTED=counted,
        num_warps=4,
    )  # fmt: skip
    return sorted_rows, block_experts, num_padded
