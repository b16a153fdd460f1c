"""fused_experts on the CPU: what it computes, in each implementation and dtype, eager and compiled."""

import pytest
import torch
from moe_kernels import ExpertWeights, Routing, fused_experts, supports_impl
from moe_kernels.testing.oracle import (
    error_budget,
    oracle,
    poison_allocator,
    random_problem,
    relative_error,
    tag_expected,
    tag_problem,
)

IMPLS = ["reference", "torch_grouped_mm"]
QUANTS = ["fp32", "bf16", "fp16"]
# T, E, D, F, K
SHAPES = [
    (1, 1, 1, 1, 1),
    (5, 3, 16, 24, 3),
    (17, 5, 40, 16, 1),
    (17, 60, 32, 8, 6),
    (5, 7, 24, 13, 7),
    (64, 8, 64, 32, 2),
]
TAG_ATOL = {"fp32": 1e-5, "fp16": 2e-3, "bf16": 1e-2}


def reasons(impl, x, weights, top_k, compile=False):
    return supports_impl(
        impl,
        device_type=x.device.type,
        dtype=x.dtype,
        num_experts=weights.num_experts,
        hidden_size=weights.hidden_size,
        intermediate_size=weights.intermediate_size,
        top_k=top_k,
        compile=compile,
    )


def routing_of(ids, weights=None):
    ids = torch.tensor(ids, dtype=torch.int32)
    return Routing(torch.ones(ids.shape) if weights is None else torch.tensor(weights), ids)


@pytest.fixture(params=IMPLS)
def impl(request):
    return request.param


@pytest.fixture(params=QUANTS)
def quant(request):
    return request.param


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_within_budget_of_float64_or_refused_with_the_reason(impl, quant, shape):
    x, weights, routing = random_problem(*shape, quant)
    why = reasons(impl, x, weights, shape[4])
    if why:
        with pytest.raises(NotImplementedError) as raised:
            fused_experts(x, weights, routing, impl=impl)
        assert all(reason in str(raised.value) for reason in why)
        return
    before = x.clone()
    out = fused_experts(x, weights, routing, impl=impl)
    assert out.dtype == x.dtype
    assert out.shape == x.shape
    assert out.is_contiguous()
    assert torch.equal(x, before)
    error = relative_error(out, oracle(x, weights, routing))
    assert error <= error_budget(x, weights, routing)
    # The budget itself is anchored: a few roundings of this dtype.
    assert error <= 4 * torch.finfo(x.dtype).eps


@pytest.mark.parametrize("num_experts", [1, 3, 5, 60, 160])
def test_tag_tells_which_experts_ran(impl, quant, num_experts):
    x, weights = tag_problem(17, num_experts, 16, 16, quant)
    top_k = min(6, num_experts)
    ids = torch.stack([(torch.arange(top_k) * 7 + t) % num_experts for t in range(17)]).int()
    routing = Routing(torch.full(ids.shape, 0.5), ids)
    out = fused_experts(x, weights, routing, impl=impl)
    want = tag_expected(routing, num_experts)[:, None].expand(out.shape)
    torch.testing.assert_close(out.double(), want, rtol=TAG_ATOL[quant], atol=0)


@pytest.mark.parametrize("num_experts", [8, 60, 256])
def test_first_and_last_expert(impl, num_experts):
    x, weights = tag_problem(6, num_experts, 16, 16)
    for ids in ([[num_experts - 1]] * 6, [[0]] * 6, [[0], [num_experts - 1]] * 3):
        routing = routing_of(ids)
        out = fused_experts(x, weights, routing, impl=impl)
        want = tag_expected(routing, num_experts)[:, None].expand(out.shape)
        torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=0)


@pytest.mark.parametrize("num_tokens", [4, 5])
@pytest.mark.parametrize("bad", [-1, -7, 4, 1004, 2**31 - 1, -(2**31)])
def test_ids_outside_add_nothing(impl, quant, num_tokens, bad):
    x, weights = tag_problem(num_tokens, 4, 16, 16, quant)
    ids = [[0, bad]] * (num_tokens - 1) + [[bad, bad]]
    routing = routing_of(ids, [[0.5, float("nan")]] * num_tokens)
    poison_allocator("cpu", x.nbytes, 2 * x.nbytes)
    out = fused_experts(x, weights, routing, impl=impl)
    want = torch.full(out.shape, 0.5 * 1.4621171572600098)
    want[-1] = 0.0
    torch.testing.assert_close(out.float(), want, rtol=TAG_ATOL[quant], atol=0)


