"""select_experts against hand-worked values and against a plain loop."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_kernels import select_experts


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
    with pytest.raises(ValueError, match=r"^scoring must be one of softmax; got 'tanh'"):
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
