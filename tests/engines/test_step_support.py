"""What a step cannot run, and why: each one sentence that names the field and what is allowed."""

from __future__ import annotations

from typing import Any

import pytest

from workbench.devices import DeviceInfo, find_device
from workbench.errors import InvalidInput
from workbench.spec import RunSpec
from workbench.step_support import cache_batch
from workbench.support import find_reasons

CPU = find_device("cpu")
H200 = DeviceInfo(type="cuda", name="NVIDIA H200", torch_device="cuda:0", capability=(9, 0), memory_bytes=150 * 2**30)
SMALL = DeviceInfo(type="cuda", name="a small GPU", torch_device="cuda:0", capability=(9, 0), memory_bytes=8 * 2**30)
STEP = RunSpec.from_flat({"subject": "step", "quant": "fp32"})
LLAMA = STEP.replace(model="llama-3-8b", quant="bf16")
DEEPSEEK = STEP.replace(model="deepseek-v2-lite", quant="bf16", num_layers=2)


@pytest.mark.parametrize(
    ("base", "change", "field", "words"),
    [
        (STEP, {"graph": "full"}, "graph", "CUDA graphs need a GPU."),
        (
            STEP,
            {"compile": "reduce-overhead"},
            "compile",
            "reduce-overhead records CUDA graphs of inductor's own, and ",
        ),
        (STEP, {"compile": "default", "dynamic": True}, "dynamic", "dynamic is for subject moe_layer; each batch size"),
        (STEP, {"fusion": "on"}, "fusion", "Fused kernels need Triton: "),
        (
            DEEPSEEK,
            {"compile_scope": "skip_moe"},
            "compile_scope",
            "compile_scope skip_moe is for compiled steps; with compile none only all is allowed.",
        ),
        (
            LLAMA,
            {"compile": "default", "compile_scope": "skip_moe"},
            "compile_scope",
            "compile_scope skip_moe is for models with experts, which llama-3-8b does not have; only all is allowed.",
        ),
        (
            STEP,
            {"max_compile_batch": 4},
            "max_compile_batch",
            "max_compile_batch 4 is for compiled steps; with compile none only none is allowed.",
        ),
        (
            STEP,
            {"max_capture_batch": 4},
            "max_capture_batch",
            "max_capture_batch 4 is for graph full; with graph disabled only none is allowed.",
        ),
        (STEP, {"l2": "hot"}, "l2", "l2 hot is for subject moe_layer; a step finds the cache as the step before left"),
        (LLAMA, {"mla_prefill": "absorbed"}, "mla_prefill", "mla_prefill absorbed is for models with latent attention"),
        (
            LLAMA,
            {"routing": "balanced"},
            "routing",
            "routing balanced is for models with experts, which llama-3-8b does",
        ),
        (LLAMA, {"reduction": "atomic"}, "reduction", "reduction atomic is for m"),
        (STEP, {"experts": 4, "routing": "uniform"}, "routing", "Experts cut from a dense MLP are all chosen; with "),
        (
            STEP,
            {"attention_backend": "flash"},
            "attention_backend",
            "attention_backend: must be reference, sdpa, triton",
        ),
        (
            STEP,
            {"perplexity_tokens": 99, "tp_size": 3},
            "perplexity_tokens",
            "Perplexity needs the whole model, tp_size",
        ),
        (
            LLAMA,
            {"perplexity_tokens": 99},
            "perplexity_tokens",
            "Perplexity needs trained weights, and those of llama-3",
        ),
        (STEP, {"zero_points": True}, "zero_points", "zero_points is for quant int4; with quant fp32 it must be off."),
    ],
)
def test_what_means_nothing_or_is_not_there_is_said(
    base: RunSpec, change: dict[str, Any], field: str, words: str
) -> None:
    found = [reason for reason in find_reasons(base.replace(**change), CPU) if reason.field == field]
    assert found, change
    assert found[0].sentence.startswith(words)
    assert found[0].sentence.endswith(".")
    assert not [reason for reason in find_reasons(base, CPU) if reason.field == field]


def test_what_runs_has_no_reasons() -> None:
    assert find_reasons(STEP, CPU) == []
    assert find_reasons(STEP.replace(attention_backend="reference", experts=4), CPU) == []
    assert find_reasons(DEEPSEEK.replace(mla_prefill="absorbed", mla_decode="expanded"), CPU) == []
    assert [r.field for r in find_reasons(DEEPSEEK.replace(routing="balanced", quant="int4"), CPU)] == []


