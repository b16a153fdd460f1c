"""The Triton kernels of a step against float64 and against their specification.

test_step_interpreted.py runs this file in a process that interprets Triton; test_step_gpu.py in one that does not.
"""

import os

import pytest
import torch
from moe_kernels.step import launch
from moe_kernels.step.api import (
    absorb_queries,
    add_rms_norm,
    expand_values,
    latent_turn_and_write,
    route,
    router_logits,
    silu_mul,
    turn_and_write,
)
from moe_kernels.testing.oracle import poison_allocator
from step_kernel_problems import (
    DTYPES,
    cache_of,
    expect_rounded,
    expect_written,
    norm64,
    randn,
    steps_apart,
    strided,
    turn64,
    turn_of,
)

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
DTYPE = pytest.mark.parametrize("name", DTYPES)
# Three rows in pages of 4, not in order.
SLOTS = torch.tensor([9, 2, 7])


def on(*tensors):
    return [None if t is None else t.to(DEVICE) for t in tensors]


@DTYPE
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (3, 77), (2, 1), (5, 300)])
def test_add_rms_norm(rows, width, name):
    dtype = DTYPES[name]
    x, delta, also = on(*(randn(rows, width, dtype=dtype, seed=seed, scale=3.0) for seed in range(3)))
    (weight,) = on(1 + randn(width, seed=3).mul(0.2).to(dtype))
    before = x.clone()
    for given, both in ((x, False), (strided(x), True), (strided(x), False)):
        poison_allocator(DEVICE, x.nbytes, x.nbytes)
        got = add_rms_norm(given, strided(delta), weight, 1e-5, also_SD=also if both else None, impl="triton")
        added = (delta.double() + also.double()).to(dtype) if both else delta
        assert torch.equal(got.sum_SD, (x.double() + added.double()).to(dtype))
        expect_rounded(got.normed_SD, norm64(got.sum_SD, weight, 1e-5), dtype)
        plain = add_rms_norm(given, delta, weight, 1e-5, also_SD=also if both else None, impl="reference")
        assert torch.equal(plain.sum_SD, got.sum_SD)
        assert steps_apart(plain.normed_SD, got.normed_SD) <= (1 if dtype != torch.float32 else 8)
    alone = add_rms_norm(x, None, weight, 1e-5, impl="triton")
    assert alone.sum_SD is x
    expect_rounded(alone.normed_SD, norm64(x, weight, 1e-5), dtype)
    assert torch.equal(x, before)


@pytest.mark.parametrize("add", [False, True])
def test_a_row_wider_than_a_program(add, monkeypatch):
    x, delta, weight = on(randn(2, 201), randn(2, 201, seed=1), randn(201, seed=2))
    whole = add_rms_norm(x, delta if add else None, weight, 1e-6, impl="triton")
    monkeypatch.setattr(launch, "_WIDEST", 64)
    parts = add_rms_norm(x, delta if add else None, weight, 1e-6, impl="triton")
    assert torch.equal(parts.sum_SD, whole.sum_SD)
    expect_rounded(parts.normed_SD, norm64(whole.sum_SD, weight, 1e-6), torch.float32)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_value_that_is_not_finite_stays_in_its_row():
    x, weight = on(randn(4, 32, dtype=torch.bfloat16), torch.ones(32, dtype=torch.bfloat16))
    x[1, 3], x[2, 5] = float("nan"), float("inf")
    for run in (
        lambda t: add_rms_norm(t, t, weight, 1e-6, impl="triton").normed_SD,
        lambda t: silu_mul(t, impl="triton"),
    ):
        clean, got = run(x[::3]), run(x)
        assert torch.equal(clean, got[::3])
        assert bool(got[1].isnan().any())
    wide, (w,) = torch.cat((x, x, x)), on(randn(5, 32))
    for rows in (x, wide):
        logits = router_logits(rows, w, impl="triton")
        assert bool(logits[1].isnan().all())
        assert bool(logits[0].isfinite().all())


