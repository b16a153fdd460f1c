"""Arguments of fused_experts, resolution of implementations, weights, backends."""

import dataclasses

import moe_kernels
import pytest
import torch
from moe_kernels import (
    ExpertWeights,
    Impl,
    Routing,
    backends,
    fused_experts,
    register_backend,
    resolve_impl,
    supports_impl,
    unregister_backend,
)
from moe_kernels.testing.oracle import random_problem

SHAPE = {"num_experts": 8, "hidden_size": 64, "intermediate_size": 32, "top_k": 2}


def test_public_names():
    assert moe_kernels.__all__ == [
        "Alignment", "ExpertWeights", "Impl", "LinearWeights", "PagedPrefix", "Quant", "ResolvedConfig", "Routing",
        "backends", "decode_attention", "fused_experts", "linear", "mla_decode_attention", "moe_align",
        "prefill_attention", "prepare_routing", "quantize_activation", "register_attention_backend", "register_backend",
        "resolve_config", "resolve_impl", "resolve_linear_impl", "select_experts", "supports_impl",
        "unregister_backend",
    ]  # fmt: skip
    with pytest.raises(AttributeError, match="has no attribute 'fused_expert'"):
        moe_kernels.fused_expert  # noqa: B018


@pytest.mark.parametrize("quant", ["fp32", "bf16", "fp16"])
def test_weights_hold_the_rounded_values(quant):
    w1, w2 = torch.randn(3, 10, 4, dtype=torch.float64), torch.randn(3, 4, 5, dtype=torch.float64)
    weights = ExpertWeights.from_dense(w1, w2, quant)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[quant]
    assert weights.quant == quant
    assert weights.w1.dtype == dtype
    got1, got2 = weights.dequantize()
    assert torch.equal(got1, w1.to(dtype).float())
    assert torch.equal(got2, w2.to(dtype).float())
    assert (weights.num_experts, weights.hidden_size, weights.intermediate_size) == (3, 4, 5)
    assert weights.nbytes == (3 * 10 * 4 + 3 * 4 * 5) * dtype.itemsize
    with pytest.raises(dataclasses.FrozenInstanceError):
        weights.quant = "fp32"


def test_weights_from_views_are_stored_contiguous():
    w1, w2 = torch.randn(4, 10, 3).transpose(0, 2), torch.randn(5, 4, 3).permute(2, 1, 0)
    weights = ExpertWeights.from_dense(w1, w2, "fp32")
    assert weights.w1.is_contiguous()
    assert weights.w2.is_contiguous()
    assert torch.equal(weights.w1, w1)


@pytest.mark.parametrize(
    ("w1", "w2", "quant", "message"),
    [
        ((2, 10, 4), (2, 4, 5), "fp9", "^quant must be one of fp32, bf16, fp16, fp8_tensor, .*; got 'fp9'"),
        ((2, 9, 4), (2, 4, 4), "bf16", r"^w1_E2FD must be \[E, 2F, D\]"),
        ((2, 10, 4), (2, 5, 4), "bf16", r"^w1_E2FD must be \[E, 2F, D\]"),
        ((3, 10, 4), (2, 4, 5), "bf16", r"^w1_E2FD must be \[E, 2F, D\]"),
        ((10, 4), (4, 5), "bf16", "^w1_E2FD and w2_EDF must be floating-point tensors of three dimensions"),
    ],
)
def test_weights_that_do_not_fit_are_refused(w1, w2, quant, message):
    with pytest.raises(ValueError, match=message):
        ExpertWeights.from_dense(torch.zeros(w1), torch.zeros(w2), quant)


def test_tensors_that_do_not_fit_are_refused():
    x, weights, routing = random_problem(3, 4, 16, 8, 2)
    for args, message in (
        ((x[:, :8], weights, routing), r"^x_TD must be \[T, 16\]; got \[3, 8\]"),
        ((x.half(), weights, routing), "^x_TD must have the dtype of the weights, torch.float32; got torch.float16"),
        ((x[:2], weights, routing), r"^routing must hold two tensors \[T, K\] with T = 2"),
        (
            (x, weights, Routing(routing.topk_weights, routing.topk_ids.long())),
            "^routing must hold float32 topk_weights",
        ),
        (
            (x, weights, Routing(routing.topk_weights.half(), routing.topk_ids)),
            "^routing must hold float32 topk_weights",
        ),
        ((x, weights, Routing(routing.topk_weights[:, :0], routing.topk_ids[:, :0])), "at least one expert per token"),
        ((x, weights.to("meta"), routing), "must be on one device"),
    ):
        with pytest.raises(ValueError, match=message):
            fused_experts(*args)


def test_impl_is_exactly_what_was_asked():
    x, weights, routing = random_problem(3, 4, 15, 8, 2)
    assert resolve_impl(x, weights, routing) == "reference"
    assert resolve_impl(x, weights, routing, Impl.REFERENCE) == "reference"
    with pytest.raises(NotImplementedError, match="multiples of 16 bytes; hidden_size 15 gives 60 bytes"):
        fused_experts(x, weights, routing, impl="torch_grouped_mm")
    with pytest.raises(NotImplementedError, match=r"Triton kernels run on cuda, not cpu|triton is not installed"):
        resolve_impl(x, weights, routing, "triton")
    with pytest.raises(
        ValueError, match=r"^impl must be one of reference, torch_grouped_mm, triton, triton_fp4; got 'cutlass'"
    ):
        fused_experts(x, weights, routing, impl="cutlass")
    with pytest.raises(ValueError, match=r"^config is for impl 'triton' and 'triton_fp4'; this call runs"):
        fused_experts(x, weights, routing, config={})


