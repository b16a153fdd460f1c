"""Cases for Triton's interpreter; test_interpreted.py runs this file in a process that interprets.

The interpreter multiplies bf16 wrongly, so the dtypes here are float32 and float16.
"""

import pytest
import torch
from moe_kernels import Routing, fused_experts, moe_align, resolve_impl, supports_impl
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

BASE = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 16, "BLOCK_SIZE_K": 16, "GROUP_SIZE_M": 2, "num_warps": 4, "num_stages": 2}
INLINE = {**BASE, "LAYOUT": "inline"}
TOKEN = {**BASE, "LAYOUT": "token", "BLOCK_SIZE_M": 1}
CONFIGS = {
    "default": None,
    "sorted": BASE,
    "inline": INLINE,
    "token": TOKEN,
    "token-sorted": {"up": TOKEN, "down": BASE},
    "inline-token": {"up": INLINE, "down": TOKEN},
    "wide-tile": {**BASE, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1},
}
# T, E, D, F, K
SHAPES = [
    (1, 1, 1, 1, 1),
    (1, 5, 40, 23, 3),
    (9, 3, 24, 16, 2),
    (2, 60, 16, 8, 6),
    (8, 4, 33, 17, 4),
    (21, 2, 8, 7, 1),
]


# One of each layout; the interpreter takes a second or so a case.
@pytest.fixture(params=["sorted", "inline", "token"])
def config(request):
    return CONFIGS[request.param]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_within_budget(shape, name):
    quant = "fp16" if shape[0] % 2 else "fp32"
    x, weights, routing = random_problem(*shape, quant)
    before = x.clone()
    out = fused_experts(x, weights, routing, impl="triton", config=CONFIGS[name])
    assert torch.equal(x, before)
    assert out.dtype == x.dtype
    assert relative_error(out, oracle(x, weights, routing)) <= error_budget(x, weights, routing)


@pytest.mark.parametrize("bad", [-1, 5, 2**31 - 1])
def test_ids_outside_add_nothing(config, bad):
    x, weights = tag_problem(6, 5, 16, 16)
    ids = torch.tensor([[4, bad, 0], [bad, 1, 1], [bad, bad, bad], [0, 4, 4], [bad, 4, bad], [4, 4, 4]]).int()
    known = (ids >= 0) & (ids < 5)
    routing = Routing(torch.where(known, torch.tensor([0.5, 0.125, 0.25]), float("nan")), ids)
    poison_allocator("cpu", 18 * 16 * 4, 18 * 16 * 4, 6 * 16 * 4)
    out = fused_experts(x, weights, routing, impl="triton", config=config)
    want = tag_expected(routing, 5)[:, None].expand(out.shape)
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=0)


def test_more_rows_of_one_expert_than_a_block(config):
    x, weights, _ = random_problem(35, 3, 16, 16, 1)
    routing = Routing(torch.rand(35, 1, generator=torch.Generator().manual_seed(0)), torch.full((35, 1), 2).int())
    out = fused_experts(x, weights, routing, impl="triton", config=config)
    assert relative_error(out, oracle(x, weights, routing)) <= error_budget(x, weights, routing)


def test_rows_do_not_depend_on_their_batch(config):
    x, weights, routing = random_problem(20, 3, 16, 16, 2)
    whole = fused_experts(x, weights, routing, impl="triton", config=config)
    for start, end in ((0, 1), (1, 4), (4, 20)):
        part = Routing(routing.topk_weights[start:end], routing.topk_ids[start:end])
        got = fused_experts(x[start:end], weights, part, impl="triton", config=config)
        torch.testing.assert_close(got, whole[start:end], rtol=1e-5, atol=1e-6)


def test_no_tokens(config):
    _, weights, _ = random_problem(1, 8, 16, 16, 1)
    routing = Routing(torch.empty(0, 2), torch.empty(0, 2, dtype=torch.int32))
    assert fused_experts(torch.empty(0, 16), weights, routing, impl="triton", config=config).shape == (0, 16)


