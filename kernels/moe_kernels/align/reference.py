"""Token alignment in plain PyTorch: the specification.

Shapes: N routed rows (T*K), E experts, B blocks of block_m rows.
"""

from __future__ import annotations

import torch


def max_blocks(num_rows: int, num_experts: int, block_m: int) -> int:
    """Most blocks that ``num_rows`` can need: each expert hit wastes at most ``block_m - 1`` rows.

    Example: 5 rows, 3 experts, blocks of 4 -> (5 + 3*3) // 4 = 3 (counts 2, 2, 1 need a block each).
    """
    hit = torch.sym_min(num_rows, num_experts)
    blocks: int = (num_rows + hit * (block_m - 1)) // block_m
    return blocks


def align_reference(
    topk_ids: torch.Tensor, num_experts: int, block_m: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (sorted_rows, block_experts, num_padded) for ``moe_align``; no host synchronisation."""
    ids_N = topk_ids.reshape(-1).to(torch.int64)
    num_rows, device = ids_N.numel(), ids_N.device
    num_blocks = max_blocks(num_rows, num_experts, block_m)
    dropped_N = (ids_N < 0) | (ids_N >= num_experts)
    ids_N = torch.where(dropped_N, num_experts, ids_N)
    counts_E = torch.zeros(num_experts + 1, dtype=torch.int64, device=device).scatter_add_(
        0, ids_N, torch.ones_like(ids_N)
    )[:num_experts]
    blocks_E = (counts_E + block_m - 1) // block_m
    block_end_E = blocks_E.cumsum(0)
    first_slot_E = (block_end_E - blocks_E) * block_m

    order_N = torch.argsort(ids_N, stable=True)
    sorted_ids_N = ids_N[order_N]
    first_rank_E = counts_E.cumsum(0) - counts_E
    expert_N = sorted_ids_N.clamp_max(num_experts - 1)
    slot_N = first_slot_E[expert_N] + torch.arange(num_rows, device=device) - first_rank_E[expert_N]
    # Dropped rows land in one spare slot past the end, which is cut off.
    slot_N = torch.where(sorted_ids_N < num_experts, slot_N, num_blocks * block_m)
    sorted_rows = torch.full((num_blocks * block_m + 1,), num_rows, dtype=torch.int64, device=device)
    sorted_rows = sorted_rows.scatter(0, slot_N, order_N)[:-1]

    block_B = torch.arange(num_blocks, device=device)
    block_experts = torch.searchsorted(block_end_E, block_B, right=True)
    block_experts = torch.where(block_experts < num_experts, block_experts, -1)
    num_padded = blocks_E.sum().reshape(1) * block_m
    return sorted_rows.to(torch.int32), block_experts.to(torch.int32), num_padded.to(torch.int32)