@pytest.mark.parametrize("dtype", ["fp32", torch.bfloat16])
def test_supports_needs_no_device(dtype):
    assert supports_impl("reference", device_type="cpu", dtype=dtype, **SHAPE) == []
    assert supports_impl("torch_grouped_mm", device_type="cpu", dtype=dtype, **SHAPE) == []
    assert supports_impl("triton", device_type="cpu", dtype=dtype, **SHAPE) == ["Triton kernels run on cuda, not cpu."]


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("reference", {"compile": True, "num_experts": 65}, "limited to 64 experts; this has 65"),
        ("reference", {"graph": True, "device_type": "cuda"}, "which a CUDA graph cannot capture"),
        ("reference", {"dtype": torch.float64}, "reference computes in fp32, bf16, fp16, fp8_tensor, fp8_channel"),
        ("reference", {"dtype": "fp8"}, "dtype must be one of fp32, bf16, fp16; got 'fp8'"),
        (
            "torch_grouped_mm",
            {"compile": True, "dtype": "fp16"},
            "torch.compile traces grouped_mm in bf16 only, not fp16",
        ),
        (
            "torch_grouped_mm",
            {"device_type": "cuda", "dtype": "fp32"},
            "On CUDA torch's grouped_mm takes bf16 only, not fp32",
        ),
        ("torch_grouped_mm", {"intermediate_size": 7}, "intermediate_size 7 gives 14 bytes"),
        ("triton", {"graph": True}, "CUDA graphs need a CUDA device; this is cpu"),
    ],
)
def test_supports_says_why_not(name, change, reason):
    asked = {"device_type": "cpu", "dtype": "bf16", **SHAPE, **change}
    answers = supports_impl(name, **asked)
    assert any(reason in answer for answer in answers), answers
    assert all(answer.endswith(".") for answer in answers)


def test_limits_are_where_they_are_said_to_be():
    asked = {"device_type": "cpu", "dtype": "bf16", **SHAPE}
    assert supports_impl("reference", **{**asked, "num_experts": 64}, compile=True) == []
    assert supports_impl("torch_grouped_mm", **asked, compile=True) == []
    x, weights, routing = random_problem(2, 65, 8, 8, 2)
    compiled = torch.compile(
        lambda: fused_experts(x, weights, routing, impl="reference"), fullgraph=True, backend="eager"
    )
    with pytest.raises(Exception, match="limited to 64 experts; this has 65"):
        compiled()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is present")
def test_absent_cuda_is_a_reason():
    for name in backends():
        assert supports_impl(name, device_type="cuda", dtype="bf16", **SHAPE)[0] == "torch sees no CUDA device."


@pytest.fixture
def doubling():
    calls = []

    def supports(**asked):
        calls.append(asked)
        return ["doubling takes one expert per token."] if asked["top_k"] > 1 else []

    register_backend("doubling", lambda x, weights, routing: x * 2, supports)
    yield calls
    unregister_backend("doubling")


def test_registered_backend_runs_by_name_only(doubling):
    x, weights, routing = random_problem(3, 4, 16, 8, 1)
    assert backends() == ["reference", "torch_grouped_mm", "triton", "triton_fp4", "doubling"]
    assert torch.equal(fused_experts(x, weights, routing, impl="doubling"), x * 2)
    assert doubling[-1] == {
        "device_type": "cpu", "dtype": torch.float32, "num_experts": 4, "hidden_size": 16, "intermediate_size": 8,
        "top_k": 1, "compile": False, "graph": False,
    }  # fmt: skip
    assert resolve_impl(x, weights, routing) == "reference"
    compiled = torch.compile(
        lambda x: fused_experts(x, weights, routing, impl="doubling"), fullgraph=True, backend="eager"
    )
    assert torch.equal(compiled(x), x * 2)


def test_registered_backend_says_why_not(doubling):
    x, weights, routing = random_problem(3, 4, 16, 8, 2)
    with pytest.raises(NotImplementedError, match="impl 'doubling' does not run here: doubling takes one expert"):
        fused_experts(x, weights, routing, impl="doubling")
    assert supports_impl("doubling", device_type="cpu", dtype="fp32", **SHAPE) == [
        "doubling takes one expert per token."
    ]


def test_registration_is_refused_where_names_clash(doubling):
    for name, message in (
        ("doubling", r"^name 'doubling' is registered already; call unregister_backend\('doubling'\) first"),
        ("triton", "^name 'triton' is built in"),
        ("", "^name must be a non-empty string"),
    ):
        with pytest.raises(ValueError, match=message):
            register_backend(name, lambda x, w, r: x, lambda **asked: [])
    with pytest.raises(TypeError, match="must both be callable"):
        register_backend("other", None, None)
    with pytest.raises(ValueError, match=r"^name 'other' is not a registered backend; registered: doubling"):
        unregister_backend("other")
