"""Routings: the model's own out of its gate's logits, and seeded ones of every other kind, alike on every device.

Shapes: T tokens, E experts, K experts per token, C routings.
"""

from __future__ import annotations

import torch
from moe_kernels import Routing, select_experts

from workbench.models.seeding import generator
from workbench.models.shapes import ModelShape
from workbench.modes import RoutingKind


def gated(shape: ModelShape, logits_TE: torch.Tensor, bias_E: torch.Tensor | None) -> Routing:
    """What the model's gate makes of its logits, on their device; `bias_E` exactly where the gate has one.

    Raises:
        ValueError: the bias is missing, or is one too many.
    """
    gate = shape.gate
    if gate.correction_bias != (bias_E is not None):
        raise ValueError(f"the gate of {shape.name} has {'a' if gate.correction_bias else 'no'} correction bias")
    return select_experts(
        logits_TE,
        shape.top_k,
        scoring=gate.scoring,
        renormalize=shape.renormalize,
        correction_bias=None if bias_E is None else bias_E.to(logits_TE.device),
        num_expert_group=gate.num_groups,
        topk_group=gate.topk_group,
        group_score=gate.group_score,
        routed_scaling_factor=shape.routed_scaling_factor,
    )


def synthetic_ids(
    kind: RoutingKind, num_tokens: int, num_experts: int, top_k: int, count: int, zipf_exponent: float, seed: int
) -> list[torch.Tensor]:
    """`count` choices of experts, each int32 `[T, K]` on the CPU, without repeats within a token.

    `balanced`: counts of the experts differ by at most one; `uniform`: every set of K experts is equally likely;
    `zipf`: experts are drawn in turn with weight `1 / rank ** zipf_exponent`, the ranks a permutation that the seed
    fixes for all routings; `single_expert`: all tokens choose the same K experts, and routings that follow one
    another choose others, until all were used.

    Raises:
        ValueError: for `model`, which needs a model.
    """
    sources = [generator(seed, "routing", kind, num_tokens, index) for index in range(count)]
    if kind is RoutingKind.BALANCED:
        chosen = list(_balanced(num_tokens, num_experts, top_k, sources))
    elif kind is RoutingKind.UNIFORM:
        chosen = [torch.rand(num_tokens, num_experts, generator=g).topk(top_k).indices for g in sources]
    elif kind is RoutingKind.ZIPF:
        ranks = torch.randperm(num_experts, generator=generator(seed, "popularity")) + 1
        popularity = ranks.to(torch.float64) ** -zipf_exponent
        chosen = [_weighted(num_tokens, popularity, top_k, g) for g in sources]
    elif kind is RoutingKind.SINGLE_EXPERT:
        g = generator(seed, "routing", kind)
        keys = torch.stack([torch.rand(num_experts, generator=g) for _ in range(_rounds(count, num_experts, top_k))])
        rows = _deal(keys[None], top_k)[0, : count * top_k].view(count, 1, top_k)
        chosen = [row.expand(num_tokens, top_k) for row in rows]
    else:
        raise ValueError("the model's own routing is made by its router")
    return [ids.to(torch.int32).contiguous() for ids in chosen]


def synthetic_weights(num_tokens: int, top_k: int, index: int, seed: int) -> torch.Tensor:
    """Router weights for chosen experts: float32 `[T, K]` on the CPU, positive, falling, each row's sum 1."""
    logits = torch.randn(num_tokens, top_k, generator=generator(seed, "router weights", num_tokens, index))
    return logits.softmax(dim=-1).sort(dim=-1, descending=True).values


def windows(rows: Routing, num_tokens: int, count: int) -> list[Routing]:
    """`count` routings of `num_tokens` each out of the routing of a pool of rows; the first begins at row 0.

    Windows follow one another where the pool is long enough; else they overlap, begun at equal steps. With a pool of
    4 rows, windows of 2: two routings are rows 01, 23; four are rows 01, 12, 23, 30.
    """
    pool = rows.topk_ids.shape[0]
    step = num_tokens if num_tokens * count <= pool else max(1, pool // count)
    starts = [(index * step) % pool for index in range(count)]
    picked = [(torch.arange(num_tokens) + start) % pool for start in starts]
    return [Routing(rows.topk_weights[rows_T], rows.topk_ids[rows_T]) for rows_T in picked]


def _rounds(num_tokens: int, num_experts: int, top_k: int) -> int:
    return -(-num_tokens * top_k // num_experts)


def _deal(keys_CRE: torch.Tensor, top_k: int) -> torch.Tensor:
    """Deal experts in rounds, each round all of them in the order of its keys: `[C, R * E]`.

    Any K slots in a row that begin at a multiple of K hold K different experts.

    Where K does not divide E, a token's slots may straddle two rounds; the experts it already has are dealt last in
    the second. E=5, K=2, rounds 3 0 4 1 2 | 2 1 0 3 4: the third token would get 2 2, so 2 goes last: 3 0 4 1 2 | 1 0
    3 4 2.
    """
    count, rounds, num_experts = keys_CRE.shape
    if num_experts % top_k == 0:
        return keys_CRE.argsort(dim=-1).reshape(count, rounds * num_experts)
    orders: list[torch.Tensor] = []
    for index in range(rounds):
        keys_CE = keys_CRE[:, index].clone()
        held = (index * num_experts) % top_k
        if held:
            last = orders[-1][:, num_experts - held :]
            keys_CE.scatter_(1, last, keys_CE.gather(1, last) + 1.0)
        orders.append(keys_CE.argsort(dim=-1))
    return torch.cat(orders, dim=1)


def _balanced(num_tokens: int, num_experts: int, top_k: int, sources: list[torch.Generator]) -> torch.Tensor:
    """`[C, T, K]`; tokens are shuffled, so that no place in the batch goes with a round."""
    rounds = _rounds(num_tokens, num_experts, top_k)
    keys = torch.stack([torch.rand(rounds, num_experts, generator=g) for g in sources])
    dealt = _deal(keys, top_k)[:, : num_tokens * top_k].view(len(sources), num_tokens, top_k)
    return torch.stack([one[torch.randperm(num_tokens, generator=g)] for one, g in zip(dealt, sources, strict=True)])


def _weighted(num_tokens: int, popularity_E: torch.Tensor, top_k: int, source: torch.Generator) -> torch.Tensor:
    """Draws without replacement: the K smallest of exponential times with rate `popularity` are such draws."""
    times = (
        torch.empty(num_tokens, len(popularity_E), dtype=torch.float64).exponential_(generator=source) / popularity_E
    )
    return times.topk(top_k, largest=False).indices
