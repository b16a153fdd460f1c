"""The Triton gate and preparation against their specification, and against numbers worked out by hand.

test_routing_interpreted.py runs this file in a process that interprets Triton; test_routing_gpu.py in one that does
not.
"""

import math
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_kernels import Routing, select_experts
from moe_kernels.routing import triton as kernels
from moe_kernels.routing.prepare import prepare_routing
from moe_kernels.routing.reference import prepare_reference

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
LN = [math.log(v) for v in (1.0, 2.0, 3.0, 4.0)]
V3 = {"scoring": "sigmoid", "num_expert_group": 8, "topk_group": 4, "renormalize": True, "routed_scaling_factor": 2.5}
V2 = {"num_expert_group": 8, "topk_group": 3, "group_score": "max", "routed_scaling_factor": 16.0}
PLAIN = {
    f"{scoring}-{'norm' if norm else 'plain'}": {"scoring": scoring, "renormalize": norm}
    for scoring in ("softmax", "sigmoid")
    for norm in (False, True)
}
# numpy, which interprets, tells of infinity minus infinity; the GPU does not.
not_finite = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def gate(logits, top_k, **kinds):
    kinds = {name: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for name, v in kinds.items()}
    routing = select_experts(logits.to(DEVICE), top_k, impl="triton", **kinds)
    assert (routing.topk_weights.dtype, routing.topk_ids.dtype) == (torch.float32, torch.int32)
    assert routing.topk_weights.shape == routing.topk_ids.shape == (logits.shape[0], top_k)
    return Routing(routing.topk_weights.cpu(), routing.topk_ids.cpu())


def check(logits, top_k, **kinds):
    got, want = gate(logits, top_k, **kinds), select_experts(logits, top_k, impl="reference", **kinds)
    assert torch.equal(got.topk_ids, want.topk_ids)
    torch.testing.assert_close(got.topk_weights, want.topk_weights, rtol=1e-5, atol=1e-30, equal_nan=True)
    return got


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", PLAIN)
@pytest.mark.parametrize(("num_experts", "top_k"), [
    (1, 1), (2, 2), (5, 3), (8, 8), (16, 1), (32, 5), (48, 7), (60, 6), (64, 6), (96, 11), (128, 8), (192, 16),
    (256, 8), (513, 22), (1024, 3),
])  # fmt: skip
def test_odd_shapes(num_experts, top_k, kind):
    check(randn(3, num_experts, seed=num_experts + top_k), top_k, **PLAIN[kind])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_logits_of_other_dtypes_are_scored_in_float32(dtype):
    logits = randn(6, 60).to(dtype)
    got, want = check(logits, 6, renormalize=True), check(logits.float(), 6, renormalize=True)
    assert torch.equal(got.topk_ids, want.topk_ids)
    assert torch.equal(got.topk_weights, want.topk_weights)


@pytest.mark.parametrize("num_tokens", [1, 7, 600])
@pytest.mark.parametrize("num_experts", [8, 48])
def test_tokens_past_the_last_block_are_left_alone(num_experts, num_tokens):
    check(randn(num_tokens, num_experts), 2, renormalize=True)


def test_renormalising_is_honoured_both_ways():
    plain, normed = gate(torch.tensor([LN]), 2), gate(torch.tensor([LN]), 2, renormalize=True)
    assert plain.topk_ids.tolist() == normed.topk_ids.tolist() == [[3, 2]]
    torch.testing.assert_close(plain.topk_weights, torch.tensor([[0.4, 0.3]]))
    torch.testing.assert_close(normed.topk_weights, torch.tensor([[0.571429, 0.428571]]), atol=1e-6, rtol=0)
    sigmoids = torch.tensor([[0.8, 0.75]])  # of ln 4 and ln 3
    torch.testing.assert_close(gate(torch.tensor([LN]), 2, scoring="sigmoid").topk_weights, sigmoids)
    normed = gate(torch.tensor([LN]), 2, scoring="sigmoid", renormalize=True)
    torch.testing.assert_close(normed.topk_weights, sigmoids / 1.55)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 7])
def test_top_1(num_tokens, dtype):
    zeros = torch.zeros(num_tokens, 5, dtype=dtype)
    half = gate(zeros, 1, scoring="sigmoid")
    assert bool((half.topk_weights == 0.5).all())
    assert bool((half.topk_ids == 0).all())
    for scoring in ("softmax", "sigmoid"):
        for logits in (zeros, (randn(num_tokens, 5) * 8 - 20).to(dtype)):
            assert bool((gate(logits, 1, scoring=scoring, renormalize=True).topk_weights == 1.0).all())


def test_the_bias_steers_the_choice_and_never_the_weights():
    logits, bias = torch.tensor([[0.0, 1.0, 3.0, 3.0]]), torch.tensor([5.0, 5.0, 0.0, 0.0])
    routing = gate(logits, 2, scoring="sigmoid", correction_bias=bias, renormalize=True)
    assert routing.topk_ids.tolist() == [[1, 0]]
    torch.testing.assert_close(routing.topk_weights, torch.tensor([[0.593845, 0.406155]]), atol=1e-6, rtol=0)


