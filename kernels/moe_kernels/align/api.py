"""Public token alignment.

Shapes: T tokens, K experts per token, N = T*K routed rows, E experts, B blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from moe_kernels.align import ops


class Alignment(NamedTuple):
    """Routed rows sorted by expert, each expert padded to whole blocks.

    Attributes:
        sorted_rows: int32 ``[B * block_m]``; routed rows ``t*K + k`` by expert, ``N`` where a slot is padding.
        block_experts: int32 ``[B]``; the expert of each block in use, -1 for blocks past ``num_padded``.
        num_padded: int32 ``[1]``; number of slots in use, a multiple of ``block_m``.
    """

    sorted_rows: torch.Tensor
    block_experts: torch.Tensor
    num_padded: torch.Tensor


def moe_align(topk_ids_TK: torch.Tensor, num_experts: int, block_m: int) -> Alignment:
    """Sort routed rows by expert and pad each expert's rows to a multiple of ``block_m``.

    Rows of one expert keep their order. Ids below 0 or not below ``num_experts`` are dropped. Sizes depend on shapes
    only, so that the call can be captured in a CUDA graph: B is the most blocks that N rows can need.

    Example: ``topk_ids = [[2, 0], [2, 7], [0, 2]]``, 3 experts, blocks of 2. Rows 0..5 go to experts 2, 0, 2,
    (dropped), 0, 2; at most ``(6 + 3*1) // 2 = 4`` blocks:

        sorted_rows   = [1, 4,  0, 2,  5, 6,  6, 6]    6 = N is padding
        block_experts = [0,     2,     2,     -1]
        num_padded    = [6]

    Args:
        topk_ids_TK: int32 ``[T, K]``; T may be 0.
        num_experts: E >= 1.
        block_m: rows per block, a power of two.

    Raises:
        ValueError: wrong dtype or shape, ``num_experts`` below 1, ``block_m`` not a power of two, more slots than
            int32 counts.

    Source: the block layout of vLLM's and SGLang's ``moe_align_block_size``.
    """
    if topk_ids_TK.dim() != 2 or topk_ids_TK.dtype != torch.int32:
        raise ValueError(f"topk_ids_TK must be int32 [T, K]; got {topk_ids_TK.dtype} {list(topk_ids_TK.shape)}.")
    if num_experts < 1:
        raise ValueError(f"num_experts must be at least 1; got {num_experts}.")
    if block_m < 1 or block_m & (block_m - 1):
        raise ValueError(f"block_m must be a power of two; got {block_m}.")
    return Alignment(*ops.moe_align(topk_ids_TK, num_experts, block_m))