@DTYPE
@pytest.mark.parametrize(("rows", "channels"), [(1, 8), (3, 77), (11, 300)])
def test_silu_mul(rows, channels, name):
    dtype = DTYPES[name]
    (x,) = on(randn(rows, 2 * channels, dtype=dtype, scale=4.0))
    got = silu_mul(strided(x), impl="triton")
    gate, up = x.double().chunk(2, dim=-1)
    expect_rounded(got, gate / (1 + (-gate).exp()) * up, dtype, roundings=2.01)
    plain = silu_mul(x, impl="reference")
    if dtype == torch.float32:
        torch.testing.assert_close(got, plain, rtol=1e-6, atol=1e-30)
    else:
        # The exponential's last bit may turn one rounding of silu, which the product carries on.
        assert steps_apart(got, plain) <= 2
        assert (got != plain).float().mean() < 0.02


@DTYPE
@pytest.mark.parametrize("order", ["plain", "turned", "gaps"])
@pytest.mark.parametrize(("heads", "kv_heads", "size", "normed"), [(4, 2, 8, False), (3, 3, 6, True), (7, 1, 34, True)])
def test_turn_and_write(heads, kv_heads, size, normed, order, name):
    dtype = DTYPES[name]
    total = heads + 2 * kv_heads
    (qkv,) = on(strided(randn(3, total * size, dtype=dtype)))
    turn = turn_of([3, 0, 1000], size, DEVICE)
    q_norm, k_norm = on(*((1 + randn(size, seed=s).mul(0.3)).to(dtype) for s in (1, 2))) if normed else (None, None)
    k_cache, v_cache = (cache_of(3, 4, kv_heads, size, dtype=dtype, device=DEVICE, order=order) for _ in range(2))
    options = {"heads": heads, "kv_heads": kv_heads, "q_norm": q_norm, "k_norm": k_norm, "eps": 1e-5}
    plain = [k_cache.clone(), v_cache.clone()]
    want = turn_and_write(qkv, turn, *plain, SLOTS.to(DEVICE), **options, impl="reference")
    before = [k_cache.clone(), v_cache.clone()]
    q, k, v = turn_and_write(qkv, turn, k_cache, v_cache, SLOTS.to(DEVICE).int(), **options, impl="triton")
    expect_written(k_cache, before[0], k, SLOTS)
    expect_written(v_cache, before[1], v, SLOTS)
    every = qkv.unflatten(1, (total, size))
    assert torch.equal(v, every[:, heads + kv_heads :])
    for got, rows, weight, other in (
        (q, every[:, :heads], q_norm, want.q_SHC),
        (k, every[:, heads : heads + kv_heads], k_norm, want.k_SGC),
    ):
        if weight is None:
            expect_rounded(got, turn64(rows, turn), dtype, slack=8.0)
            assert torch.equal(got, other)
        else:
            normed_rows = norm64(rows, weight, 1e-5).to(dtype)
            # One step of a norm's rounding more, of either half.
            step = torch.finfo(dtype).eps / torch.finfo(torch.float32).eps * 4
            expect_rounded(got, turn64(normed_rows, turn), dtype, slack=8.0 + step)
            assert (got != other).float().mean() < (0.02 if dtype != torch.float32 else 0.8)


def test_a_slot_outside_of_the_cache_writes_nothing():
    turn = turn_of([1, 2, 3], 4, DEVICE)
    (qkv,) = on(randn(3, 4 * 4))
    # Caches with pages of others on both sides.
    k_pool, v_pool = (cache_of(5, 4, 1, 4, dtype=torch.float32, device=DEVICE) for _ in range(2))
    before = k_pool.clone()
    slots = torch.tensor([-1, 5, 12], device=DEVICE)
    _, k, v = turn_and_write(qkv, turn, k_pool[1:4], v_pool[1:4], slots, heads=2, kv_heads=1, impl="triton")
    expect_written(k_pool, before, k[1:2], slots[1:2] + 4)
    expect_written(v_pool, before, v[1:2], slots[1:2] + 4)
    pool = cache_of(5, 4, 6, dtype=torch.float32, device=DEVICE)
    before = pool.clone()
    options = {"heads": 1, "nope_dim": 0, "kv_norm": qkv[0, :2].clone(), "eps": 1e-6, "impl": "triton"}
    got = latent_turn_and_write(qkv[:, :10], turn, pool[1:4], slots, **options)
    expect_written(pool, before, got.latent_SL[1:2], slots[1:2] + 4)