def test_groups_are_ranked_by_the_sum_of_their_two_best_or_by_their_best():
    logits = torch.tensor([[2.19722, -2.19722, 0.405465, 0.405465]])
    kinds = {"scoring": "sigmoid", "num_expert_group": 2, "topk_group": 1, "renormalize": True}
    for bias in (None, torch.zeros(4)):
        by_sum = gate(logits, 2, correction_bias=bias, **kinds)
        assert by_sum.topk_ids.tolist() == [[2, 3]]
        assert by_sum.topk_weights.tolist() == [[0.5, 0.5]]
        by_best = gate(logits, 2, correction_bias=bias, group_score="max", **kinds)
        assert by_best.topk_ids.tolist() == [[0, 1]]
        torch.testing.assert_close(by_best.topk_weights, torch.tensor([[0.9, 0.1]]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("groups", [1, 6])
@pytest.mark.parametrize("group_score", ["top2_sum", "max"])
def test_keeping_every_group_equals_no_groups(group_score, groups):
    logits, bias = randn(7, 60, seed=groups), randn(60, seed=3)
    kinds = {"scoring": "sigmoid", "correction_bias": bias}
    plain = check(logits, 6, **kinds)
    grouped = check(logits, 6, num_expert_group=groups, topk_group=groups, group_score=group_score, **kinds)
    assert torch.equal(plain.topk_ids, grouped.topk_ids)
    assert torch.equal(plain.topk_weights, grouped.topk_weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_gates_of_deepseek(dtype):
    logits = randn(9, 256).to(dtype)
    check(logits, 8, correction_bias=0.1 * randn(256, seed=1), **V3)
    check(logits, 8, correction_bias=(0.1 * randn(256, seed=1)).bfloat16(), **V3)
    check(randn(9, 160).to(dtype), 6, **V2)


@settings(max_examples=30 if INTERPRETED else 100, deadline=None)
@given(groups=st.integers(1, 9), size=st.integers(1, 9), data=st.data())
def test_groups_of_any_size(groups, size, data):
    kept = data.draw(st.integers(1, groups))
    top_k = data.draw(st.integers(1, kept * size))
    kinds = {
        "num_expert_group": groups,
        "topk_group": kept,
        "scoring": data.draw(st.sampled_from(["softmax", "sigmoid"])),
        "group_score": data.draw(st.sampled_from(["top2_sum", "max"])),
        "renormalize": data.draw(st.booleans()),
    }
    # Eighths: equal ones are common, and others so far apart that rounding does not matter.
    logits = (randn(3, groups * size, seed=groups * 10 + size) * 8).round() / 8
    if data.draw(st.booleans()):
        kinds["correction_bias"] = (randn(groups * size, seed=size) * 4).round() / 4
    check(logits, top_k, **kinds)


@pytest.mark.parametrize("kinds", [{}, {"num_expert_group": 5, "topk_group": 2}, {"correction_bias": torch.ones(40)}])
def test_the_lowest_id_wins_among_equals(kinds):
    equal = check(torch.zeros(3, 40), 7, **kinds)
    assert equal.topk_ids.tolist() == [list(range(7))] * 3
    logits = torch.tensor([[0.0, 1.0, -0.0, 1.0, 0.0] * 8])
    ones = [i for i in range(40) if i % 5 in (1, 3)]
    if "num_expert_group" not in kinds:
        assert check(logits, 18, **kinds).topk_ids.tolist() == [[*ones, 0, 2]]  # minus zero is zero


def test_logits_need_not_be_contiguous():
    wide = torch.full((9, 150), float("nan"))
    logits = randn(9, 60)
    want = gate(logits, 6, renormalize=True)
    for view in (wide[:, 30:90], wide[:, ::2][:, :60], torch.full((60, 9), float("nan")).T):
        view.copy_(logits)
        assert not view.is_contiguous()
        got = gate(view, 6, renormalize=True)
        assert torch.equal(got.topk_ids, want.topk_ids)
        assert torch.equal(got.topk_weights, want.topk_weights)
    # A row that stands for all tokens, and a bias with a stride.
    check(logits[:1].expand(4, -1), 6, scoring="sigmoid", correction_bias=randn(60, 2)[:, 1])


@not_finite
@pytest.mark.parametrize("kinds", [*PLAIN.values(), V3 | {"correction_bias": torch.zeros(64)}, V2])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 1e30, -1e30])
def test_ids_stay_in_range_whatever_the_logits_hold(value, kinds):
    whole = torch.full((2, 64), value)
    some = randn(3, 64)
    some[:, [5, 40, 41]] = value
    negative = some.clone()
    negative[some.isnan()] = torch.tensor(-1, dtype=torch.int32).view(torch.float32)  # a NaN with its sign set
    for logits in (whole, some, negative):
        ids = check(logits, 6, **kinds).topk_ids
        assert 0 <= int(ids.min()) <= int(ids.max()) < 64
        assert all(len(set(row)) == 6 for row in ids.tolist())


@not_finite
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("kinds", [PLAIN["softmax-norm"], V3 | {"correction_bias": torch.zeros(64)}])
def test_rows_that_only_pad_leave_no_trace(kinds, value):
    logits = randn(8, 64)
    logits[5:] = 0.0
    want = gate(logits, 6, **kinds)
    logits[5:] = value
    got = gate(logits, 6, **kinds)
    assert torch.equal(got.topk_ids[:5], want.topk_ids[:5])
    assert torch.equal(got.topk_weights[:5], want.topk_weights[:5])
    assert 0 <= int(got.topk_ids.min()) <= int(got.topk_ids.max()) < 64


@not_finite
def test_a_nan_shows_in_the_weights_of_its_token_alone():
    logits = randn(3, 8)
    logits[1, 4] = float("nan")
    for kinds in PLAIN.values():
        routing = check(logits, 3, **kinds)
        assert routing.topk_ids[1, 0] == 4
        assert bool(routing.topk_weights[1, 0].isnan())
        assert not bool(routing.topk_weights[[0, 2]].isnan().any())


@not_finite
def test_scores_that_all_underflow_give_finite_weights():
    assert gate(torch.full((2, 4), -1e4), 2, scoring="sigmoid", renormalize=True).topk_weights.tolist() == [[0, 0]] * 2


@pytest.mark.parametrize("top_k", [1, 2, 6, 8])
@pytest.mark.parametrize("num_experts", [8, 64, 256])
def test_no_tokens_need_no_launch(num_experts, top_k, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "gate_kernel", None)
        gate(torch.empty(0, num_experts), top_k)
    check(randn(1, num_experts), top_k)
    check(randn(17, num_experts), top_k)
    gate(torch.empty(0, num_experts, dtype=torch.bfloat16), top_k, renormalize=True)


def test_opchecks():
    logits, bias = randn(5, 24).to(DEVICE), randn(24).to(DEVICE)
    op = torch.ops.moe_kernels.select_experts.default
    torch.library.opcheck(op, (logits, 3, "softmax", True, None, 1, 1, "max", 1.0))
    torch.library.opcheck(op, (logits[:, ::2], 3, "sigmoid", False, bias[::2], 4, 2, "top2_sum", 2.5))
    torch.library.opcheck(op, (logits[:0], 3, "softmax", True, None, 1, 1, "max", 1.0))
    ids = torch.tensor([[2, 7], [-1, 0]], dtype=torch.int32, device=DEVICE)
    op = torch.ops.moe_kernels.prepare_routing.default
    torch.library.opcheck(op, (torch.rand(2, 2, device=DEVICE), ids, 3, 1, None))
    torch.library.opcheck(op, (torch.rand(2, 2, device=DEVICE), ids, 3, 0, ids[0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize(("num_tokens", "top_k", "num_shared"), [
    (1, 1, 0), (1, 6, 1), (7, 3, 2), (300, 8, 1), (0, 4, 1), (3, 0, 2), (2, 1, 0),
])  # fmt: skip
def test_preparation_is_its_specification(num_tokens, top_k, num_shared, mapped, dtype):
    generator = torch.Generator().manual_seed(num_tokens)
    ids = torch.randint(-3, 44, (num_tokens, top_k), generator=generator).int()
    ids.view(-1)[::5] = 2**31 - 1
    ids.view(-1)[2::7] = -(2**31)
    weights = torch.rand(num_tokens, top_k, generator=generator).to(dtype)
    mapping = torch.randint(-1, 22, (40,), generator=generator).int() if mapped else None
    got = prepare_routing(
        Routing(weights.to(DEVICE), ids.to(DEVICE)), 20, num_shared, None if mapping is None else mapping.to(DEVICE)
    )
    for a, b in zip(got, prepare_reference(weights, ids, 20, num_shared, mapping), strict=True):
        assert (a.dtype, a.stride()) == (b.dtype, b.stride())
        assert torch.equal(a.cpu(), b)


def test_preparation_of_views():
    ids = torch.arange(24, dtype=torch.int32).view(4, 6).to(DEVICE)
    weights = torch.rand(6, 4).to(DEVICE)
    mapping = torch.arange(60, dtype=torch.int32).to(DEVICE)[::2]  # e -> 2e
    got = prepare_routing(Routing(weights.T[:, :3], ids[:, ::2]), 30, 1, mapping)
    even = ids[:, ::2].cpu() * 2
    assert got.topk_ids.tolist() == [[*[i if i < 30 else -1 for i in row], 30] for row in even.tolist()]
    assert torch.equal(got.topk_weights[:, :3], weights.T[:, :3])


def test_an_empty_map_knows_no_expert():
    routing = Routing(torch.ones(1, 2, device=DEVICE), torch.tensor([[0, 1]], dtype=torch.int32, device=DEVICE))
    empty = torch.empty(0, dtype=torch.int32, device=DEVICE)
    assert prepare_routing(routing, 4, 1, empty).topk_ids.tolist() == [[-1, -1, 4]]