def test_expert_named_twice_counts_twice(impl, quant):
    x, weights, _ = random_problem(5, 4, 16, 16, 2, quant)
    once = routing_of([[3]] * 5, [[1.0]] * 5)
    twice = routing_of([[3, 3]] * 5, [[0.25, 0.75]] * 5)
    want = oracle(x, weights, once)
    assert relative_error(fused_experts(x, weights, twice, impl=impl), want) <= error_budget(x, weights, once)


@pytest.mark.parametrize("value", [float("nan"), 1e30], ids=["nan", "1e30"])
def test_experts_without_rows_leave_no_trace(impl, quant, value):
    x, weights, _ = random_problem(9, 8, 32, 16, 2, quant)
    for ids in ([[3, 3]] * 9, [[0, 7]] * 9):
        routing = routing_of(ids, [[0.25, 0.75]] * 9)
        poison_allocator("cpu", 9 * 2 * 32 * 4, 9 * 2 * 32 * 2, 9 * 2 * 16 * 4, x.nbytes, value=value)
        out = fused_experts(x, weights, routing, impl=impl)
        assert relative_error(out, oracle(x, weights, routing)) <= error_budget(x, weights, routing)


def test_rows_do_not_depend_on_their_batch(impl):
    x, weights, routing = random_problem(64, 5, 32, 24, 3)
    whole = fused_experts(x, weights, routing, impl=impl)
    for start, end in ((0, 1), (1, 8), (8, 64)):
        part = Routing(routing.topk_weights[start:end], routing.topk_ids[start:end])
        got = fused_experts(x[start:end], weights, part, impl=impl)
        torch.testing.assert_close(got, whole[start:end], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("hostile", [float("nan"), float("inf"), 1e30])
def test_padding_rows_do_not_reach_real_rows(impl, hostile):
    x, weights, routing = random_problem(8, 5, 32, 24, 3)
    clean, dirty = x.clone(), x.clone()
    clean[5:], dirty[5:] = 0.0, hostile
    got = fused_experts(dirty, weights, routing, impl=impl)[:5]
    assert torch.equal(got, fused_experts(clean, weights, routing, impl=impl)[:5])


@pytest.mark.parametrize("top_k", [1, 2, 6, 8])
def test_no_tokens(impl, quant, top_k):
    _, weights, _ = random_problem(1, 8, 16, 16, 1, quant)
    x = torch.empty(0, 16, dtype=weights.w1.dtype)
    out = fused_experts(x, weights, Routing(torch.empty(0, top_k), torch.empty(0, top_k, dtype=torch.int32)), impl=impl)
    assert out.shape == (0, 16)
    assert out.dtype == x.dtype


def test_x_as_a_strided_view(impl):
    x, weights, routing = random_problem(7, 5, 32, 24, 3)
    wide = torch.full((7, 64), float("nan"))
    wide[:, ::2] = x
    out = fused_experts(wide[:, ::2], weights, routing, impl=impl)
    torch.testing.assert_close(out, fused_experts(x, weights, routing, impl=impl))


# Inductor's first import uses a deprecated part of torch.
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.slow
@pytest.mark.parametrize("impl_quant", ["reference-fp32", "reference-bf16", "torch_grouped_mm-bf16"])
def test_compiled_as_one_graph_within_budget(impl_quant):
    impl, quant = impl_quant.split("-")
    x, weights, routing = random_problem(7, 3, 16, 24, 2, quant)
    routing.topk_ids[0, 0], routing.topk_ids[1, 1], routing.topk_ids[2] = -1, 3, routing.topk_ids[2, 0].clone()
    compiled = torch.compile(lambda x, w, r: fused_experts(x, w, r, impl=impl), fullgraph=True)
    error = relative_error(compiled(x, weights, routing), oracle(x, weights, routing))
    assert error <= error_budget(x, weights, routing)


@pytest.mark.parametrize("impl_quant", ["reference-fp16", "torch_grouped_mm-bf16"])
def test_compiled_for_any_token_count(impl_quant):
    impl, quant = impl_quant.split("-")
    compiled = torch.compile(
        lambda x, w, r: fused_experts(x, w, r, impl=impl), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for num_tokens in (7, 2, 19):
        x, weights, routing = random_problem(num_tokens, 3, 16, 24, 2, quant)
        error = relative_error(compiled(x, weights, routing), oracle(x, weights, routing))
        assert error <= error_budget(x, weights, routing)


def test_compiled_reference_keeps_overflow_of_other_experts_out():
    x, weights, routing = random_problem(4, 2, 16, 16, 1)
    w1 = weights.w1.clone()
    w1[1] = float("inf")
    weights = ExpertWeights.from_dense(w1, weights.w2, "fp32")
    routing = Routing(routing.topk_weights, torch.zeros_like(routing.topk_ids))
    compiled = torch.compile(lambda x, r: fused_experts(x, weights, r, impl="reference"), backend="aot_eager")
    torch.testing.assert_close(compiled(x, routing), fused_experts(x, weights, routing, impl="reference"))


@pytest.mark.parametrize("num_experts", [40, 72, 384, 513])
@pytest.mark.parametrize("top_k", [1, 3, 7, 10, None], ids=str)
def test_counts_that_are_no_powers_of_two(num_experts, top_k):
    top_k = num_experts if top_k is None else top_k
    for num_tokens in (1, 5):
        x, weights = tag_problem(num_tokens, num_experts, 16, 4)
        ids = (torch.arange(top_k) * 7 + torch.arange(num_tokens)[:, None]) % num_experts
        routing = Routing(torch.full(ids.shape, 1.0 / top_k), ids.int())
        out = fused_experts(x, weights, routing, impl="reference")
        want = tag_expected(routing, num_experts)[:, None].expand(out.shape)
        torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=0)


@pytest.mark.parametrize("quant", ["fp32", "fp8_block", "int4"])
def test_partial_sums_of_ranks_add_up(impl, quant):
    options = {} if quant == "fp32" else {"dtype": torch.float32}
    x, weights, routing = random_problem(9, 6, 32, 16, 3, quant, **options)
    if why := reasons(impl, x, weights, 3) or (impl != "reference" and quant != "fp32"):
        assert why
        return
    whole, parts = fused_experts(x, weights, routing, impl=impl), []
    dense = ExpertWeights.from_dense(*random_problem(9, 6, 32, 16, 3)[1].dequantize(), quant, **options)
    assert torch.equal(dense.w1.view(torch.uint8), weights.w1.view(torch.uint8))
    w1, w2 = random_problem(9, 6, 32, 16, 3)[1].dequantize()
    for held in ([0, 2, 5], [1, 3, 4]):
        expert_map = torch.full((6,), -1, dtype=torch.int32)
        expert_map[held] = torch.arange(3, dtype=torch.int32)
        local = ExpertWeights.from_dense(w1[held], w2[held], quant, **options)
        parts.append(fused_experts(x, local, routing, expert_map=expert_map, impl=impl))
        absent = Routing(
            routing.topk_weights, torch.full_like(routing.topk_ids, next(e for e in range(6) if e not in held))
        )
        assert not fused_experts(x, local, absent, expert_map=expert_map, impl=impl).any()
    torch.testing.assert_close(parts[0] + parts[1], whole, rtol=1e-5, atol=1e-5)


def test_options_are_checked_by_name():
    x, weights, routing = random_problem(3, 4, 16, 8, 2)
    for options, message in (
        ({"router_weight_on_input": True}, "^router_weight_on_input must be False where K is not 1; got K = 2"),
        ({"split_k": 0}, "^split_k must be None or from 1 to 64; got 0"),
        ({"split_k": 65}, "^split_k must be None or from 1 to 64; got 65"),
        ({"split_k": "2"}, "^split_k must be None or from 1 to 64; got '2'"),
        ({"reduction": "fast"}, "^reduction must be one of deterministic, atomic; got 'fast'"),
        ({"split_k": 2}, "^split_k is for impl 'triton'; this call runs 'reference'"),
        ({"shared": random_problem(1, 1, 24, 8, 1)[1]}, "^shared must have the hidden size, dtype and device"),
    ):
        with pytest.raises(ValueError, match=message):
            fused_experts(x, weights, routing, **options)