def far_cache(*inner, dtype=torch.float16):
    """Two pages so far apart that offsets do not fit 32 bits; memory between them is not touched."""
    size = 1
    for n in inner:
        size *= n
    pool = torch.empty(2**31 + 8 * size, dtype=dtype, device=DEVICE)
    strides = [2**31, size]
    for n in inner:
        size //= n
        strides.append(size)
    cache = pool.as_strided((2, 3, *inner), strides)
    cache.fill_(float("nan"))
    return cache


def test_offsets_past_2_to_the_31st():
    slots = torch.tensor([5, 1], device=DEVICE)
    turn = turn_of([1, 2], 4, DEVICE)
    (qkv,) = on(randn(2, 4 * 4, dtype=torch.float16))
    cache = far_cache(1, 4)
    before, near = cache.clone(), cache_of(2, 3, 1, 4, dtype=torch.float16, device=DEVICE)
    _, k, v = turn_and_write(qkv, turn, cache, near, slots, heads=2, kv_heads=1, impl="triton")
    expect_written(cache, before, k, slots)
    near.fill_(float("nan"))
    cache.fill_(float("nan"))
    _, k, v = turn_and_write(qkv, turn, near, cache, slots, heads=2, kv_heads=1, impl="triton")
    expect_written(cache, before, v, slots)
    latent = cache.flatten(2)
    latent.fill_(float("nan"))
    before = latent.clone()
    got = latent_turn_and_write(
        qkv[:, :6], turn_of([1, 2], 2, DEVICE), latent, slots, heads=1, nope_dim=0,
        kv_norm=torch.ones(2, dtype=torch.float16, device=DEVICE), eps=0.0, impl="triton",
    )  # fmt: skip
    expect_written(latent, before, got.latent_SL, slots)


@DTYPE
@pytest.mark.parametrize("apart", [False, True], ids=["q in down", "q apart"])
@pytest.mark.parametrize(("heads", "nope", "rope", "rank", "order"), [
    (4, 6, 4, 16, "plain"), (3, 5, 2, 7, "turned"), (17, 1, 34, 40, "gaps"),
])  # fmt: skip
def test_latent_turn_and_write(heads, nope, rope, rank, order, apart, name):
    dtype = DTYPES[name]
    width, queries = rank + rope, heads * (nope + rope)
    front, q = randn(3, 9 if apart else queries, dtype=dtype), randn(3, queries, dtype=dtype, seed=1)
    (down,) = on(strided(torch.cat((front, randn(3, width, dtype=dtype, seed=2)), 1)))
    (q,) = on(strided(q)) if apart else [None]
    turn, (norm,) = turn_of([7, 0, 500], rope, DEVICE), on((1 + randn(rank, seed=3).mul(0.3)).to(dtype))
    cache = cache_of(3, 4, width, dtype=dtype, device=DEVICE, order=order)
    before, other_cache = cache.clone(), cache.clone()
    options = {"heads": heads, "nope_dim": nope, "kv_norm": norm, "eps": 1e-6, "q_SM": q}
    got = latent_turn_and_write(down, turn, cache, SLOTS.to(DEVICE), **options, impl="triton")
    want = latent_turn_and_write(down, turn, other_cache, SLOTS.to(DEVICE), **options, impl="reference")
    expect_written(cache, before, got.latent_SL, SLOTS)
    every = (down[:, :queries] if q is None else q).unflatten(1, (heads, nope + rope))
    assert torch.equal(got.q_nope_SHN, every[..., :nope])
    assert got.q_SHL.shape == (3, heads, width)
    expect_rounded(got.q_SHL[..., rank:], turn64(every[..., nope:], turn), dtype, slack=8.0)
    expect_rounded(got.latent_SL[:, :rank], norm64(down[:, -width:-rope], norm, 1e-6), dtype)
    expect_rounded(got.latent_SL[:, None, rank:], turn64(down[:, None, -rope:], turn), dtype, slack=8.0)
    assert torch.equal(got.q_SHL[..., rank:], want.q_SHL[..., rank:])
    assert torch.equal(got.latent_SL[:, rank:], want.latent_SL[:, rank:])
    assert steps_apart(got.latent_SL, want.latent_SL) <= (1 if dtype != torch.float32 else 8)


