"""select_experts against a plain Python gate in double precision, on sizes and logits drawn at random."""

import itertools
import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from moe_kernels import select_experts

CLOSE = 1e-5  # relative; float32 may rank two numbers that are closer either way


def gate(row, top_k, scoring, renormalize, bias, groups, kept, group_score, scaling):
    """Ids, weights, and whether a choice was too close for float32, by the definition and nothing else."""
    if scoring == "softmax":
        top = max(row)
        total = math.fsum(math.exp(v - top) for v in row)
        score = [math.exp(v - top) / total for v in row]
    else:
        score = [1 / (1 + math.exp(-v)) for v in row]
    choice = [s + b for s, b in zip(score, bias, strict=True)]
    alike = list(zip(row, bias, strict=True))  # experts with the same of both are equal, not close
    size = len(row) // groups
    parts = [range(g * size, (g + 1) * size) for g in range(groups)]
    best = [sorted((choice[e] for e in part), reverse=True)[: 1 if group_score == "max" else 2] for part in parts]
    of_group = [math.fsum(b) for b in best]
    stay = sorted(range(groups), key=lambda g: -of_group[g])[:kept]
    close = kept < groups and any(
        near(of_group[g], of_group[h]) and best[g] != best[h] for g in stay for h in range(groups) if h not in stay
    )
    inside = [e for g in sorted(stay) for e in parts[g]]
    order = sorted(inside, key=lambda e: -choice[e])
    compared = itertools.pairwise(order[: top_k + 1])
    close |= any(bias) and any(near(choice[a], choice[b]) and alike[a] != alike[b] for a, b in compared)
    ids = order[:top_k]
    total = math.fsum(score[e] for e in ids) if renormalize else 1.0
    return ids, [score[e] / total * scaling for e in ids], close


def near(a, b):
    return abs(a - b) <= CLOSE * max(abs(a), abs(b))


@settings(max_examples=150, deadline=None)
@given(
    groups=st.integers(1, 9),
    size=st.integers(1, 40),
    step=st.sampled_from([0.0, 0.25, 2.0]),
    spread=st.sampled_from([0.1, 1.0, 6.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 2**31),
    data=st.data(),
)
def test_is_the_gate_by_definition(groups, size, step, spread, dtype, seed, data):
    kept = data.draw(st.integers(1, groups))
    top_k = data.draw(st.integers(1, min(24, kept * size)))
    scoring = data.draw(st.sampled_from(["softmax", "sigmoid"]))
    group_score = data.draw(st.sampled_from(["max", "top2_sum"]))
    renormalize, biased = data.draw(st.booleans()), data.draw(st.booleans())
    scaling = data.draw(st.sampled_from([1.0, 2.5, 16.0]))
    generator = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(3, groups * size, generator=generator)
    bias = 0.3 * torch.randn(groups * size, generator=generator)
    if step:  # equal logits and biases are then common
        logits, bias = (logits / step).round() * step, (bias / 0.25).round() * 0.25
    logits = logits.to(dtype)
    routing = select_experts(
        logits, top_k, scoring=scoring, renormalize=renormalize, correction_bias=bias if biased else None,
        num_expert_group=groups, topk_group=kept, group_score=group_score, routed_scaling_factor=scaling,
    )  # fmt: skip
    plain = bias.tolist() if biased else [0.0] * len(bias)
    for row, ids, weights in zip(
        logits.tolist(), routing.topk_ids.tolist(), routing.topk_weights.tolist(), strict=True
    ):
        wanted, expected, close = gate(row, top_k, scoring, renormalize, plain, groups, kept, group_score, scaling)
        assume(not close)
        assert ids == wanted
        assert weights == pytest.approx(expected, rel=2e-5)


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.floats(width=32), min_size=1, max_size=40),
    scoring=st.sampled_from(["softmax", "sigmoid"]),
    biased=st.booleans(),
    data=st.data(),
)
def test_ids_are_different_and_in_range_for_any_floats(values, scoring, biased, data):
    top_k = data.draw(st.integers(1, len(values)))
    bias = torch.tensor(values).flip(0) if biased else None
    (ids,) = select_experts(torch.tensor([values]), top_k, scoring=scoring, correction_bias=bias).topk_ids.tolist()
    assert len(set(ids)) == top_k
    assert set(ids) <= set(range(len(values)))


@settings(max_examples=40, deadline=None)
@given(num_tokens=st.integers(1, 9), num_experts=st.integers(1, 70), seed=st.integers(0, 2**31), data=st.data())
def test_a_token_does_not_depend_on_the_others(num_tokens, num_experts, seed, data):
    top_k = data.draw(st.integers(1, num_experts))
    logits = torch.randn(num_tokens, num_experts, generator=torch.Generator().manual_seed(seed))
    whole = select_experts(logits, top_k, renormalize=True)
    for token in range(num_tokens):
        alone = select_experts(logits[token : token + 1], top_k, renormalize=True)
        assert torch.equal(alone.topk_ids[0], whole.topk_ids[token])
        torch.testing.assert_close(alone.topk_weights[0], whole.topk_weights[token])
