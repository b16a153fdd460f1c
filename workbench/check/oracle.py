"""The layer in float64, expert by expert: what is right.

Shapes: T tokens, D model, F ffn, E experts, K experts per token, R rows looked at, S rows of one expert.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from moe_kernels import ExpertWeights, Routing

from workbench.check.activations import Rounding

MAX_ROWS = 512
Expert = Callable[[int], tuple[torch.Tensor, torch.Tensor]]
"""`expert(e) -> (w1_2FD, w2_DF)` of any floating dtype; gate rows of w1 first, then up rows."""


def checked_rows(num_tokens: int, seed: int) -> torch.Tensor:
    """The rows that are compared: all of up to 512; beyond, a seeded 512 with the first and the last: int64 `[R]`."""
    if num_tokens <= MAX_ROWS:
        return torch.arange(num_tokens)
    inner = torch.randperm(num_tokens - 2, generator=torch.Generator().manual_seed(seed))[: MAX_ROWS - 2] + 1
    return torch.cat((torch.tensor([0, num_tokens - 1]), inner)).sort().values


def plain_layer(
    x_RD: torch.Tensor,
    routing: Routing,
    expert: Expert,
    num_experts: int,
    roundings: tuple[Rounding, Rounding],
    dtype: torch.dtype,
) -> torch.Tensor:
    """The layer's output for these rows in plain code that computes in `dtype`: `[R, D]`, on the device of `x_RD`.

    Products are rounded to `dtype`, as a matrix product in it is; activation, weighting and sum are float32, or float64
    where `dtype` is. Only experts that a row chose are asked for, one at a time; ids outside `0 .. E-1` add nothing.
    `roundings` are what the scheme does to the inputs and to the intermediate.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    of_x, of_h = roundings
    x = of_x(x_RD).to(dtype)
    out_RD = torch.zeros(x.shape, dtype=wide, device=x.device)
    ids_RK = routing.topk_ids
    for index in ids_RK.unique().tolist():
        if not 0 <= index < num_experts:
            continue
        row_S, slot_S = torch.where(ids_RK == index)
        w1_2FD, w2_DF = (w.to(dtype) for w in expert(index))
        gate_SF, up_SF = (x[row_S] @ w1_2FD.T).to(wide).chunk(2, dim=-1)
        h_SF = of_h((torch.nn.functional.silu(gate_SF) * up_SF).to(dtype)).to(dtype)
        y_SD = (h_SF @ w2_DF.T).to(wide)
        out_RD.index_add_(0, row_S, y_SD * routing.topk_weights[row_S, slot_S, None].to(wide))
    return out_RD.to(dtype)


def oracle(
    x_RD: torch.Tensor,
    routing: Routing,
    expert: Expert,
    num_experts: int,
    roundings: tuple[Rounding, Rounding] = (torch.Tensor.double, torch.Tensor.double),
) -> torch.Tensor:
    """The same in float64, which is what is right: without `roundings`, of the numbers as they are given."""
    return plain_layer(x_RD, routing, expert, num_experts, roundings, torch.float64)


def dequantized(weights: ExpertWeights) -> Expert:
    """One expert at a time, with the values that the stored format holds."""
    return weights.dequantize_expert
