"""What is right, and how far from it an implementation may be.

Shapes: T tokens, D model, F ffn, E experts, K experts per token.
"""

from __future__ import annotations

import torch

from moe_kernels.experts.reference import fused_experts_reference
from moe_kernels.experts.weights import ExpertWeights
from moe_kernels.types import Routing

SILU_OF_1_TIMES_2 = 1.4621171572600098


def oracle(x_TD: torch.Tensor, weights: ExpertWeights, routing: Routing) -> torch.Tensor:
    """Return float64 ``[T, D]``: the stored weights and inputs, with no rounding on the way."""
    wide = ExpertWeights(weights.w1.double(), weights.w2.double(), weights.quant)
    x = x_TD.double()
    out = torch.zeros_like(x)
    ids = routing.topk_ids
    for expert in range(weights.num_experts):
        token, slot = torch.where(ids == expert)
        if token.numel():
            gate, up = (x[token] @ wide.w1[expert].T).chunk(2, dim=-1)
            y = (torch.nn.functional.silu(gate) * up) @ wide.w2[expert].T
            out.index_add_(0, token, y * routing.topk_weights[token, slot, None].double())
    return out


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """``norm(got - want) / norm(want)`` in float64; infinite where ``got`` is not finite."""
    got, want = got.double(), want.double()
    if not bool(torch.isfinite(got).all()):
        return float("inf")
    return float((got - want).norm() / want.norm().clamp_min(1e-300))


def error_budget(x_TD: torch.Tensor, weights: ExpertWeights, routing: Routing) -> float:
    """Largest relative error allowed: twice the eager reference's in the same dtype plus what roundings may do.

    Those are one rounding of the output, and the roundings of a float32 sum in another order than the reference's,
    which grow with the square root of its terms.
    """
    eager = relative_error(fused_experts_reference(x_TD, weights, routing), oracle(x_TD, weights, routing))
    terms = max(weights.hidden_size, weights.intermediate_size)
    band = torch.finfo(x_TD.dtype).eps / 2 + torch.finfo(torch.float32).eps / 2 * float(terms) ** 0.5
    return 2.0 * (eager + float(band))


def random_problem(
    num_tokens: int,
    num_experts: int,
    hidden: int,
    ffn: int,
    top_k: int,
    quant: str = "fp32",
    device: str = "cpu",
    seed: int = 0,
) -> tuple[torch.Tensor, ExpertWeights, Routing]:
    """Seeded (x, weights, routing) with outputs of about unit size and every token's experts distinct."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    weights = ExpertWeights.from_dense(
        normal(num_experts, 2 * ffn, hidden) / hidden**0.5, normal(num_experts, hidden, ffn) / ffn**0.5, quant
    )
    x = normal(num_tokens, hidden).to(weights.w1.dtype)
    scores, ids = torch.topk(torch.softmax(normal(num_tokens, num_experts), dim=-1), top_k, dim=-1)
    routing = Routing(scores.to(device), ids.to(torch.int32).to(device))
    return x.to(device), weights.to(device), routing


def tag_value(expert: int) -> int:
    """A value below 98 that tells experts apart, exact in bf16: 1, 38, 75, 15, ..."""
    return 1 + 37 * expert % 97


def tag_problem(
    num_tokens: int, num_experts: int, hidden: int, ffn: int, quant: str = "fp32", device: str = "cpu"
) -> tuple[torch.Tensor, ExpertWeights]:
    """(x, weights) whose expert e gives ``SILU_OF_1_TIMES_2 * tag_value(e)`` in every column.

    All of x is 1, gate rows are 1/D, up rows 2/D and w2 of expert e is tag/F, so gate is 1 and up is 2; swapped halves
    would give silu(2) = 1.761594 times the tag. D and F should be powers of two.
    """
    w1 = torch.empty(num_experts, 2 * ffn, hidden)
    w1[:, :ffn], w1[:, ffn:] = 1.0 / hidden, 2.0 / hidden
    tags = torch.tensor([tag_value(expert) for expert in range(num_experts)], dtype=torch.float32)
    w2 = (tags[:, None, None] / ffn).expand(num_experts, hidden, ffn)
    weights = ExpertWeights.from_dense(w1, w2, quant).to(device)
    return torch.ones(num_tokens, hidden, dtype=weights.w1.dtype, device=device), weights


def tag_expected(routing: Routing, num_experts: int) -> torch.Tensor:
    """float64 ``[T]``: what each row of a ``tag_problem`` must hold in every column."""
    ids = routing.topk_ids.long().cpu()
    tags = torch.tensor([float(tag_value(expert)) for expert in range(num_experts)], dtype=torch.float64)
    known = (ids >= 0) & (ids < num_experts)
    value = tags[ids.clamp(0, num_experts - 1)] * routing.topk_weights.double().cpu()
    return SILU_OF_1_TIMES_2 * torch.where(known, value, 0.0).sum(dim=1)


def poison_allocator(device: str, *sizes: int, value: float = float("nan")) -> None:
    """Fill blocks of these many bytes with ``value`` and free them, so that ``empty`` memory is dirty."""
    blocks = [torch.full((max(1, size // 4),), value, dtype=torch.float32, device=device) for size in sizes]
    del blocks
