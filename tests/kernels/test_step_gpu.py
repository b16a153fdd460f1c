"""The kernels of a step on an NVIDIA GPU: all cases compiled, real sizes, early starts, graphs and the compiler."""

import os
import pathlib
import subprocess
import sys

import pytest
import torch
from moe_kernels.step.api import (
    absorb_queries,
    add_rms_norm,
    expand_values,
    latent_turn_and_write,
    router_logits,
    silu_mul,
    turn_and_write,
)
from step_kernel_problems import cache_of, randn, steps_apart, turn_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # Inductor's first import uses a deprecated part of torch.
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
]

CASES = pathlib.Path(__file__).with_name("step_kernel_cases.py")
BF16 = torch.bfloat16


def test_cases_pass_compiled():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:logging", str(CASES)]
    # Of what this process was told, neither to interpret nor to be a worker of another pytest.
    environment = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET" and not n.startswith("PYTEST_")}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    assert "skipped" not in result.stdout


def latent_step(rows, heads=16, seed=0):
    """Inputs of what stands around absorbed attention, as in DeepSeek-V2-Lite."""
    down = randn(rows, heads * 192 + 576, dtype=BF16, seed=seed).cuda()
    x, delta = (randn(rows, 2048, dtype=BF16, seed=seed + s).cuda() for s in (1, 2))
    weight, norm = (torch.ones(size, dtype=BF16, device="cuda") for size in (2048, 512))
    w = randn(heads, 256, 512, dtype=BF16, scale=0.05).cuda()
    gate = randn(64, 2048, scale=0.02, seed=7).cuda()
    cache = torch.zeros(2 * rows, 64, 576, dtype=BF16, device="cuda")
    slots = torch.arange(rows, device="cuda") * 128 + 5
    return [x, delta, weight, down, turn_of(list(range(rows)), 64, "cuda"), cache, slots, norm, w, gate]


def run_step(x, delta, weight, down, turn, cache, slots, norm, w, gate, impl="triton", pdl=False):
    how = {"impl": impl, "pdl": pdl}
    total, normed = add_rms_norm(x, delta, weight, 1e-6, **how)
    got = latent_turn_and_write(down, turn, cache, slots, heads=w.shape[0], nope_dim=128, kv_norm=norm, eps=1e-6, **how)
    absorb_queries(got.q_nope_SHN, w[:, :128], got.q_SHL[..., :512], **how)
    values = expand_values(got.q_SHL[..., :512], w[:, 128:], **how)
    return total, normed, got.q_SHL, got.latent_SL, values, silu_mul(normed, **how), router_logits(normed, gate, **how)


@pytest.mark.parametrize("rows", [1, 8, 32, 512])
def test_real_sizes(rows):
    arguments = latent_step(rows)
    got, cache = run_step(*arguments), arguments[5].clone()
    arguments[5].zero_()
    want = run_step(*arguments, impl="reference")
    assert torch.equal(got[0], want[0])
    for index in (1, 3):
        assert steps_apart(got[index], want[index]) <= 1
    assert torch.equal(got[2][..., 512:], want[2][..., 512:])
    # Sums near zero have no last bit to agree by: against the size of what they may be.
    for index in (2, 4, 5):
        assert (got[index].float() - want[index].float()).abs().max() <= 2.0**-7 * want[index].float().abs().max()
        assert (got[index] != want[index]).float().mean() < 0.05
    assert (got[6] - want[6]).abs().max() <= 1e-5 * want[6].abs().max() + 1e-2 * (want[1] != got[1]).any()
    assert steps_apart(cache, arguments[5]) <= 1


@pytest.mark.parametrize(("heads", "kv_heads", "normed"), [(32, 8, False), (32, 4, True)])
@pytest.mark.parametrize("rows", [1, 512])
def test_plain_heads_of_real_sizes(rows, heads, kv_heads, normed):
    qkv, turn = randn(rows, (heads + 2 * kv_heads) * 128, dtype=BF16).cuda(), turn_of(list(range(rows)), 128, "cuda")
    norms = [(1 + randn(128, seed=s).mul(0.2)).to(BF16).cuda() for s in (1, 2)] if normed else [None, None]
    slots = torch.randperm(rows * 2, generator=torch.Generator().manual_seed(0))[:rows].cuda()
    results = []
    for impl in ("triton", "reference"):
        caches = [cache_of(-(-rows * 2 // 16), 16, kv_heads, 128, dtype=BF16, device="cuda") for _ in range(2)]
        out = turn_and_write(
            qkv, turn, *caches, slots, heads=heads, kv_heads=kv_heads, q_norm=norms[0], k_norm=norms[1], eps=1e-6,
            impl=impl,
        )  # fmt: skip
        results.append((*out, *(cache.nan_to_num() for cache in caches)))
    for got, want in zip(*results, strict=True):
        if normed:
            assert (got.float() - want.float()).abs().max() <= 2.0**-7 * want.float().abs().max()
            assert (got != want).float().mean() < 0.02
        else:
            assert torch.equal(got, want)


@pytest.mark.parametrize("pdl", [False, True])
def test_a_replay_equals_eager(pdl):
    static, other = latent_step(8), latent_step(8, seed=50)
    run_step(*static, pdl=pdl)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run_step(*static, pdl=pdl)
    for source in (other, latent_step(8, seed=90)):
        for index in (0, 1, 3):
            static[index].copy_(source[index])
        static[5].zero_()
        graph.replay()
        want = run_step(*source)
        for a, b in zip(out, want, strict=True):
            assert torch.equal(a, b)
        assert torch.equal(static[5], source[5])


def test_compiled_by_inductor():
    torch._dynamo.reset()
    compiled = torch.compile(run_step, fullgraph=True)
    mine, its = latent_step(4), latent_step(4)
    for a, b in zip(run_step(*mine), compiled(*its), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(mine[5], its[5])
