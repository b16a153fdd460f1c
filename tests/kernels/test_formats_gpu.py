"""Every weight format on an NVIDIA GPU: layouts, tiles, splits, graphs, compile, against the float64 oracle."""

import pytest
import torch
from moe_kernels import ExpertWeights, Routing, fused_experts
from moe_kernels.testing.oracle import (
    error_budget,
    oracle,
    poison_allocator,
    random_problem,
    relative_error,
    tag_expected,
    tag_problem,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # Inductor's first import uses a deprecated part of torch.
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
]

TILES = {
    "BLOCK_SIZE_M": 16,
    "BLOCK_SIZE_N": 64,
    "BLOCK_SIZE_K": 128,
    "GROUP_SIZE_M": 4,
    "num_warps": 4,
    "num_stages": 3,
}
BIG = {**TILES, "BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 128, "num_warps": 8}
CONFIGS = {
    "default": None,
    "sorted": TILES,
    "inline": {**TILES, "LAYOUT": "inline"},
    "token": {**TILES, "LAYOUT": "token", "BLOCK_SIZE_M": 1, "BLOCK_SIZE_N": 4, "BLOCK_SIZE_K": 256},
    "swapped": {**TILES, "SWAP_AB": True},
    "inline-swapped-pdl": {**TILES, "SWAP_AB": True, "LAYOUT": "inline", "PDL": True},
    "k64": {**TILES, "BLOCK_SIZE_K": 64},
    "blocks": {"up": BIG, "down": {**BIG, "BLOCK_SIZE_N": 64}},
    "wide": {"up": BIG, "down": {**BIG, "BLOCK_SIZE_N": 256}},
    "sorted-inline": {"up": BIG, "down": {**TILES, "LAYOUT": "inline"}},
}
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
# T, E, D, F, K
ODD = [(1, 5, 72, 40, 3), (300, 16, 256, 136, 6)]
TAILS = (17, 3, 200, 184, 2)
TMA = [(37, 5, 256, 160, 3)]


def check(out, problem):
    assert out.dtype == problem[0].dtype
    assert relative_error(out, oracle(*problem)) <= error_budget(*problem)


@pytest.mark.parametrize(
    ("config", "shape"), [*((config, TAILS) for config in CONFIGS), *(("default", shape) for shape in ODD)], ids=str
)
@pytest.mark.parametrize("form", FORMATS)
def test_within_budget(form, config, shape):
    problem = random_problem(*shape, device="cuda", **FORMATS[form])
    problem[2].topk_ids[0, 0] = -1
    before = problem[0].clone()
    rows = shape[0] * shape[4]
    poison_allocator("cuda", rows * shape[2] * 2, rows * shape[3] * 2, rows * shape[3], rows * 4)
    check(fused_experts(*problem, impl="triton", config=CONFIGS[config]), problem)
    assert torch.equal(problem[0], before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("form", ["fp8_tensor", "fp8_block", "int8", "int8_weight", "int4-64-zeros", "nvfp4", "mxfp4"])
def test_other_activations(form, dtype):
    for tokens in (1, 19):
        problem = random_problem(tokens, 5, 160, 96, 3, device="cuda", dtype=dtype, **FORMATS[form])
        check(fused_experts(*problem, impl="triton"), problem)


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("form", ["fp8_block", "int8", "int4-32", "nvfp4", "mxfp4"])
def test_tensor_maps(form, swap):
    problem = random_problem(*TMA[0], device="cuda", **FORMATS[form])
    config = {**TILES, "USE_TMA": True, "SWAP_AB": swap}
    plain = fused_experts(*problem, impl="triton", config={**config, "USE_TMA": False})
    assert torch.equal(fused_experts(*problem, impl="triton", config=config), plain)


@pytest.mark.parametrize("reduction", ["deterministic", "atomic"])
@pytest.mark.parametrize("form", ["bf16", "fp16", *FORMATS])
def test_splits(form, reduction):
    options = FORMATS.get(form, {"quant": form})
    for shape, split_k in (((1, 4, 1000, 136, 1), 3), ((9, 4, 416, 1000, 2), 8)):
        problem = random_problem(*shape, device="cuda", **options)
        run = {"impl": "triton", "split_k": split_k, "reduction": reduction}
        poison_allocator("cuda", shape[0] * shape[4] * shape[3] * 8, shape[0] * shape[2] * 4, value=1e30)
        first = fused_experts(*problem, **run)
        check(first, problem)
        if reduction == "deterministic":
            assert all(torch.equal(fused_experts(*problem, **run), first) for _ in range(20))


@pytest.mark.parametrize("reduction", ["deterministic", "atomic"])
@pytest.mark.parametrize("quant", ["bf16", "fp16", "fp8_block"])
@pytest.mark.parametrize("shape", [(1, 8, 4096, 256, 1), (16, 8, 7168, 192, 2), (4, 8, 4160, 160, 2)], ids=str)
def test_split_sums_start_at_zero_in_every_call_and_replay(shape, quant, reduction):
    problems = [random_problem(*shape, quant, "cuda", seed=seed) for seed in (1, 2)]
    x, routing = problems[0][0].clone(), Routing(*(t.clone() for t in problems[0][2]))
    weights = problems[0][1]
    run = {"impl": "triton", "split_k": 4, "reduction": reduction}
    fused_experts(x, weights, routing, **run)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fused_experts(x, weights, routing, **run)
    for new_x, _, new_routing in problems:
        x.copy_(new_x)
        routing.topk_weights.copy_(new_routing.topk_weights)
        routing.topk_ids.copy_(new_routing.topk_ids)
        replays = []
        for _ in range(3):
            out.fill_(float("nan"))
            graph.replay()
            replays.append(out.clone())
        for replay in replays:
            check(replay, (new_x, weights, new_routing))
            if reduction == "deterministic":
                assert torch.equal(replay, fused_experts(new_x, weights, new_routing, **run))


@pytest.mark.parametrize("tokens", [1, 2, 3, 17, 33, 120])
@pytest.mark.parametrize("reduction", ["deterministic", "atomic"])
def test_first_split_call_of_a_size_is_right(reduction, tokens):
    problem = random_problem(tokens, 6, 320 + tokens, 48, 2, "bf16", "cuda", seed=tokens)
    for _ in range(2):
        check(fused_experts(*problem, impl="triton", split_k=4, reduction=reduction), problem)


@pytest.mark.parametrize("form", FORMATS)
def test_tag_tells_gate_from_up_and_which_experts_ran(form):
    for num_experts in (5, 60):
        x, weights = tag_problem(17, num_experts, 256, 128, device="cuda", **FORMATS[form])
        ids = torch.stack([(torch.arange(5) * 7 + t) % num_experts for t in range(17)]).int()
        ids[0], ids[1, 0], ids[2, 0] = num_experts - 1, -1, num_experts + 1000
        routing = Routing(torch.full(ids.shape, 0.25, device="cuda"), ids.cuda())
        for config in ("default", "sorted", "inline", "token"):
            out = fused_experts(x, weights, routing, impl="triton", config=CONFIGS[config])
            want = tag_expected(routing, num_experts)[:, None].expand(out.shape)
            if form == "mxfp4":  # a scale that is a power of two puts a constant 20 % off: as stored, then
                want = oracle(x, weights, routing).cpu()
            torch.testing.assert_close(out.double().cpu(), want, rtol=0.1 if "int4" in form else 0.05, atol=0)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@pytest.mark.parametrize("form", FORMATS)
def test_graph_replay_equals_eager(form):
    for tokens in (1, 40, 300, 0):
        problems = [
            random_problem(tokens, 16, 128, 160, 4, device="cuda", seed=seed, **FORMATS[form]) for seed in (1, 2)
        ]
        x, routing = problems[0][0].clone(), Routing(*(t.clone() for t in problems[0][2]))
        weights = problems[0][1]
        fused_experts(x, weights, routing, impl="triton")
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = fused_experts(x, weights, routing, impl="triton")
        for new_x, _, new_routing in problems:
            x.copy_(new_x)
            routing.topk_weights.copy_(new_routing.topk_weights)
            routing.topk_ids.copy_(new_routing.topk_ids)
            out.fill_(float("nan"))
            graph.replay()
            assert torch.equal(out, fused_experts(new_x, weights, new_routing, impl="triton"))


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@pytest.mark.parametrize("form", ["fp8_tensor", "fp8_block", "int8", "int4-64-zeros", "nvfp4", "mxfp4"])
def test_compiled(form, mode):
    torch._dynamo.reset()
    problem = random_problem(9, 5, 256, 96, 3, device="cuda", **FORMATS[form])
    run = torch.compile(
        lambda x, routing: fused_experts(x, problem[1], routing, impl="triton"), fullgraph=True, mode=mode
    )
    for _ in range(3):
        torch.compiler.cudagraph_mark_step_begin()
        out = run(problem[0], problem[2]).clone()
    assert out.stride() == (256, 1)
    assert torch.equal(out, fused_experts(*problem, impl="triton"))


@pytest.mark.parametrize("hostile", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("form", ["fp8_tensor", "fp8_channel", "fp8_block", "int8", "nvfp4"])
def test_padding_rows_do_not_reach_real_rows(form, hostile):
    x, weights, routing = random_problem(8, 6, 256, 96, 2, device="cuda", **FORMATS[form])
    routing.topk_ids[5:] = -1
    clean, dirty = x.clone(), x.clone()
    clean[5:], dirty[5:] = 0.0, hostile
    for config in ("sorted", "inline", "token"):
        run = {"impl": "triton", "config": CONFIGS[config]}
        got = fused_experts(dirty, weights, routing, **run)
        assert torch.equal(got[:5], fused_experts(clean, weights, routing, **run)[:5])
        assert torch.isfinite(got).all()


@pytest.mark.parametrize("form", FORMATS)
def test_zero_rows_and_experts_give_zero(form):
    x, _, routing = random_problem(9, 4, 256, 160, 2, device="cuda", **FORMATS[form])
    generator = torch.Generator().manual_seed(3)
    w1, w2 = torch.randn(4, 320, 256, generator=generator) / 16, torch.randn(4, 256, 160, generator=generator) / 13
    w1[1], w2[2, 5], w1[3, 128:256, :128] = 0.0, 0.0, 0.0
    weights = ExpertWeights.from_dense(w1.cuda(), w2.cuda(), **FORMATS[form])
    x[3] = 0.0
    whole = fused_experts(x, weights, routing, impl="triton")
    assert not whole[3].any()
    only = Routing(torch.ones(9, 1, device="cuda"), torch.ones(9, 1, dtype=torch.int32, device="cuda"))
    assert not fused_experts(x, weights, only, impl="triton").any()
    check(whole, (x, weights, routing))


@pytest.mark.parametrize(("columns", "split_k"), [(1600 * 8, 8), (7168, 4), (1408, 8), (2880, 2), (1600 * 8, 1)])
@pytest.mark.parametrize("form", ["fp8_block", "int4-32", "nvfp4"])
def test_split_of_columns_that_are_no_multiple(form, split_k, columns):
    for tokens in (1, 8):
        problem = random_problem(tokens, 2, columns, 128, 1, device="cuda", **FORMATS[form])
        check(fused_experts(*problem, impl="triton", split_k=split_k), problem)


@pytest.mark.parametrize("ffn", [64, 80, 96, 192, 320, 384])
def test_blocks_with_tails(ffn):
    for tokens in (3, 129):
        problem = random_problem(tokens, 128, 2048, ffn, 8, "fp8_block", "cuda")
        check(fused_experts(*problem, impl="triton"), problem)


@pytest.mark.parametrize("ffn", [2880, 1440, 720, 360])
def test_mxfp4_with_tails(ffn):
    for tokens in (1, 5, 130):
        problem = random_problem(tokens, 32, 2880, ffn, 4, "mxfp4", "cuda")
        check(fused_experts(*problem, impl="triton"), problem)


@pytest.mark.parametrize("tokens", [1, 4, 16, 17])
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_int4_groups(group_size, tokens):
    for hidden in (1344, 2048, 2880):
        for zero_points in (False, True):
            problem = random_problem(
                tokens, 4, hidden, 192, 2, "int4", "cuda", group_size=group_size, zero_points=zero_points
            )
            check(fused_experts(*problem, impl="triton"), problem)


def test_stack_of_weights_beyond_32_bits():
    # 40 experts of 2 * 7168 * 4096 weights each: more than 2^31 elements before the last expert begins.
    if torch.cuda.mem_get_info()[0] < 30 * 2**30:
        pytest.skip("needs 30 GiB of free device memory")

    def experts():
        for index in range(40):
            generator = torch.Generator("cuda").manual_seed(index % 3)
            w1 = torch.randn(2 * 7168, 4096, generator=generator, device="cuda") / 64
            yield w1, torch.randn(4096, 7168, generator=generator, device="cuda") / 84

    for quant in ("bf16", "fp8_block"):
        weights = ExpertWeights.from_experts(experts(), 40, quant)
        assert weights.w1.numel() > 2**31
        x = torch.randn(5, 4096, device="cuda", dtype=torch.bfloat16)
        for config in ("default", "sorted", "token"):
            outs = [
                fused_experts(
                    x,
                    weights,
                    Routing(torch.ones(5, 1, device="cuda"), torch.full((5, 1), e, dtype=torch.int32, device="cuda")),
                    impl="triton",
                    config=CONFIGS[config],
                )
                for e in (0, 39)  # 39 % 3 == 0: the same weights
            ]
            assert outs[0].any()
            assert torch.equal(outs[0], outs[1])
        del weights
        torch.cuda.empty_cache()
