"""The layer in float64, expert by expert: what is right.

Shapes: T tokens, D model, F ffn, E experts, K experts per token, R rows looked at, S rows of one expert.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from moe_kernels import ExpertWeights, Routing

MAX_ROWS = 512
Expert = Callable[[int], tuple[torch.Tensor, torch.Tensor]]
"""`expert(e) -> (w1_2FD, w2_DF)` of any floating dtype; gate rows of w1 first, then up rows."""


def checked_rows(num_tokens: int, seed: int) -> torch.Tensor:
    """The rows that are compared: all of up to 512; beyond, a seeded 512 with the first and the last: int64 `[R]`."""
    if num_tokens <= MAX_ROWS:
        return torch.arange(num_tokens)
    inner = torch.randperm(num_tokens - 2, generator=torch.Generator().manual_seed(seed))[: MAX_ROWS - 2] + 1
    return torch.cat((torch.tensor([0, num_tokens - 1]), inner)).sort().values


def oracle(x_RD: torch.Tensor, routing: Routing, expert: Expert, num_experts: int) -> torch.Tensor:
    """The layer's output for these rows: float64 `[R, D]` on the device of `x_RD`.

    Only experts that a row chose are asked for, one at a time; ids outside `0 .. E-1` add nothing.
    """
    x = x_RD.double()
    out_RD = torch.zeros_like(x)
    ids_RK = routing.topk_ids
    for index in ids_RK.unique().tolist():
        if not 0 <= index < num_experts:
            continue
        row_S, slot_S = torch.where(ids_RK == index)
        w1_2FD, w2_DF = expert(index)
        gate_SF, up_SF = (x[row_S] @ w1_2FD.double().T).chunk(2, dim=-1)
        y_SD = (torch.nn.functional.silu(gate_SF) * up_SF) @ w2_DF.double().T
        out_RD.index_add_(0, row_S, y_SD * routing.topk_weights[row_S, slot_S, None].double())
    return out_RD


def dequantized(weights: ExpertWeights) -> Expert:
    """One expert at a time, with the values that the stored format holds."""

    def expert(index: int) -> tuple[torch.Tensor, torch.Tensor]:
        one = ExpertWeights(weights.w1[index : index + 1], weights.w2[index : index + 1], weights.quant)
        w1_12FD, w2_1DF = one.dequantize()
        return w1_12FD[0], w2_1DF[0]

    return expert