@DTYPE
@pytest.mark.parametrize(
    ("rows", "heads", "nope", "rank", "value"), [(1, 3, 6, 20, 5), (5, 2, 20, 37, 17), (35, 1, 70, 9, 3)]
)
def test_heads(rows, heads, nope, rank, value, name):
    dtype = DTYPES[name]
    # Views of one matrix, as a network keeps them, and of wider rows.
    (whole,) = on(randn(heads, nope + value, rank, dtype=dtype))
    w_uk, w_uv = whole.split([nope, value], dim=1)
    (q,) = on(randn(rows, heads, nope + 3, dtype=dtype, seed=1))
    (mixed,) = on(randn(heads, rows, rank, dtype=dtype, seed=2))
    q, mixed = q[..., :nope], mixed.transpose(0, 1)
    out = torch.full((rows, heads, rank + 4), float("nan"), dtype=dtype, device=DEVICE)
    absorb_queries(q, w_uk, out[..., :rank], impl="triton")
    assert bool(out[..., rank:].isnan().all())
    # Of a sum of n float32 products about n of their last bits.
    expect_rounded(out[..., :rank], torch.einsum("shn,hnc->shc", q.double(), w_uk.double()), dtype, slack=4.0 * nope)
    got = expand_values(mixed, w_uv, impl="triton")
    assert got.is_contiguous()
    expect_rounded(got, torch.einsum("shc,hvc->shv", mixed.double(), w_uv.double()), dtype, slack=4.0 * rank)
    plain = torch.empty_like(out)
    absorb_queries(q, w_uk, plain[..., :rank], impl="reference")
    assert (plain[..., :rank] != out[..., :rank]).float().mean() < (0.01 if dtype != torch.float32 else 1.0)


def test_heads_of_many_columns():
    # More inputs than a program holds at once, and more outputs.
    a, w = on(randn(1, 2, 1100), randn(2, 1100, 40, seed=1))
    for rows in (a, a.expand(2, 2, 1100)):
        out = torch.empty(rows.shape[0], 2, 40, device=DEVICE)
        absorb_queries(rows, w, out, impl="triton")
        expect_rounded(out, torch.einsum("shn,hnc->shc", rows.double(), w.double()), torch.float32, slack=4400.0)


@DTYPE
@pytest.mark.parametrize(
    ("rows", "experts", "width"), [(1, 5, 70), (3, 8, 2100), (8, 3, 33), (21, 18, 300), (70, 40, 65)]
)
def test_router_logits(rows, experts, width, name):
    (x,) = on(randn(rows, width, dtype=DTYPES[name]))
    (weight,) = on(randn(experts, width, seed=1, scale=width**-0.5))
    before = x.clone()
    poison_allocator(DEVICE, rows * experts * 4, 2 * rows * experts * 4)
    got = router_logits(strided(x), strided(weight), impl="triton")
    want = x.double() @ weight.double().T
    assert got.dtype == torch.float32
    # Within twice plain float32 code and a band of its roundings.
    plain = ((x.float() @ weight.T).double() - want).abs().max()
    assert (got.double() - want).abs().max() <= 2 * (plain + 2.0**-24 * width**0.5)
    assert torch.equal(got, router_logits(x, weight, impl="triton"))
    assert torch.equal(x, before)


