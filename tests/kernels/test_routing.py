"""select_experts against hand-worked values and against a plain loop."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_kernels import select_experts
from moe_kernels.routing.api import gate_reasons


def test_weights_are_probabilities_unless_renormalised():
    logits = torch.log(torch.tensor([[1.0, 2.0, 3.0, 4.0]]))
    plain = select_experts(logits, 2)
    torch.testing.assert_close(plain.topk_weights, torch.tensor([[0.4, 0.3]]))
    assert plain.topk_ids.tolist() == [[3, 2]]
    normed = select_experts(logits, 2, renormalize=True)
    torch.testing.assert_close(normed.topk_weights, torch.tensor([[4 / 7, 3 / 7]]))


def test_scaling_multiplies_once_and_after_renormalising():
    logits = torch.log(torch.tensor([[1.0, 2.0, 3.0, 4.0]]))
    scaled = select_experts(logits, 2, renormalize=True, routed_scaling_factor=2.5)
    torch.testing.assert_close(scaled.topk_weights, torch.tensor([[10 / 7, 7.5 / 7]]))


@pytest.mark.parametrize("num_tokens", [1, 7])
def test_renormalised_top_1_weighs_exactly_1(num_tokens):
    routing = select_experts(torch.randn(num_tokens, 5), 1, renormalize=True)
    assert routing.topk_weights.shape == (num_tokens, 1)
    assert bool((routing.topk_weights == 1.0).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("top_k", [1, 3, 6])
def test_no_tokens(top_k, dtype):
    routing = select_experts(torch.empty(0, 6, dtype=dtype), top_k, renormalize=True)
    assert routing.topk_weights.shape == routing.topk_ids.shape == (0, top_k)
    assert (routing.topk_weights.dtype, routing.topk_ids.dtype) == (torch.float32, torch.int32)


@settings(max_examples=40, deadline=None)
@given(num_experts=st.sampled_from([1, 5, 8, 48, 60, 64, 96, 128, 256]), data=st.data(), renormalize=st.booleans())
def test_equals_a_loop_in_float64(num_experts, data, renormalize):
    top_k = data.draw(st.integers(1, min(16, num_experts)))
    logits = torch.randn(3, num_experts, generator=torch.Generator().manual_seed(num_experts * 17 + top_k))
    routing = select_experts(logits, top_k, renormalize=renormalize)
    for row, ids, weights in zip(
        logits.tolist(), routing.topk_ids.tolist(), routing.topk_weights.tolist(), strict=True
    ):
        exp = [math.exp(v) for v in row]
        best = sorted(range(num_experts), key=lambda e: -row[e])[:top_k]
        total = sum(exp[e] for e in best) if renormalize else sum(exp)
        assert ids == best
        assert weights == pytest.approx([exp[e] / total for e in best], rel=1e-5)


def test_bf16_logits_are_scored_in_float32():
    logits = torch.randn(4, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    got, want = select_experts(logits, 4), select_experts(logits.float(), 4)
    assert torch.equal(got.topk_ids, want.topk_ids)
    assert torch.equal(got.topk_weights, want.topk_weights)


@pytest.mark.parametrize("top_k", [0, 5, -1])
def test_top_k_out_of_range_is_refused(top_k):
    with pytest.raises(ValueError, match=rf"^top_k must be between 1 and the number of experts 4; got {top_k}\.$"):
        select_experts(torch.zeros(2, 4), top_k)


def test_other_arguments_are_refused_by_name():
    with pytest.raises(ValueError, match=r"^scoring must be one of softmax, sigmoid; got 'tanh'"):
        select_experts(torch.zeros(2, 4), 1, scoring="tanh")
    with pytest.raises(ValueError, match=r"^router_logits_TE must be a floating-point tensor"):
        select_experts(torch.zeros(2, 4, dtype=torch.int32), 1)
    with pytest.raises(ValueError, match=r"^router_logits_TE must be a floating-point tensor"):
        select_experts(torch.zeros(4), 1)


def test_compiles_as_one_graph():
    compiled = torch.compile(
        lambda x: select_experts(x, 3, renormalize=True, routed_scaling_factor=2.0), fullgraph=True, backend="aot_eager"
    )
    logits = torch.randn(7, 9, generator=torch.Generator().manual_seed(0))
    got, want = compiled(logits), select_experts(logits, 3, renormalize=True, routed_scaling_factor=2.0)
    assert torch.equal(got.topk_ids, want.topk_ids)
    torch.testing.assert_close(got.topk_weights, want.topk_weights)


def test_the_bias_steers_the_choice_and_never_the_weights():
    logits, bias = torch.tensor([[0.0, 1.0, 3.0, 3.0]]), torch.tensor([5.0, 5.0, 0.0, 0.0])
    routing = select_experts(logits, 2, scoring="sigmoid", correction_bias=bias, renormalize=True)
    weights = dict(zip(routing.topk_ids[0].tolist(), routing.topk_weights[0].tolist(), strict=True))
    assert weights == pytest.approx({0: 0.406155, 1: 0.593845}, abs=1e-6)


def test_groups_are_ranked_by_the_sum_of_their_two_best_or_by_their_best():
    logits = torch.tensor([[2.19722, -2.19722, 0.405465, 0.405465]])
    kinds = {"scoring": "sigmoid", "num_expert_group": 2, "topk_group": 1, "renormalize": True}
    by_sum = select_experts(logits, 2, **kinds)
    assert sorted(by_sum.topk_ids[0].tolist()) == [2, 3]
    torch.testing.assert_close(by_sum.topk_weights, torch.tensor([[0.5, 0.5]]))
    by_best = select_experts(logits, 2, group_score="max", **kinds)
    assert by_best.topk_ids.tolist() == [[0, 1]]
    torch.testing.assert_close(by_best.topk_weights, torch.tensor([[0.9, 0.1]]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("group_score", ["top2_sum", "max"])
@pytest.mark.parametrize("groups", [1, 6])
def test_keeping_every_group_equals_no_groups(groups, group_score, scoring):
    generator = torch.Generator().manual_seed(groups)
    logits, bias = torch.randn(7, 60, generator=generator), torch.randn(60, generator=generator)
    plain = select_experts(logits, 6, scoring=scoring, correction_bias=bias)
    grouped = select_experts(
        logits, 6, scoring=scoring, correction_bias=bias, num_expert_group=groups, topk_group=groups,
        group_score=group_score,
    )  # fmt: skip
    assert torch.equal(plain.topk_ids, grouped.topk_ids)
    assert torch.equal(plain.topk_weights, grouped.topk_weights)


@settings(max_examples=30, deadline=None)
@given(
    groups=st.sampled_from([1, 2, 4, 8]),
    size=st.integers(1, 9),
    data=st.data(),
    best=st.sampled_from(["top2_sum", "max"]),
)
def test_grouped_choice_equals_a_loop(groups, size, data, best):
    kept = data.draw(st.integers(1, groups))
    top_k = data.draw(st.integers(1, kept * size))
    generator = torch.Generator().manual_seed(groups * 100 + size)
    logits, bias = torch.randn(3, groups * size, generator=generator), torch.randn(groups * size, generator=generator)
    routing = select_experts(
        logits, top_k, scoring="sigmoid", correction_bias=bias, num_expert_group=groups, topk_group=kept,
        group_score=best, routed_scaling_factor=2.5,
    )  # fmt: skip
    for row, ids, weights in zip(logits, routing.topk_ids.tolist(), routing.topk_weights.tolist(), strict=True):
        score = [1 / (1 + math.exp(-v)) for v in row.tolist()]
        choice = [s + b for s, b in zip(score, bias.tolist(), strict=True)]
        ranks = [
            sorted(choice[g * size : (g + 1) * size], reverse=True)[: 2 if best == "top2_sum" else 1]
            for g in range(groups)
        ]
        chosen = sorted(range(groups), key=lambda g: -sum(ranks[g]))[:kept]
        wanted = sorted((e for g in chosen for e in range(g * size, (g + 1) * size)), key=lambda e: -choice[e])[:top_k]
        assert ids == wanted
        assert weights == pytest.approx([2.5 * score[e] for e in wanted], rel=1e-5)


def test_scores_that_all_underflow_give_finite_weights():
    routing = select_experts(torch.full((2, 4), -1e4), 2, scoring="sigmoid", renormalize=True)
    assert routing.topk_weights.tolist() == [[0.0, 0.0]] * 2


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"scoring": "tanh"}, "scoring must be one of softmax, sigmoid; got 'tanh'"),
        ({"num_expert_group": 5, "topk_group": 1}, "num_expert_group must divide the number of experts 8; got 5"),
        ({"num_expert_group": 4, "topk_group": 5}, "topk_group must be between 1 and num_expert_group 4; got 5"),
        ({"num_expert_group": 4, "topk_group": 1}, "top_k must be at most the 2 experts of the chosen groups; got 3"),
        ({"num_expert_group": 4}, "num_expert_group and topk_group must be given together"),
        ({"num_expert_group": 4, "topk_group": 2, "group_score": "mean"}, "group_score must be one of top2_sum, max"),
        ({"correction_bias": torch.zeros(7)}, r"correction_bias must be \[8\]; got \[7\]"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_a_gate_that_does_not_fit_is_one_sentence(values, sentence):
    with pytest.raises(ValueError, match=f"^{sentence}"):
        select_experts(torch.zeros(2, 8), 3, **values)


def test_a_bias_that_does_not_fit_is_one_sentence():
    with pytest.raises(ValueError, match=r"^correction_bias must be of a floating dtype; got torch\.int32"):
        select_experts(torch.zeros(2, 4), 1, correction_bias=torch.zeros(4, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"^correction_bias must be on cpu, as the logits are; got meta"):
        select_experts(torch.zeros(2, 4), 1, correction_bias=torch.zeros(4, device="meta"))


def test_a_named_implementation_is_that_or_an_error():
    logits = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    named, chosen = select_experts(logits, 2, impl="reference"), select_experts(logits, 2)
    assert torch.equal(named.topk_ids, chosen.topk_ids)
    assert torch.equal(named.topk_weights, chosen.topk_weights)
    with pytest.raises(ValueError, match=r"^impl must be one of reference, triton; got 'cuda'\."):
        select_experts(logits, 2, impl="cuda")
    with pytest.raises(
        NotImplementedError, match=r"^impl 'triton' does not run: (Triton kernels run on cuda, not cpu|triton is not)"
    ):
        select_experts(logits, 2, impl="triton")


def test_what_the_triton_gate_takes():
    assert gate_reasons("reference", "cpu", 10**6) == gate_reasons("triton", "cuda", 4096) == []
    assert gate_reasons("triton", "cuda", 4097) == ["The Triton gate takes up to 4096 experts; this has 4097."]


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("bias", [None, torch.full((30,), 0.5)], ids=["plain", "biased"])
def test_the_lowest_id_wins_among_equals(bias, scoring):
    kinds = {"scoring": scoring, "correction_bias": bias}
    assert select_experts(torch.ones(2, 30), 11, **kinds).topk_ids.tolist() == [list(range(11))] * 2
    logits = torch.tensor([[0.0, 1.0, -0.0] * 10])
    assert select_experts(logits, 13, **kinds).topk_ids.tolist() == [[*range(1, 30, 3), 0, 2, 3]]
    grouped = select_experts(logits, 13, num_expert_group=5, topk_group=3, **kinds)
    assert grouped.topk_ids.tolist() == [[1, 4, 7, 10, 13, 16, 0, 2, 3, 5, 6, 8, 9]]


def test_logits_are_told_apart_where_their_scores_are_not():
    logits = torch.tensor([[20.0, 30.0, 25.0]])  # sigmoids of 1 in float32
    assert select_experts(logits, 2, scoring="sigmoid").topk_ids.tolist() == [[1, 2]]


def test_an_expert_outside_of_the_chosen_groups_is_never_chosen():
    bias = torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0, float("-inf"), 1.0, float("-inf")])
    routing = select_experts(torch.zeros(1, 8), 4, correction_bias=bias, num_expert_group=2, topk_group=1)
    assert routing.topk_ids.tolist() == [[4, 6, 5, 7]]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 1e30])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_rows_that_only_pad_leave_no_trace(scoring, value):
    logits = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    logits[5:] = 0.0
    want = select_experts(logits, 6, scoring=scoring, renormalize=True)
    logits[5:] = value
    got = select_experts(logits, 6, scoring=scoring, renormalize=True)
    assert torch.equal(got.topk_ids[:5], want.topk_ids[:5])
    assert torch.equal(got.topk_weights[:5], want.topk_weights[:5])
    assert got.topk_ids[5:].tolist() == [list(range(6))] * 3


def test_opcheck():
    logits, bias = torch.randn(5, 24), torch.randn(24)
    op = torch.ops.moe_kernels.select_experts.default
    torch.library.opcheck(op, (logits, 3, "softmax", True, None, 1, 1, "max", 1.0))
    torch.library.opcheck(op, (logits[:, ::2], 3, "sigmoid", False, bias[::2], 4, 2, "top2_sum", 2.5))
    torch.library.opcheck(op, (logits.bfloat16()[:0], 3, "softmax", False, None, 1, 1, "max", 1.0))
