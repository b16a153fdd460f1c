"""A step's kernels by their specification: the plain code's bits, refusals, and what the compiler makes of them."""

import pytest
import torch
from moe_kernels.step.api import (
    absorb_queries,
    add_rms_norm,
    expand_values,
    latent_turn_and_write,
    resolve_step_impl,
    route,
    router_logits,
    silu_mul,
    step_reasons,
    turn_and_write,
)
from moe_kernels.step.rules import TRITON_INTERPRETED
from step_kernel_problems import (
    DTYPES,
    cache_of,
    expect_rounded,
    expect_written,
    norm64,
    randn,
    strided,
    turn64,
    turn_of,
)

from workbench.models.network.norm import RMSNorm
from workbench.models.network.rope import turned

DTYPE = pytest.mark.parametrize("name", DTYPES)
SLOTS = torch.tensor([9, 2, 7])


@DTYPE
def test_rows_give_the_bits_of_a_network(name):
    x, delta, also = (randn(3, 77, dtype=DTYPES[name], seed=seed) for seed in range(3))
    norm = RMSNorm(1 + randn(77, seed=3).mul(0.2).to(DTYPES[name]), 1e-5)
    got = add_rms_norm(strided(x), delta, norm.weight, norm.eps, also_SD=also)
    assert torch.equal(got.sum_SD, x + (delta + also))
    assert torch.equal(got.normed_SD, norm(x + (delta + also)))
    expect_rounded(got.normed_SD, norm64(got.sum_SD, norm.weight, norm.eps), DTYPES[name])
    alone = add_rms_norm(x, None, norm.weight, norm.eps)
    assert alone.sum_SD is x
    assert torch.equal(alone.normed_SD, norm(x))
    gate, up = x[:, :76].chunk(2, dim=-1)
    assert torch.equal(silu_mul(x[:, :76]), torch.nn.functional.silu(gate) * up)


@DTYPE
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("order", ["plain", "turned", "gaps"])
def test_heads_turn_as_in_a_network(order, normed, name):
    dtype, turn = DTYPES[name], turn_of([3, 0, 1000], 6)
    qkv = strided(randn(3, 7 * 6, dtype=dtype))
    norms = [RMSNorm((1 + randn(6, seed=s).mul(0.3)).to(dtype), 1e-5) for s in (1, 2)] if normed else []
    k_cache, v_cache = (cache_of(3, 4, 2, 6, dtype=dtype, order=order) for _ in range(2))
    before = k_cache.clone()
    weights = {"q_norm": norms[0].weight, "k_norm": norms[1].weight, "eps": 1e-5} if normed else {}
    q, k, v = turn_and_write(qkv, turn, k_cache, v_cache, SLOTS, heads=3, kv_heads=2, **weights)
    every = qkv.unflatten(1, (7, 6))
    own_q, own_k = every[:, :3], every[:, 3:5]
    if normed:
        own_q, own_k = norms[0](own_q), norms[1](own_k)
    assert torch.equal(q, turned(own_q, turn))
    assert torch.equal(k, turned(own_k, turn))
    assert torch.equal(v, every[:, 5:])
    expect_rounded(q, turn64(own_q, turn), dtype, slack=8.0)
    expect_written(k_cache, before, k, SLOTS)
    expect_written(v_cache, before, v, SLOTS)


@DTYPE
@pytest.mark.parametrize("apart", [False, True], ids=["q in down", "q apart"])
def test_latents_as_in_a_network(apart, name):
    dtype, turn, norm = DTYPES[name], turn_of([3, 0, 1000], 4), RMSNorm(randn(9, seed=4, dtype=DTYPES[name]), 1e-6)
    q, rest = randn(3, 2 * 7, dtype=dtype), randn(3, 13, dtype=dtype, seed=1)
    down = torch.cat((randn(3, 5, dtype=dtype, seed=2) if apart else q, rest), 1)
    cache = cache_of(3, 4, 13, dtype=dtype, order="gaps")
    before = cache.clone()
    got = latent_turn_and_write(
        strided(down), turn, cache, SLOTS, heads=2, nope_dim=3, kv_norm=norm.weight, eps=1e-6,
        q_SM=strided(q) if apart else None,
    )  # fmt: skip
    every = q.unflatten(1, (2, 7))
    assert torch.equal(got.q_nope_SHN, every[..., :3])
    assert torch.equal(got.q_SHL[..., 9:], turned(every[..., 3:], turn))
    assert torch.equal(got.latent_SL[:, :9], norm(rest[:, :9]))
    assert torch.equal(got.latent_SL[:, None, 9:], turned(rest[:, None, 9:], turn))
    expect_written(cache, before, got.latent_SL, SLOTS)