def test_wide_offsets_give_the_same(config, monkeypatch):
    x, weights, routing = random_problem(6, 5, 24, 24, 3)
    want = fused_experts(x, weights, routing, impl="triton", config=config)
    monkeypatch.setattr("moe_kernels.experts.launch._INT32_MAX", 0)
    assert torch.equal(fused_experts(x, weights, routing, impl="triton", config=config), want)


def test_tensor_maps_give_the_same():
    x, weights, routing = random_problem(5, 3, 24, 16, 2)
    want = fused_experts(x, weights, routing, impl="triton", config=BASE)
    for layout in ("sorted", "inline"):
        config = {**BASE, "USE_TMA": True, "LAYOUT": layout}
        torch.testing.assert_close(fused_experts(x, weights, routing, impl="triton", config=config), want)
    x, weights, routing = random_problem(3, 2, 41, 24, 2)
    with pytest.raises(ValueError, match=r"^USE_TMA needs weight rows that are multiples of 16 bytes; these have 41"):
        fused_experts(x, weights, routing, impl="triton", config={**BASE, "USE_TMA": True})


def test_x_as_a_view(config):
    x, weights, routing = random_problem(4, 3, 32, 16, 2)
    want = fused_experts(x, weights, routing, impl="triton", config=config)
    wide = torch.full((4, 64), float("nan"))
    wide[:, 16:48] = x
    assert torch.equal(fused_experts(wide[:, 16:48], weights, routing, impl="triton", config=config), want)
    wide[:, ::2] = x
    assert torch.equal(fused_experts(wide[:, ::2], weights, routing, impl="triton", config=config), want)


def test_inline_refuses_many_rows():
    x, weights, routing = random_problem(600, 2, 8, 8, 2)
    with pytest.raises(ValueError, match=r"^LAYOUT inline of up takes up to 1024 routed rows, not 1200; use sorted"):
        fused_experts(x, weights, routing, impl="triton", config=INLINE)


def test_compiled_public_function_and_opcheck():
    x, weights, routing = random_problem(3, 3, 16, 16, 2)
    compiled = torch.compile(
        lambda x, w, r: fused_experts(x, w, r, impl="triton", config=BASE), fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(compiled(x, weights, routing), fused_experts(x, weights, routing, impl="triton", config=BASE))
    stored = [weights.tensors().get(name) for name in StoredLayer._fields[:10]]
    args = (x, *stored, "fp32", 16, 0, *routing, False, 0, False, [])
    torch.library.opcheck(torch.ops.moe_kernels.fused_experts_triton.default, args)


def test_interpreter_is_told():
    x, weights, routing = random_problem(2, 5, 32, 24, 3)
    assert resolve_impl(x, weights, routing, "triton") == "triton"
    ask = {"device_type": "cpu", "num_experts": 5, "hidden_size": 32, "intermediate_size": 24, "top_k": 3}
    assert "bf16 matrices wrongly" in supports_impl("triton", dtype="bf16", **ask)[0]


@pytest.mark.parametrize("one_pass", [True, False], ids=["one-pass", "two-pass"])
@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_experts", "block_m"),
    [(1, 8, 40, 16), (30, 6, 7, 32), (3, 2, 1, 16), (100, 3, 20, 64), (8, 1, 130, 128), (0, 2, 4, 16)],
)
def test_alignment_equals_its_specification(num_tokens, top_k, num_experts, block_m, one_pass, monkeypatch):
    from moe_kernels.align import triton as align

    if not one_pass:
        monkeypatch.setattr(align, "ONE_PASS_ROWS", 32)
    generator = torch.Generator().manual_seed(num_tokens)
    ids = torch.randint(-2, num_experts + 2, (num_tokens, top_k), generator=generator).int()
    for got, want in zip(
        align.launch_align(ids, num_experts, block_m), align_reference(ids, num_experts, block_m), strict=True
    ):
        assert torch.equal(got, want)


def test_alignment_of_the_public_op_is_the_specification_on_the_cpu():
    ids = torch.tensor([[2, 0], [2, 7], [0, 2]], dtype=torch.int32)
    assert moe_align(ids, 3, 2).sorted_rows.tolist() == [1, 4, 0, 2, 5, 6, 6, 6]
