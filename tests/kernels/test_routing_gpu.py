"""The Triton gate on an NVIDIA GPU: the full grid of sizes, compiled, and in CUDA graphs."""

import os
import pathlib
import subprocess
import sys

import pytest
import torch
from moe_kernels import Routing, select_experts
from moe_kernels.routing.prepare import prepare_routing
from moe_kernels.routing.reference import prepare_reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # Inductor's first import uses a deprecated part of torch.
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
]

CASES = pathlib.Path(__file__).with_name("routing_cases.py")
V3 = {"scoring": "sigmoid", "num_expert_group": 8, "topk_group": 4, "renormalize": True, "routed_scaling_factor": 2.5}


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).cuda()


def check(got, want):
    assert torch.equal(got.topk_ids.cpu(), want.topk_ids.cpu())
    torch.testing.assert_close(got.topk_weights.cpu(), want.topk_weights.cpu(), rtol=1e-5, atol=1e-30)


def test_cases_pass_compiled():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:logging", str(CASES)]
    # Of what this process was told, neither to interpret nor to be a worker of another pytest.
    environment = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET" and not n.startswith("PYTEST_")}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    assert "skipped" not in result.stdout


@pytest.mark.parametrize("num_experts", [8, 16, 32, 48, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_every_top_k_up_to_16_against_torch(scoring, num_experts):
    logits = randn(37, num_experts, seed=num_experts)
    scores = logits.double().softmax(dim=-1) if scoring == "softmax" else logits.double().sigmoid()
    for top_k in range(1, min(16, num_experts) + 1):
        weights, ids = torch.topk(scores, top_k)
        for renormalize in (False, True):
            want = weights / weights.sum(dim=-1, keepdim=True) if renormalize else weights
            got = select_experts(logits, top_k, scoring=scoring, renormalize=renormalize, impl="triton")
            check(got, Routing(want.float(), ids.int()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("num_experts", "top_k"), [(8, 2), (64, 6), (128, 8), (256, 8), (384, 8), (512, 10)])
@pytest.mark.parametrize("num_tokens", [1, 33, 4096])
def test_models(num_tokens, num_experts, top_k, dtype):
    logits = randn(num_tokens, num_experts).to(dtype)
    got = select_experts(logits, top_k, renormalize=True)
    check(got, select_experts(logits, top_k, renormalize=True, impl="reference"))
    check(got, select_experts(logits.cpu(), top_k, renormalize=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 33, 4096])
def test_the_gate_of_deepseek_v3(num_tokens, dtype):
    logits, bias = randn(num_tokens, 256).to(dtype), 0.1 * randn(256, seed=1)
    got = select_experts(logits, 8, correction_bias=bias, **V3)
    want = select_experts(logits, 8, correction_bias=bias, impl="reference", **V3)
    # Choices and sums of groups that agree to float32 rounding may fall either way: at most a few tokens in thousands.
    same = (got.topk_ids == want.topk_ids).all(dim=-1)
    assert int((~same).sum()) <= num_tokens // 500
    torch.testing.assert_close(got.topk_weights[same], want.topk_weights[same], rtol=1e-5, atol=0)


def test_no_tokens_and_then_some():
    for num_tokens in (0, 1, 4096, 0):
        for top_k in (1, 2, 6, 8):
            logits = torch.randn(num_tokens, 64, device="cuda")
            check(select_experts(logits, top_k), select_experts(logits, top_k, impl="reference"))


# No tokens, no launch: torch warns of a graph that holds nothing, which is right here.
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@pytest.mark.parametrize("num_tokens", [0, 1, 37])
def test_graph_replay_equals_eager(num_tokens):
    inputs = [randn(num_tokens, 256, seed=seed) for seed in (1, 2)]
    bias = 0.1 * randn(256, seed=3)

    def route(logits):
        return prepare_routing(select_experts(logits, 8, correction_bias=bias, **V3), 256, 1)

    logits = inputs[0].clone()
    route(logits)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = route(logits)
    for new in inputs[::-1]:
        logits.copy_(new)
        out.topk_weights.fill_(float("nan"))
        out.topk_ids.fill_(-7)
        graph.replay()
        want = route(new)
        assert torch.equal(out.topk_ids, want.topk_ids)
        assert torch.equal(out.topk_weights, want.topk_weights)


def test_one_compiled_graph_serves_every_token_count():
    torch._dynamo.reset()

    def route(logits):
        return prepare_routing(select_experts(logits, 6, renormalize=True), 60, 2)

    compiled = torch.compile(route, fullgraph=True, dynamic=True)
    for num_tokens in (37, 2, 600, 5):
        got, want = compiled(randn(num_tokens, 60)), route(randn(num_tokens, 60))
        assert torch.equal(got.topk_ids, want.topk_ids)
        assert torch.equal(got.topk_weights, want.topk_weights)


def test_what_none_stands_for():
    logits = randn(3, 5000)
    with pytest.raises(NotImplementedError, match=r"^impl 'triton' does not run: The Triton gate takes up to 4096"):
        select_experts(logits, 3, impl="triton")
    check(select_experts(logits, 3), select_experts(logits.cpu(), 3))


def test_offsets_beyond_32_bits():
    num_tokens, num_experts = 2**23 + 5, 256
    if torch.cuda.mem_get_info()[0] < 8 * 2**30:
        pytest.skip("needs 8 GiB of free device memory")
    logits = torch.zeros(num_tokens, num_experts, dtype=torch.bfloat16, device="cuda")
    tail = randn(3, num_experts).bfloat16()
    logits[-3:] = tail
    got = select_experts(logits, 2)
    check(Routing(*(t[-3:] for t in got)), select_experts(tail, 2, impl="reference"))


def test_preparation_of_many_rows():
    ids = torch.randint(-2, 70, (4096, 8), generator=torch.Generator().manual_seed(0)).int()
    weights = torch.rand(4096, 8)
    got = prepare_routing(Routing(weights.cuda(), ids.cuda()), 64, 1)
    for a, b in zip(got, prepare_reference(weights, ids, 64, 1, None), strict=True):
        assert torch.equal(a.cpu(), b)