@DTYPE
def test_products_of_heads(name):
    whole, q, mixed = (randn(*s, dtype=DTYPES[name], seed=i) for i, s in enumerate(((3, 9, 20), (5, 3, 6), (5, 3, 20))))
    w_uk, w_uv = whole.split([6, 3], dim=1)
    out = torch.full((5, 3, 22), float("nan"), dtype=DTYPES[name])
    absorb_queries(q, w_uk, out[..., :20])
    assert bool(out[..., 20:].isnan().all())
    expect_rounded(out[..., :20], torch.einsum("shn,hnc->shc", q.double(), w_uk.double()), DTYPES[name], slack=24.0)
    got = expand_values(mixed, w_uv)
    expect_rounded(got, torch.einsum("shc,hvc->shv", mixed.double(), w_uv.double()), DTYPES[name], slack=80.0)


def test_a_router_reads_rows_in_float32():
    # In bf16 the second term would be lost.
    x = torch.tensor([[1.0, 2.0**-12], [2.0**-12, -1.0]], dtype=torch.bfloat16)
    weight = torch.tensor([[1.0, 1.0]])
    want = torch.tensor([[1.0 + 2.0**-12], [2.0**-12 - 1.0]])
    assert torch.equal(router_logits(x, weight), want)
    weights, ids = route(x, torch.cat((weight, -weight)), 1, renormalize=True)
    assert ids.tolist() == [[0], [1]]
    assert weights.tolist() == [[1.0], [1.0]]


def test_refusals_name_the_argument():
    x, slots, turn = torch.zeros(3, 16), SLOTS, turn_of([1, 2, 3], 4)
    caches = cache_of(3, 4, 1, 4, dtype=torch.float32), cache_of(3, 4, 1, 4, dtype=torch.float32)
    heads = {"heads": 2, "kv_heads": 1}
    latent = {"heads": 1, "nope_dim": 5, "kv_norm": torch.zeros(3), "eps": 1e-6}
    latent_cache = torch.zeros(3, 4, 7)
    for sentence, refused in {
        r"weight_D must be \[16\]; got \[3\]": lambda: add_rms_norm(x, x, torch.zeros(3), 1e-6),
        "delta_SD must have the dtype of x_SD": lambda: add_rms_norm(x, x.half(), torch.zeros(16), 1e-6),
        "also_SD must come with delta_SD": lambda: add_rms_norm(x, None, torch.zeros(16), 1e-6, also_SD=x),
        "x_SD must be of fp32, bf16, fp16": lambda: add_rms_norm(x.double(), None, torch.zeros(16), 1e-6),
        r"gate_up_SF2 must be \[S, 2 F\]": lambda: silu_mul(x[:, :5]),
        "impl must be one of reference, triton; got 'cuda'": lambda: silu_mul(x, impl="cuda"),
        "a multiple of 5 heads": lambda: turn_and_write(x, turn, *caches, slots, heads=3, kv_heads=1),
        r"turn's cos must be \[3, 1, 4\]": lambda: turn_and_write(x, turn_of([1, 2], 4), *caches, slots, **heads),
        "turn must have one even size": lambda: latent_turn_and_write(
            x, (torch.zeros(3, 1, 3),) * 2, latent_cache, slots, **latent
        ),
        "slots_S must be int64 or int32": lambda: turn_and_write(x, turn, *caches, slots.float(), **heads),
        r"k_cache must be \[pages, page_size, 1, 4\]": lambda: turn_and_write(
            x, turn, caches[0][..., :3], caches[1], slots, **heads
        ),
        "must have the same pages": lambda: turn_and_write(x, turn, caches[0][:1], caches[1], slots, **heads),
        "q_norm and k_norm must be given together": lambda: turn_and_write(
            x, turn, *caches, slots, **heads, q_norm=torch.ones(4)
        ),
        "v_cache must be torch.float32": lambda: turn_and_write(x, turn, caches[0], caches[1].half(), slots, **heads),
        r"latent_cache must be \[pages, page_size, 7\]": lambda: latent_turn_and_write(
            x, turn, latent_cache[..., :6], slots, **latent
        ),
        r"q_SM must be \[3, 9\]": lambda: latent_turn_and_write(x, turn, latent_cache, slots, **latent, q_SM=x),
        r"down_SN must be \[S, 16\]": lambda: latent_turn_and_write(x[:, 1:], turn, latent_cache, slots, **latent),
        r"w_uk_HNC must be \[2, 4, C\]": lambda: absorb_queries(
            torch.zeros(3, 2, 4), torch.zeros(2, 5, 6), torch.zeros(3, 2, 6)
        ),
        "q_SHC_out must be": lambda: absorb_queries(torch.zeros(3, 2, 4), torch.zeros(2, 4, 6), torch.zeros(3, 2, 7)),
        r"w_uv_HVC must be \[2, V, 4\]": lambda: expand_values(torch.zeros(3, 2, 4), torch.zeros(2, 6, 5)),
        r"weight_ED must be \[S, 16\]": lambda: router_logits(x, torch.zeros(4, 15)),
    }.items():
        with pytest.raises(ValueError, match=sentence):
            refused()