def fields(spec: RunSpec, device: DeviceInfo = H200) -> list[str]:
    return [reason.field for reason in find_reasons(spec, device)]


def test_graphs_compile_and_fusion_run_on_a_gpu() -> None:
    assert fields(LLAMA.replace(graph="full", max_capture_batch=32, fusion="on", attention_backend="triton")) == []
    moe = DEEPSEEK.replace(moe_backend="triton", graph="full", compile="default", compile_scope="skip_moe")
    assert fields(moe.replace(max_compile_batch=8, routing="balanced")) == []
    assert fields(moe.replace(quant="fp8_block")) == []
    assert fields(DEEPSEEK.replace(compile="reduce-overhead", moe_backend="triton")) == []
    both = find_reasons(LLAMA.replace(compile="reduce-overhead", graph="full"), H200)
    assert [reason.field for reason in both] == ["graph"]
    assert both[0].sentence.startswith("reduce-overhead records CUDA graphs of inductor's own, which cannot stand ")


def test_what_no_graph_can_hold_is_asked_of_the_decode_step_alone() -> None:
    assert fields(LLAMA.replace(graph="full", attention_backend="reference")) == ["attention_backend"]
    assert fields(LLAMA.replace(graph="full", attention_backend="sdpa")) == []  # its prefill is not captured
    assert fields(DEEPSEEK.replace(graph="full", moe_backend="reference")) == ["moe_backend"]
    assert fields(DEEPSEEK.replace(graph="disabled", moe_backend="reference")) == []


def test_reference_experts_are_not_compiled_where_they_are_left_out() -> None:
    qwen = STEP.replace(model="qwen3-30b-a3b", num_layers=2)
    compiled = qwen.replace(compile="default", moe_backend="reference")
    assert fields(compiled) == ["moe_backend"]  # 128 experts, each on every token
    assert fields(compiled.replace(compile_scope="skip_moe")) == []
    assert fields(compiled.replace(max_compile_batch=4, batch_size=8)) == []
    assert fields(compiled.replace(max_compile_batch=8, batch_size=8)) == ["moe_backend"]


def test_captured_batches_have_room_in_the_cache() -> None:
    spec = LLAMA.replace(num_layers=4, input_len=8192, graph="full", attention_backend="triton")
    assert fields(spec, SMALL) == []
    found = [r for r in find_reasons(spec.replace(max_capture_batch=256), SMALL) if "GiB" in r.sentence]
    assert [reason.field for reason in found] == ["max_capture_batch"]
    assert cache_batch(spec) == 1
    assert cache_batch(spec.replace(max_capture_batch=256)) == 256
    assert cache_batch(spec.replace(max_capture_batch=4, batch_size=9)) == 9


def test_triton_attention_needs_a_gpu_and_a_head_that_it_takes() -> None:
    assert [r.field for r in find_reasons(STEP.replace(attention_backend="triton"), CPU)] == ["attention_backend"]


def test_too_little_memory_names_what_is_needed_and_what_helps() -> None:
    whole = find_reasons(LLAMA, SMALL)
    assert [reason.field for reason in whole if "GiB" in reason.sentence] == ["model"]
    many = LLAMA.replace(num_layers=4, batch_size=256, input_len=8192)
    batch = [reason for reason in find_reasons(many, SMALL) if "GiB" in reason.sentence]
    assert [reason.field for reason in batch] == ["batch_size"]
    assert "llama-3-8b needs " in batch[0].sentence
    assert "a small GPU has 8.00 GiB." in batch[0].sentence
    assert not [reason for reason in find_reasons(LLAMA, H200) if "GiB" in reason.sentence]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"model": "gpt-17"}, "model: "),
        ({"num_layers": 99}, "num_layers: "),
        ({"experts": 7}, "experts: must divide the 1536 channels of the MLP of smollm2-135m, not 7"),
        ({"experts": 4, "top_k": 2}, "top_k: the network of smollm2-135m is dense and has no router"),
        ({"top_k": 2}, "top_k: smollm2-135m has no experts; it must be left out"),
        ({"model": "mixtral-8x7b", "top_k": 3}, "top_k: a step of mixtral-8x7b takes the model's own, 2, not 3"),
    ],
)
def test_what_cannot_be_built_is_refused(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        find_reasons(STEP.replace(**change), CPU)
    assert str(raised.value).startswith(sentence)
