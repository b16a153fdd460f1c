"""fused_experts on an NVIDIA GPU: the Triton kernels and torch's grouped_mm, eager, compiled and in CUDA graphs."""

import pytest
import torch
from moe_kernels import Quant, Routing, fused_experts, moe_align, resolve_impl, select_experts, supports_impl
from moe_kernels.align.reference import align_reference
from moe_kernels.experts.layer import StoredLayer
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

BASE = {
    "BLOCK_SIZE_M": 16,
    "BLOCK_SIZE_N": 32,
    "BLOCK_SIZE_K": 64,
    "GROUP_SIZE_M": 4,
    "num_warps": 4,
    "num_stages": 3,
}
INLINE = {**BASE, "LAYOUT": "inline"}
TOKEN = {**BASE, "LAYOUT": "token", "BLOCK_SIZE_M": 1}
CONFIGS = {
    "default": None,
    "sorted": BASE,
    "inline": INLINE,
    "token": TOKEN,
    "token-sorted": {"up": TOKEN, "down": BASE},
    "inline-pdl": {**INLINE, "PDL": True},
    "token-pdl": {**TOKEN, "PDL": True},
    "sorted-pdl": {**BASE, "PDL": True},
    "64": {**BASE, "BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 64},
    "128": {**BASE, "BLOCK_SIZE_M": 128, "BLOCK_SIZE_N": 128, "num_warps": 8},
}
# T, E, D, F, K
ODD = [
    (1, 1, 1, 1, 1),
    (1, 5, 72, 40, 3),
    (17, 3, 40, 23, 2),
    (5, 60, 96, 56, 6),
    (33, 7, 129, 65, 7),
    (300, 64, 256, 136, 6),
]
# Sizes of real models in the number of experts and top_k, narrower.
MODELS = [(8, 512, 1792, 2), (128, 512, 192, 8), (64, 512, 352, 6), (256, 512, 256, 8)]


def compiled(impl, **options):
    torch._dynamo.reset()
    return torch.compile(lambda x, w, r: fused_experts(x, w, r, impl=impl), fullgraph=True, **options)


def check(out, problem):
    x, _weights, _routing = problem
    assert out.dtype == x.dtype
    assert relative_error(out, oracle(*problem)) <= error_budget(*problem)


# Each case compiles kernels of its own: every configuration in bf16, the main ones in the other dtypes.
@pytest.mark.parametrize("shape", ODD, ids=str)
@pytest.mark.parametrize(
    ("config", "quant"),
    [*((c, "bf16") for c in CONFIGS), *((c, q) for c in list(CONFIGS)[:2] for q in ("fp16", "fp32"))],
)
def test_triton_on_odd_shapes(config, shape, quant):
    problem = random_problem(*shape, quant, "cuda")
    if config.startswith("inline") and shape[0] * shape[4] > 1024:
        with pytest.raises(ValueError, match="takes up to 1024 routed rows"):
            fused_experts(*problem, impl="triton", config=CONFIGS[config])
        return
    before = problem[0].clone()
    check(fused_experts(*problem, impl="triton", config=CONFIGS[config]), problem)
    assert torch.equal(problem[0], before)


@pytest.mark.parametrize(
    ("num_tokens", "quant"),
    [*((m, "bf16") for m in (1, 8, 32, 128, 1024, 4096)), *((m, q) for m in (8, 1024) for q in ("fp16", "fp32"))],
)
@pytest.mark.parametrize("model", MODELS, ids=str)
@pytest.mark.parametrize("impl", ["triton", "torch_grouped_mm"])
def test_models(impl, model, num_tokens, quant):
    problem = random_problem(num_tokens, *model, quant, "cuda")
    if impl == "torch_grouped_mm" and quant != "bf16":
        with pytest.raises(NotImplementedError, match="takes bf16 only"):
            fused_experts(*problem, impl=impl)
        return
    check(fused_experts(*problem, impl=impl), problem)


@pytest.mark.parametrize("layout", ["sorted", "inline"])
@pytest.mark.parametrize("quant", ["bf16", "fp16"])
def test_tensor_maps(quant, layout):
    problem = random_problem(37, 5, 72, 40, 3, quant, "cuda")
    check(fused_experts(*problem, impl="triton", config={**BASE, "USE_TMA": True, "LAYOUT": layout}), problem)


def test_first_choice_is_triton():
    assert resolve_impl(*random_problem(3, 4, 16, 8, 2, "bf16", "cuda")) == "triton"


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("num_experts", [1, 60])
def test_tag(num_experts, config):
    x, weights = tag_problem(17, num_experts, 64, 64, "bf16", "cuda")
    top_k = min(6, num_experts)
    ids = torch.stack([(torch.arange(top_k) * 7 + t) % num_experts for t in range(17)]).int()
    ids[0], ids[1], ids[2, 0], ids[3, 0] = num_experts - 1, 0, -1, num_experts + 1000
    ids[4] = 2**31 - 1
    routing = Routing(torch.full(ids.shape, 0.25, device="cuda"), ids.cuda())
    poison_allocator("cuda", *(17 * top_k * 64 * 2,) * 2, 17 * 64 * 2)
    out = fused_experts(x, weights, routing, impl="triton", config=CONFIGS[config])
    want = tag_expected(routing, num_experts)[:, None].expand(out.shape)
    torch.testing.assert_close(out.double().cpu(), want, rtol=1e-2, atol=0)


@pytest.mark.parametrize("value", [float("nan"), 1e30], ids=["nan", "1e30"])
@pytest.mark.parametrize("impl", ["triton", "torch_grouped_mm"])
@pytest.mark.parametrize("ids", [[3, 3], [0, 7], [-1, 7], [8, -5]], ids=str)
def test_dirty_memory_leaves_no_trace(ids, impl, value):
    x, weights, _ = random_problem(200, 8, 64, 32, 2, "bf16", "cuda")
    routing = Routing(torch.tensor([[0.25, 0.75]] * 200, device="cuda"), torch.tensor([ids] * 200, device="cuda").int())
    poison_allocator("cuda", *(200 * 2 * 64 * 2,) * 3, *(200 * 2 * 32 * 2,) * 3, 200 * 64 * 2, value=value)
    out = fused_experts(x, weights, routing, impl=impl)
    want = oracle(x, weights, routing)
    if not want.any():
        assert not out.any()
    else:
        assert relative_error(out, want) <= error_budget(x, weights, routing)


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 17, 33, 120, 1500])
def test_first_call_equals_second(num_tokens):
    problem = random_problem(num_tokens, 20, 128, 48, 4, "bf16", "cuda", seed=num_tokens)
    first = fused_experts(*problem, impl="triton")
    check(first, problem)
    assert all(torch.equal(fused_experts(*problem, impl="triton"), first) for _ in range(20))