def test_what_runs_where_is_told():
    assert resolve_step_impl(None, "cpu") == "reference"
    assert step_reasons("reference", "cpu") == []
    if not TRITON_INTERPRETED:
        assert "cuda, not cpu" in step_reasons("triton", "cpu")[0]
        with pytest.raises(NotImplementedError, match="'triton' does not run"):
            silu_mul(torch.zeros(1, 2), impl="triton")


def layer(x, delta, weight, qkv, turn, k_cache, v_cache, slots, down, kv_norm, cache, w, gate):
    """Every function once, each result used."""
    total, normed = add_rms_norm(x, delta, weight, 1e-6)
    q, k, _ = turn_and_write(qkv, turn, k_cache, v_cache, slots, heads=2, kv_heads=1)
    latent = latent_turn_and_write(down, turn, cache, slots, heads=2, nope_dim=3, kv_norm=kv_norm, eps=1e-6)
    absorb_queries(latent.q_nope_SHN, w[:, :3], latent.q_SHL[..., :5])
    values = expand_values(latent.q_SHL[..., :5], w[:, 3:])
    return total, silu_mul(normed), q, k, latent.latent_SL, latent.q_SHL, values, *route(normed, gate, 2)


def arguments(seed):
    sizes = ((3, 8), (3, 8), (8,), (3, 16), (3, 14 + 9), (5,), (2, 5, 5), (6, 8))
    x, delta, weight, qkv, down, kv_norm, w, gate = (randn(*s, seed=seed + i) for i, s in enumerate(sizes))
    caches = [torch.zeros(3, 4, 1, 4), torch.zeros(3, 4, 1, 4), torch.zeros(3, 4, 9)]
    return x, delta, weight, qkv, turn_of([1, 2, seed], 4), *caches[:2], SLOTS, down, kv_norm, caches[2], w, gate


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("through_ops", [False, True], ids=["reference", "ops"])
def test_a_compiled_layer_is_one_graph(through_ops, monkeypatch):
    if through_ops:
        # On the CPU the ops run their specification: what stays is how the compiler deals with what they write.
        for module in ("rows", "turn", "heads", "router"):
            monkeypatch.setattr(f"moe_kernels.step.{module}.resolve_step_impl", lambda *_: "triton")
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for seed in (0, 20):
        mine, its = arguments(seed), arguments(seed)
        for a, b in zip(layer(*mine), compiled(*its), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
        for index in (5, 6, 10):
            assert torch.equal(mine[index], its[index])
            assert bool(its[index].any())
    torch._dynamo.reset()
