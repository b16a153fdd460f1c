"""The specification of the experts in every weight format, against float64 and against numbers worked out by hand."""

import pytest
import torch
from moe_kernels import ExpertWeights, Routing, fused_experts
from moe_kernels.experts.reference import fused_experts_reference
from moe_kernels.formats import FORMATS as FACTS
from moe_kernels.testing.oracle import (
    SILU_OF_1_TIMES_2,
    error_budget,
    oracle,
    random_problem,
    relative_error,
    tag_problem,
    tag_value,
)

FORMATS = {
    "fp8_tensor": {"quant": "fp8_tensor"},
    "fp8_static": {"quant": "fp8_tensor", "x_scale": 2.0**-6, "h_scale": 2.0**-5},
    "fp8_channel": {"quant": "fp8_channel"},
    "fp8_block": {"quant": "fp8_block"},
    "int8": {"quant": "int8"},
    "int8_weight": {"quant": "int8_weight"},
    "int4-32": {"quant": "int4", "group_size": 32},
    "int4-64-zeros": {"quant": "int4", "group_size": 64, "zero_points": True},
    "int4-128": {"quant": "int4", "group_size": 128},
    "nvfp4": {"quant": "nvfp4"},
    "mxfp4": {"quant": "mxfp4"},
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# What quantising weights of a normal distribution, and activations, does to the output as a whole.
WHOLE = {"fp8": 0.09, "int8": 0.03, "int4": 0.25, "nvfp4": 0.22, "mxfp4": 0.25}
# T, E, D, F, K
SHAPES = [(1, 1, 1, 1, 1), (5, 3, 40, 24, 3), (17, 5, 200, 72, 2), (3, 4, 130, 258, 1), (9, 60, 64, 16, 6)]
each_format = pytest.mark.parametrize("form", FORMATS)


COMPILED = [False, pytest.param(True, marks=pytest.mark.slow)]


def as_one_graph(function):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def routing_of(ids, weights=None):
    ids = torch.tensor(ids, dtype=torch.int32)
    return Routing(torch.ones(ids.shape) if weights is None else torch.tensor(weights), ids)


def bound(x, weights, routing):
    """Roundings of products, intermediate and output, sums in float32, and one quantised value gone the other way."""
    terms, width = max(weights.hidden_size, weights.intermediate_size), weights.intermediate_size
    step = {"fp8": 2.0**-3, "int8": 2.0**-5}.get(FACTS[weights.quant].activation, 0.0)
    return 3 * torch.finfo(x.dtype).eps + 2.0**-23 * terms**0.5 + step / max(1, routing.topk_ids.numel() * width) ** 0.5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@each_format
def test_within_a_few_roundings_of_float64(form, shape, dtype):
    problem = random_problem(*shape, dtype=DTYPES[dtype], **FORMATS[form])
    problem[2].topk_ids[-1, -1] = -1
    out = fused_experts_reference(*problem)
    assert (out.dtype, out.shape) == (problem[0].dtype, problem[0].shape)
    error = relative_error(out, oracle(*problem))
    assert error <= bound(*problem)
    assert error <= error_budget(*problem)


@each_format
def test_near_the_layer_that_was_quantised(form):
    shape = (33, 4, 256, 128, 2)
    x, weights, routing = random_problem(*shape, **FORMATS[form])
    _, plain, _ = random_problem(*shape, "fp32")
    whole = next(value for name, value in WHOLE.items() if weights.quant.startswith(name))
    assert relative_error(fused_experts(x, weights, routing), oracle(x.float(), plain, routing)) < whole


@each_format
def test_tag_tells_gate_from_up_and_which_experts_ran(form):
    x, weights = tag_problem(17, 60, 128, 64, **FORMATS[form])
    ids = torch.stack([(torch.arange(5) * 7 + t) % 60 for t in range(17)]).int()
    ids[0], ids[1, 0], ids[2, 0], ids[3] = 59, -1, 60, -(2**31)
    routing = Routing(torch.full(ids.shape, 0.25), ids)
    out = fused_experts(x, weights, routing)
    # A tag itself is off by what its format does to it; that it is no other's, the stored value tells.
    tags = weights.dequantize()[1].double().sum(dim=2)[:, 0]
    exact = torch.tensor([float(tag_value(expert)) for expert in range(60)], dtype=torch.float64)
    assert bool(((tags - exact).abs() <= (0.25 if "mxfp4" in form else 0.09) * exact).all())
    known = (ids >= 0) & (ids < 60)
    want = SILU_OF_1_TIMES_2 * torch.where(known, tags[ids.clamp(0, 59).long()] * 0.25, 0.0).sum(dim=1)
    torch.testing.assert_close(out.double(), want[:, None].expand(out.shape), rtol=0.03, atol=0)


def test_global_scales_of_gate_and_up_may_differ():
    """Gate is 1 from a weight of 1, up is 2 from a weight of 10: each is the largest of its matrix."""
    x = torch.zeros(4, 32)
    x[:, 0], x[:, 16] = 1.0, 0.2
    w1 = torch.zeros(5, 2 * 16, 32)
    w1[:, :16, 0], w1[:, 16:, 16] = 1.0, 10.0
    w2 = ((torch.arange(5) + 1.0) / 16)[:, None, None].expand(5, 32, 16)
    weights = ExpertWeights.from_dense(w1, w2, "nvfp4", dtype=torch.float32)
    torch.testing.assert_close(weights.w1_global[:, 1] / weights.w1_global[:, 0], torch.full((5,), 10.0))
    routing = routing_of([[0], [4], [2], [-1]])
    want = 1.4621171572600098 * torch.tensor([1.0, 5.0, 3.0, 0.0])[:, None].expand(4, 32)
    torch.testing.assert_close(fused_experts(x, weights, routing), want, rtol=1e-5, atol=0)


@pytest.mark.parametrize("top_k", [1, 6])
@each_format
def test_no_tokens_and_no_expert(form, top_k):
    _, weights, _ = random_problem(1, 8, 16, 16, 1, **FORMATS[form])
    none = Routing(torch.empty(0, top_k), torch.empty(0, top_k, dtype=torch.int32))
    for run in (fused_experts, fused_experts_reference):
        out = run(torch.empty(0, 16, dtype=torch.bfloat16), weights, none)
        assert (out.shape, out.dtype) == ((0, 16), torch.bfloat16)
    hostile = torch.full((3, 16), float("nan"), dtype=torch.bfloat16)
    nowhere = Routing(torch.full((3, 2), float("nan")), torch.tensor([[-1, 8]] * 3).int())
    assert not fused_experts(hostile, weights, nowhere).any()


@pytest.mark.parametrize("compiled", COMPILED)
@each_format
def test_rows_that_only_pad_do_not_reach_real_rows(form, compiled):
    x, weights, routing = random_problem(8, 6, 160, 72, 2, **FORMATS[form])
    routing.topk_ids[5:] = torch.tensor([[-1, 6], [-1, -1], [2**31 - 1, -7]]).int()
    run = as_one_graph(fused_experts_reference) if compiled else fused_experts_reference
    x[5:] = 0.0
    want = run(x, weights, routing)
    for hostile in (float("nan"), float("inf"), 1e30):
        x[5:] = hostile
        got = run(x, weights, routing)
        assert torch.equal(got[:5], want[:5])
        assert not got[5:].any()


@each_format
def test_rows_far_apart(form):
    """Half of the rows 100 times larger, in either order: no row is worked out with another's scale."""
    x, weights, routing = random_problem(64, 4, 128, 64, 2, **FORMATS[form])
    x[32:] *= 100.0
    flipped = Routing(routing.topk_weights.flip(0), routing.topk_ids.flip(0))
    out = fused_experts(x, weights, routing)
    back = fused_experts(x.flip(0), weights, flipped).flip(0)
    want = oracle(x, weights, routing)
    for half in (slice(0, 32), slice(32, 64)):
        assert relative_error(out[half], want[half]) < 0.02
        assert relative_error(back[half], want[half]) < 0.02
    alone = Routing(routing.topk_weights[:32], routing.topk_ids[:32])
    if form not in ("fp8_tensor", "fp8_static"):
        # Rows with scales of their own come out as they do alone, up to the order of the sums.
        assert relative_error(fused_experts(x[:32], weights, alone), out[:32]) < 0.01
    elif form == "fp8_static":
        # 448 / 64 is the largest that this scale tells; beyond, values saturate and stay finite.
        assert bool(torch.isfinite(out).all())


@each_format
def test_zero_rows_and_experts_give_zero(form):
    x, _, routing = random_problem(9, 4, 256, 160, 2, **FORMATS[form])
    generator = torch.Generator().manual_seed(3)
    w1, w2 = torch.randn(4, 320, 256, generator=generator) / 16, torch.randn(4, 256, 160, generator=generator) / 13
    w1[1], w2[2, 5], w1[3, 128:256, :128] = 0.0, 0.0, 0.0
    weights = ExpertWeights.from_dense(w1, w2, **FORMATS[form])
    before = fused_experts(x, weights, routing)
    x[3], x[4] = 0.0, 1e-30
    out = fused_experts(x, weights, routing)
    assert not out[3].any()
    assert bool(torch.isfinite(out).all())
    if form != "fp8_tensor":
        assert relative_error(out[[0, 1, 2, 5, 6, 7, 8]], before[[0, 1, 2, 5, 6, 7, 8]]) < 1e-2
    assert not fused_experts(x, weights, routing_of([[1]] * 9)).any()
    assert not fused_experts(x, weights, routing_of([[2]] * 9))[:, 5].any()


@each_format
def test_large_activations_are_finite(form):
    x, weights, routing = random_problem(9, 3, 128, 64, 2, dtype=torch.float32, **FORMATS[form])
    x = (x * 1e4).clamp(-1e4, 1e4)
    out = fused_experts(x, weights, routing)
    assert bool(torch.isfinite(out).all())
    if form != "fp8_static":
        assert relative_error(out, oracle(x, weights, routing)) <= bound(x, weights, routing)


def test_static_scales_are_used_and_rows_do_not_depend_on_their_batch():
    x, weights, routing = random_problem(16, 3, 64, 32, 2, **FORMATS["fp8_static"])
    dynamic = random_problem(16, 3, 64, 32, 2, "fp8_tensor")[1]
    out = fused_experts(x, weights, routing)
    assert relative_error(out, oracle(x, weights, routing)) <= bound(x, weights, routing)
    assert not torch.equal(out, fused_experts(x, dynamic, routing))
    part = Routing(routing.topk_weights[:4], routing.topk_ids[:4])
    loud = x.clone()
    loud[8:] *= 1000.0
    assert relative_error(fused_experts(x[:4], weights, part), out[:4]) < 0.01
    assert torch.equal(fused_experts(loud, weights, routing)[:8], out[:8])


@pytest.mark.parametrize(
    ("form", "compiled"), [*((form, False) for form in (None, *FORMATS)), (None, True), ("fp8_block", True)]
)
def test_router_weight_on_the_input(form, compiled):
    options = {"dtype": torch.float32, **FORMATS[form]} if form else {"quant": "fp32"}
    run = as_one_graph(fused_experts_reference) if compiled else fused_experts_reference
    x, weights = tag_problem(3, 4, 128, 64, **options)
    routing = Routing(torch.full((3, 1), 0.5), torch.tensor([[0], [3], [-1]]).int())
    on_input = run(x, weights, routing, router_weight_on_input=True)
    on_output = run(x, weights, routing)
    tags = torch.tensor([1.0, 15.0, 0.0])[:, None].expand(3, 128)
    tolerance = {None: 1e-5, "mxfp4": 0.22}.get(form, 0.05)
    torch.testing.assert_close(on_input, 0.311230 * tags, rtol=tolerance, atol=1e-5)  # silu(0.5) * 1
    torch.testing.assert_close(on_output, 0.731059 * tags, rtol=tolerance, atol=1e-5)  # silu(1) * 2 / 2
    problem = random_problem(9, 4, 128, 64, 1, **options)
    want = oracle(*problem, router_weight_on_input=True)
    assert relative_error(run(*problem, router_weight_on_input=True), want) <= bound(*problem)
    assert relative_error(run(*problem), want) > 0.1


# Compiling takes seconds: one format of each kind.
@pytest.mark.slow
@pytest.mark.parametrize("form", ["fp8_tensor", "fp8_block", "int4-32", "nvfp4"])
def test_compiled_for_any_token_count(form):
    run = as_one_graph(fused_experts_reference)
    for num_tokens in (7, 2, 11):
        problem = random_problem(num_tokens, 3, 136, 72, 2, **FORMATS[form])
        ids = problem[2].topk_ids
        ids[0, 0], ids[1, 1], ids[-1] = -1, 3, ids[-1, 0].clone()
        out = run(*problem)
        assert out.stride() == (136, 1)
        assert relative_error(out, oracle(*problem)) <= error_budget(*problem)


# Inductor's first import uses a deprecated part of torch.
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.slow
@pytest.mark.parametrize("form", ["fp8_tensor", "int8", "nvfp4"])
def test_compiled_by_inductor_with_large_values(form):
    torch._dynamo.reset()
    x, weights, routing = random_problem(7, 3, 64, 40, 2, dtype=torch.float32, **FORMATS[form])
    x = (x * 1e4).clamp(-1e4, 1e4)
    run = torch.compile(lambda x, routing: fused_experts(x, weights, routing), fullgraph=True)
    out = run(x, routing)
    assert bool(torch.isfinite(out).all())
    assert relative_error(out, fused_experts(x, weights, routing)) <= 2 * bound(x, weights, routing)


@each_format
def test_shared_experts_inside_equal_those_beside(form):
    x, weights, routing = random_problem(9, 4, 128, 64, 2, **FORMATS[form])
    _, shared, _ = random_problem(1, 1, 128, 64, 1, seed=5, **FORMATS[form])
    inside = fused_experts(x, weights.with_shared(shared), routing)
    beside = fused_experts(x, weights, routing, shared=shared)
    tolerance = 0.06 if form == "fp8_tensor" else 0.01  # one scale for all is another where more rows share it
    assert relative_error(inside, beside) < tolerance
    joined = weights.with_shared(shared)
    ids = torch.cat([routing.topk_ids, torch.full((9, 1), 4, dtype=torch.int32)], dim=1)
    both = Routing(torch.cat([routing.topk_weights, torch.ones(9, 1)], dim=1), ids)
    assert relative_error(inside, oracle(x, joined, both)) <= bound(x, joined, both)


@pytest.mark.parametrize("ffn", [64, 80, 96, 192, 320, 384])
def test_blocks_with_tails(ffn):
    problem = random_problem(5, 4, 256, ffn, 2, "fp8_block")
    assert relative_error(fused_experts(*problem), oracle(*problem)) <= bound(*problem)