def test_the_weight_of_a_router_in_any_dtype():
    x, weight = on(randn(2, 65, dtype=torch.bfloat16), randn(6, 65, seed=1, dtype=torch.bfloat16))
    assert torch.equal(router_logits(x, weight, impl="triton"), router_logits(x, weight.float(), impl="triton"))


def test_route_chooses_as_its_logits_say():
    x, weight, bias = on(randn(4, 40), randn(16, 40, seed=1), randn(16, seed=2))
    rule = {
        "scoring": "sigmoid", "renormalize": True, "correction_bias": bias, "num_expert_group": 4, "topk_group": 2,
        "routed_scaling_factor": 2.5,
    }  # fmt: skip
    got, want = (route(x, weight, 3, **rule, impl=impl) for impl in ("triton", "reference"))
    assert torch.equal(got.topk_ids, want.topk_ids)
    torch.testing.assert_close(got.topk_weights, want.topk_weights, rtol=1e-5, atol=1e-6)


def test_no_rows():
    def empty(*shape):
        return torch.empty(*shape, dtype=torch.float16, device=DEVICE)

    turn, slots = turn_of([], 4, DEVICE), torch.empty(0, dtype=torch.int64, device=DEVICE)
    assert add_rms_norm(empty(0, 9), empty(0, 9), empty(9), 1e-6, impl="triton").normed_SD.shape == (0, 9)
    assert silu_mul(empty(0, 6), impl="triton").shape == (0, 3)
    got = turn_and_write(
        empty(0, 16), turn, empty(2, 3, 1, 4), empty(2, 3, 1, 4), slots, heads=2, kv_heads=1, impl="triton"
    )
    assert [tuple(t.shape) for t in got] == [(0, 2, 4), (0, 1, 4), (0, 1, 4)]
    got = latent_turn_and_write(
        empty(0, 24), turn, empty(2, 3, 8), slots, heads=2, nope_dim=4, kv_norm=empty(4), eps=1e-6, impl="triton"
    )
    assert [tuple(t.shape) for t in got] == [(0, 2, 4), (0, 2, 8), (0, 8)]
    absorb_queries(empty(0, 2, 4), empty(2, 4, 8), empty(0, 2, 8), impl="triton")
    assert expand_values(empty(0, 2, 8), empty(2, 3, 8), impl="triton").shape == (0, 2, 3)
    assert router_logits(empty(0, 6), empty(5, 6), impl="triton").shape == (0, 5)


def test_opchecks():
    op = torch.ops.moe_kernels
    x, delta, weight, gate = on(randn(3, 8), randn(3, 8, seed=1), randn(8, seed=2), randn(5, 8, seed=3))
    slots, turn = SLOTS.to(DEVICE), turn_of([1, 2, 3], 4, DEVICE)
    k_cache, v_cache, latent, q_out = (
        torch.zeros(*shape, device=DEVICE) for shape in ((3, 4, 1, 4), (3, 4, 1, 4), (3, 4, 7), (3, 2, 7))
    )
    qkv, q, down, w = on(randn(3, 16), randn(3, 12), randn(3, 10), randn(2, 4, 7))
    check = torch.library.opcheck
    check(op.rms_norm.default, (x, weight, 1e-6, False))
    check(op.add_rms_norm.default, (x, delta, None, weight, 1e-6, False))
    check(op.add_rms_norm.default, (x, delta, delta[:, :], weight, 1e-6, False))
    check(op.silu_mul.default, (x, False))
    check(op.turn_and_write.default, (qkv, *turn, k_cache, v_cache, slots, 2, 1, None, None, 0.0, False))
    norms = (weight[:4], weight[4:].clone())
    check(op.turn_and_write.default, (qkv, *turn, k_cache, v_cache, slots, 2, 1, *norms, 1e-6, False))
    check(op.latent_turn_and_write.default, (q, down, *turn, weight[:3].clone(), latent, q_out, slots, 2, 1e-6, False))
    check(op.head_products.default, (q.view(3, 2, 6)[..., :4], w, q_out, False))
    check(op.router_logits.default, (x, gate, False))
