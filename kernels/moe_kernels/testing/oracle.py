"""What is right, and how far from it an implementation may be.

Shapes: T tokens, D model, F ffn, E experts, K experts per token.
"""

from __future__ import annotations

from typing import Any

import torch

from moe_kernels.experts.weights import ExpertWeights
from moe_kernels.formats import Format, format_for
from moe_kernels.quant.fp4 import through_fp4
from moe_kernels.quant.reference import dequantize, quantize_reference
from moe_kernels.types import Routing

SILU_OF_1_TIMES_2 = 1.4621171572600098


def oracle(
    x_TD: torch.Tensor,
    weights: ExpertWeights,
    routing: Routing,
    *,
    router_weight_on_input: bool = False,
    impl: str = "",
) -> torch.Tensor:
    """Return float64 ``[T, D]``: the stored weights and inputs, with no rounding on the way but the format's own.

    Where activations are quantised, they are here: x as given, the intermediate rounded to its dtype first. ``impl``
    ``"triton_fp4"`` has them in FP4 beside nvfp4 and mxfp4.
    """
    return _layer(x_TD, weights, routing, torch.float64, router_weight_on_input, impl)


def _layer(
    x_TD: torch.Tensor, weights: ExpertWeights, routing: Routing, dtype: torch.dtype, on_input: bool, impl: str
) -> torch.Tensor:
    """The layer on dequantised weights and activations with products in ``dtype``; the rest is float32 or wider."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    ids, weight = routing.topk_ids, routing.topk_weights
    chosen = ((ids >= 0) & (ids < weights.num_experts)).any(dim=1)
    form = format_for(weights.quant, impl)
    x = _quantized(x_TD, weights, form, weights.x_scale, chosen).to(dtype)
    hit, activated = [], []
    for expert in torch.unique(ids).tolist():
        if not 0 <= expert < weights.num_experts:
            continue
        token, slot = torch.where(ids == expert)
        w1, w2 = weights.dequantize_expert(expert)
        gate, up = (x[token] @ w1.to(dtype).T).to(wide).chunk(2, dim=-1)
        scale = weight[token, slot, None].to(wide)
        if on_input:
            gate, up, scale = gate * scale, up * scale, torch.ones_like(scale)
        hit.append((token, scale, w2.to(dtype)))
        activated.append(torch.nn.functional.silu(gate) * up)
    out = torch.zeros(x_TD.shape, dtype=wide, device=x_TD.device)
    if hit:
        h = torch.cat(activated)
        if form.activation:
            h = _quantized(h.to(weights.dtype), weights, form, weights.h_scale, None)
        for (token, scale, w2), rows in zip(hit, h.to(dtype).split([len(part) for part in activated]), strict=True):
            out.index_add_(0, token, (rows @ w2.T).to(wide) * scale)
    return out


def _quantized(
    rows: torch.Tensor, weights: ExpertWeights, form: Format, scale: torch.Tensor | None, used_R: torch.Tensor | None
) -> torch.Tensor:
    """What the format leaves of activations; by the specification on every device."""
    if not form.activation:
        return rows
    if form.activation == "fp4":
        return through_fp4(rows, weights.quant)
    q, made = quantize_reference(rows, form.granularity, form.activation, scale, used_R)
    return dequantize(q, made, form.granularity)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """``norm(got - want) / norm(want)`` in float64; infinite where ``got`` is not finite."""
    got, want = got.double(), want.double()
    if not bool(torch.isfinite(got).all()):
        return float("inf")
    return float((got - want).norm() / want.norm().clamp_min(1e-300))


def error_budget(
    x_TD: torch.Tensor,
    weights: ExpertWeights,
    routing: Routing,
    *,
    router_weight_on_input: bool = False,
    impl: str = "",
) -> float:
    """Largest relative error allowed: twice that of plain eager code plus what roundings may do.

    Plain eager code is the layer on the dequantised weights, and activations, with products in the dtype of x. The
    roundings are one of the output, and those of a float32 sum in another order than its own, which grow with the
    square root of its terms. Where the intermediate is quantised, one value of it, half-way between two, may also go
    the other way: by a step of 2^-3 of its size (e4m3), or of about 2^-5 (int8) or the whole (FP4) of the common size.
    """
    plain = _layer(x_TD, weights, routing, x_TD.dtype, router_weight_on_input, impl).to(x_TD.dtype)
    right = oracle(x_TD, weights, routing, router_weight_on_input=router_weight_on_input, impl=impl)
    eager = relative_error(plain, right)
    terms = max(weights.hidden_size, weights.intermediate_size)
    band = torch.finfo(x_TD.dtype).eps / 2 + torch.finfo(torch.float32).eps / 2 * float(terms) ** 0.5
    step = {"fp8": 2.0**-3, "int8": 2.0**-5, "fp4": 1.0}.get(format_for(weights.quant, impl).activation, 0.0)
    band += step / max(1, routing.topk_ids.numel() * weights.intermediate_size) ** 0.5
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
    **options: Any,
) -> tuple[torch.Tensor, ExpertWeights, Routing]:
    """Seeded (x, weights, routing) with outputs of about unit size and every token's experts distinct.

    ``options`` are those of ``ExpertWeights.from_dense``.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    weights = ExpertWeights.from_dense(
        normal(num_experts, 2 * ffn, hidden) / hidden**0.5,
        normal(num_experts, hidden, ffn) / ffn**0.5,
        quant,
        **options,
    )
    x = normal(num_tokens, hidden).to(weights.dtype)
    scores, ids = torch.topk(torch.softmax(normal(num_tokens, num_experts), dim=-1), top_k, dim=-1)
    routing = Routing(scores.to(device), ids.to(torch.int32).to(device))
    return x.to(device), weights.to(device), routing