# No tokens, no launch: torch warns of a graph that holds nothing, which is right here.
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@pytest.mark.parametrize("impl", ["triton", "torch_grouped_mm"])
@pytest.mark.parametrize("order", [(1, 40, 700), (700, 40, 1), (0, 3, 0)], ids=str)
def test_graph_replay_equals_eager(order, impl):
    _, weights, _ = random_problem(1, 16, 128, 48, 4, "bf16", "cuda")
    runs = []
    for num_tokens in order:
        problems = [random_problem(num_tokens, 16, 128, 48, 4, "bf16", "cuda", seed=seed) for seed in (1, 2)]
        x, routing = problems[0][0].clone(), Routing(*(t.clone() for t in problems[0][2]))
        fused_experts(x, weights, routing, impl=impl)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = fused_experts(x, weights, routing, impl=impl)
        runs.append((graph, x, routing, out, problems))
    for graph, x, routing, out, problems in runs + runs[::-1]:
        for new_x, _, new_routing in problems:
            x.copy_(new_x)
            routing.topk_weights.copy_(new_routing.topk_weights)
            routing.topk_ids.copy_(new_routing.topk_ids)
            for _ in range(3):
                out.fill_(float("nan"))
                graph.replay()
            assert torch.equal(out, fused_experts(new_x, weights, new_routing, impl=impl))


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_reference_refuses_capture():
    problem = random_problem(3, 4, 16, 8, 2, "bf16", "cuda")
    with (
        pytest.raises(NotImplementedError, match="which a CUDA graph cannot capture"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        fused_experts(*problem, impl="reference")
    assert resolve_impl(*problem, "reference") == "reference"


# inductor makes the pool of its graphs by capturing nothing, of which torch warns.
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("impl", ["triton", "torch_grouped_mm"])
def test_compiled_within_budget(impl, mode):
    run = compiled(impl, mode=mode)
    problem = random_problem(37, 8, 128, 48, 4, "bf16", "cuda")
    outs = []
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        outs.append(run(*problem).clone())
    for out in outs:
        check(out, problem)


def test_one_compiled_graph_serves_every_token_count():
    run = compiled("triton", dynamic=True)
    for num_tokens in (37, 2, 600, 5):
        problem = random_problem(num_tokens, 8, 128, 48, 4, "bf16", "cuda")
        assert torch.equal(run(*problem), fused_experts(*problem, impl="triton"))


def test_opcheck():
    for quant in Quant:
        x, weights, routing = random_problem(7, 5, 64, 48, 3, quant.value, "cuda")
        stored = [weights.tensors().get(name) for name in StoredLayer._fields[:10]]
        args = (x, *stored, quant.value, 48, weights.group_size, *routing, False, 0, False, [])
        torch.library.opcheck(torch.ops.moe_kernels.fused_experts_triton.default, args)
    torch.library.opcheck(torch.ops.moe_kernels.moe_align.default, (routing.topk_ids, 5, 16))


@pytest.mark.parametrize(("num_tokens", "top_k", "num_experts", "block_m"), [
    (1, 8, 128, 16), (700, 6, 60, 32), (3, 2, 1, 16), (513, 8, 512, 16), (4096, 8, 512, 64), (5000, 22, 256, 128),
    (65536, 1, 513, 64), (0, 4, 8, 16),
])  # fmt: skip
def test_alignment(num_tokens, top_k, num_experts, block_m):
    generator = torch.Generator().manual_seed(num_tokens)
    ids = torch.randint(-2, num_experts + 2, (num_tokens, top_k), generator=generator).int()
    poison_allocator("cuda", num_tokens * top_k * 4, value=1e30)
    for got, want in zip(
        moe_align(ids.cuda(), num_experts, block_m), align_reference(ids, num_experts, block_m), strict=True
    ):
        assert torch.equal(got.cpu(), want)


@pytest.mark.parametrize("num_tokens", [87_382, 100_000])
def test_offsets_beyond_32_bits(num_tokens):
    hidden, ffn, top_k = 4096, 2048, 6
    if torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.skip("needs 12 GiB of free device memory")
    _, weights, _ = random_problem(1, 8, hidden, ffn, top_k, "bf16", "cuda")
    x = torch.randn(num_tokens, hidden, device="cuda", dtype=torch.bfloat16)
    routing = select_experts(torch.randn(num_tokens, 8, device="cuda"), top_k)
    out = fused_experts(x, weights, routing, impl="triton")
    for rows in (slice(0, 40), slice(num_tokens - 40, num_tokens)):
        part = Routing(routing.topk_weights[rows], routing.topk_ids[rows])
        assert relative_error(out[rows], oracle(x[rows], weights, part)) <= error_budget(x[rows], weights, part)


def test_supports_agrees_with_what_runs():
    ask = {"device_type": "cuda", "num_experts": 8, "hidden_size": 64, "intermediate_size": 32, "top_k": 2}
    assert supports_impl("triton", dtype="bf16", compile=True, graph=True, **ask) == []
    assert supports_impl("torch_grouped_mm", dtype="bf16", compile=True, graph=True, **ask) == []
    assert supports_impl("reference", dtype="bf16", **ask) == []


@pytest.mark.parametrize("num_experts", [1, 3, 5, 40, 60, 72, 160, 384, 513])
def test_counts_that_are_no_powers_of_two(num_experts):
    for top_k in sorted({k for k in (1, 3, 6, 7, 9, 10, num_experts) if k <= num_experts}):
        for num_tokens in (1, 5, 17):
            x, weights = tag_problem(num_tokens, num_experts, 64, 16, "bf16", "cuda")
            ids = (torch.arange(top_k) * 7 + torch.arange(num_tokens)[:, None]) % num_experts
            routing = Routing(torch.full(ids.shape, 1.0 / top_k, device="cuda"), ids.int().cuda())
            out = fused_experts(x, weights, routing, impl="triton")
            want = tag_expected(routing, num_experts)[:, None].expand(out.shape)
            torch.testing.assert_close(out.double().cpu(), want, rtol=1.5e-2, atol=0)