def tag_value(expert: int) -> int:
    """A value below 98 that tells experts apart, exact in bf16: 1, 38, 75, 15, ..."""
    return 1 + 37 * expert % 97


def tag_problem(
    num_tokens: int, num_experts: int, hidden: int, ffn: int, quant: str = "fp32", device: str = "cpu", **options: Any
) -> tuple[torch.Tensor, ExpertWeights]:
    """(x, weights) whose expert e gives ``SILU_OF_1_TIMES_2 * tag_value(e)`` in every column.

    All of x is 1, gate rows are 1/D, up rows 2/D and w2 of expert e is tag/F, so gate is 1 and up is 2; swapped halves
    would give silu(2) = 1.761594 times the tag. D and F should be powers of two.
    """
    w1 = torch.empty(num_experts, 2 * ffn, hidden)
    w1[:, :ffn], w1[:, ffn:] = 1.0 / hidden, 2.0 / hidden
    tags = torch.tensor([tag_value(expert) for expert in range(num_experts)], dtype=torch.float32)
    w2 = (tags[:, None, None] / ffn).expand(num_experts, hidden, ffn)
    weights = ExpertWeights.from_dense(w1, w2, quant, **options).to(device)
    return torch.ones(num_tokens, hidden, dtype=weights.dtype, device=device), weights


def tag_expected(routing: Routing, num_experts: int) -> torch.Tensor:
    """float64 ``[T]``: what each row of a ``tag_problem`` must hold in every column."""
    ids = routing.topk_ids.long().cpu()
    tags = torch.tensor([float(tag_value(expert)) for expert in range(num_experts)], dtype=torch.float64)
    known = (ids >= 0) & (ids < num_experts)
    value = tags[ids.clamp(0, num_experts - 1)] * routing.topk_weights.double().cpu()
    return SILU_OF_1_TIMES_2 * torch.where(known, value, 0.0).sum(dim=1)


def poison_allocator(device: str, *sizes: int, value: float = float("nan"), dtype: torch.dtype = torch.float32) -> None:
    """Fill blocks of these many bytes with ``value`` and free them, so that ``empty`` memory is dirty."""
    blocks = [torch.full((max(1, size // dtype.itemsize),), value, dtype=dtype, device=device) for size in sizes]
    del blocks
