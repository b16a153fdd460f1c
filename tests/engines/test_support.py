"""What cannot run says so in sentences, without torch."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from moe_kernels import register_backend

from workbench import support
from workbench.devices import DeviceInfo
from workbench.errors import InvalidInput
from workbench.modes import Quant
from workbench.peers import rules
from workbench.spec import RunSpec
from workbench.support import find_reasons, memory_sentence, module_exists

CPU = DeviceInfo(type="cpu", name="Some CPU", torch_device="cpu", memory_bytes=16 * 2**30)
H200 = DeviceInfo(
    type="cuda", name="NVIDIA H200", torch_device="cuda:0", capability=(9, 0), memory_bytes=140 * 2**30, uuid="GPU-1"
)


@pytest.fixture(autouse=True)
def all_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "cpp_compiler", lambda: "/usr/bin/g++")
    monkeypatch.setattr(support, "c_compiler", lambda: "/usr/bin/gcc")
    monkeypatch.setattr(support, "python_headers", lambda: True)


def said(device: DeviceInfo, **values: Any) -> dict[str, str]:
    return {r.field: r.sentence for r in find_reasons(RunSpec.from_flat(values), device)}


@pytest.mark.parametrize(
    ("device", "values"),
    [
        (CPU, {}),
        (CPU, {"compile": "default", "dynamic": True}),
        (CPU, {"compile": "max-autotune-no-cudagraphs"}),
        (CPU, {"moe_backend": "torch_grouped_mm", "quant": "fp16"}),
        (H200, {"moe_backend": "triton", "graph": "full"}),
        (H200, {"moe_backend": "triton", "compile": "default", "graph": "full"}),
        (H200, {"moe_backend": "triton", "compile": "max-autotune"}),
        (H200, {"model": "deepseek-v3", "moe_backend": "triton", "num_tokens": 4096}),
        (H200, {"moe_backend": "json:dumps"}),
    ],
)
def test_what_runs(device: DeviceInfo, values: dict[str, Any]) -> None:
    assert said(device, **values) == {}


@pytest.mark.parametrize(
    ("device", "values", "field", "words"),
    [
        (CPU, {"graph": "full"}, "graph", "CUDA graphs need a GPU."),
        (CPU, {"compile": "reduce-overhead"}, "compile", "need a GPU"),
        (CPU, {"compile": "max-autotune"}, "compile", "inductor's own"),
        (CPU, {"moe_backend": "triton"}, "moe_backend", "Triton kernels run on cuda, not cpu."),
        (CPU, {"moe_backend": "torch_grouped_mm", "compile": "default", "quant": "fp32"}, "moe_backend", "bf16 only"),
        (H200, {"compile": "reduce-overhead", "graph": "full"}, "graph", "cannot stand inside"),
        (H200, {"moe_backend": "reference", "graph": "full"}, "moe_backend", "a CUDA graph cannot capture"),
        (H200, {"moe_backend": "torch_grouped_mm", "quant": "fp16"}, "moe_backend", "takes bf16 only"),
        (
            H200,
            {"moe_backend": "nonesuch"},
            "moe_backend",
            "moe_backend: must be reference, torch_grouped_mm, triton, triton_fp4, deep_gemm or your",
        ),
        (H200, {"moe_backend": "no_such_module:f"}, "moe_backend", "cannot be found"),
        (H200, {"moe_backend": "json:not a name"}, "moe_backend", "package.module:function"),
        (H200, {"model": "deepseek-v3", "routing": "model", "top_k": 200}, "routing", "fewer than top_k 200"),
    ],
)
def test_what_does_not_run_and_why(device: DeviceInfo, values: dict[str, Any], field: str, words: str) -> None:
    found = said(device, **values)
    assert words in found[field]
    assert all(sentence.endswith(".") for sentence in found.values())


@pytest.mark.parametrize(
    ("values", "field", "words"),
    [
        ({"group_size": 64}, "group_size", "group_size 64 is for quant int4; with quant bf16 only 128 is allowed."),
        ({"group_size": 32, "quant": "nvfp4"}, "group_size", "with quant nvfp4 only 128"),
        ({"zero_points": True}, "zero_points", "zero_points is for quant int4; with quant bf16 it must be off."),
        (
            {"activation_scale": "static", "quant": "int8"},
            "activation_scale",
            "static is for quant fp8_tensor; with quant int8 only dynamic is allowed.",
        ),
        ({"activation_scale": "static", "quant": "fp8_block"}, "activation_scale", "with quant fp8_block"),
        (
            {"split_k": 2, "moe_backend": "reference"},
            "split_k",
            "split_k is for moe_backend triton; with moe_backend reference only none is allowed.",
        ),
        ({"split_k": 1, "moe_backend": "torch_grouped_mm"}, "split_k", "only none is allowed"),
        ({"split_k": 2, "moe_backend": "json:dumps"}, "split_k", "with moe_backend json:dumps only none"),
        ({"reduction": "atomic", "moe_backend": "reference"}, "reduction", "only deterministic is allowed"),
        ({"reduction": "atomic", "moe_backend": "triton", "split_k": 1}, "reduction", "split_k 1 leaves one part"),
    ],
)
def test_a_field_that_means_nothing_is_refused_by_name(values: dict[str, Any], field: str, words: str) -> None:
    found = said(H200, **values)
    assert words in found[field]
    assert field in found[field]
    assert set(found) == {field}


@pytest.mark.parametrize(
    "values",
    [
        {"quant": "int4", "group_size": 32, "zero_points": True},
        {"quant": "fp8_tensor", "activation_scale": "static"},
        {"moe_backend": "triton", "split_k": 8, "reduction": "atomic"},
        {"moe_backend": "triton", "split_k": 1},
        {"moe_backend": "triton", "reduction": "atomic"},
    ],
)
def test_fields_where_they_mean_something(values: dict[str, Any]) -> None:
    assert said(H200, **values) == {}


@pytest.mark.parametrize("quant", [quant for quant in Quant if quant not in ("fp32", "bf16", "fp16")])
def test_quantised_formats_run_where_their_backends_take_them(quant: str) -> None:
    assert said(CPU, quant=quant) == {}
    assert said(H200, quant=quant, moe_backend="triton", graph="full") == {}
    assert quant in said(H200, quant=quant, moe_backend="torch_grouped_mm")["moe_backend"]


def test_deep_gemm_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    right = {"model": "qwen3-30b-a3b", "moe_backend": "deep_gemm", "quant": "fp8_block"}
    monkeypatch.setattr(rules, "installed", lambda package: False)
    assert said(H200, **right) == {"moe_backend": "deep_gemm is not installed; pip install 'moe-workbench[deep-gemm]'."}
    monkeypatch.setattr(rules, "installed", lambda package: True)
    assert said(H200, **right, graph="full") == {}
    blackwell = replace(H200, name="NVIDIA B200", capability=(10, 0))
    for device, values, words in (
        (CPU, {}, "runs on cuda, not cpu"),
        (blackwell, {}, "compute capability 9.0; this device has 10.0"),
        (H200, {"quant": "bf16"}, "quant fp8_block, not bf16"),
        (H200, {"compile": "default"}, "torch.compile cannot trace"),
        (
            H200,
            {"model": "deepseek-v2-lite", "tp_size": 2},
            "intermediate_size must be a multiple of 128 for deep_gemm's blocks, not 704",
        ),
    ):
        assert words in said(device, **{**right, **values})["moe_backend"]


def test_a_registered_backend_is_asked_about_quantised_formats_only_where_it_knows_the_word() -> None:
    asked = []

    def plain(*, dtype: str, **_: object) -> list[str]:
        asked.append(dtype)
        return []

    def old(
        device_type: str, dtype: str, num_experts: int, hidden_size: int, intermediate_size: int, top_k: int,
        compile: bool, graph: bool,
    ) -> list[str]:  # fmt: skip
        return []

    register_backend("plain", print, plain)  # type: ignore[arg-type]
    register_backend("old", print, old)  # type: ignore[arg-type]
    assert said(CPU, moe_backend="plain", quant="int8") == {}
    assert asked == ["bf16"]
    assert said(CPU, moe_backend="old", quant="fp16") == {}
    assert said(CPU, moe_backend="old", quant="int8") == {
        "moe_backend": "old takes unquantised weights only, not int8."
    }


def test_memory_counts_the_stored_format() -> None:
    spec = RunSpec(model="mixtral-8x7b")
    shape = support.model_shape(spec)
    sizes = {quant: support.weight_bytes(spec.replace(quant=quant), shape) for quant in Quant}
    numbers = 8 * 3 * 4096 * 14336
    assert sizes[Quant.FP32] == 2 * sizes[Quant.BF16] == 4 * numbers
    assert sizes[Quant.FP8_TENSOR] == numbers + 8 * 3 * 4
    assert sizes[Quant.INT8] == numbers + 8 * 4 * (2 * 14336 + 4096)
    assert sizes[Quant.MXFP4] == numbers // 2 + numbers // 32
    finer = support.weight_bytes(spec.replace(quant="int4", group_size=32, zero_points=True), shape)
    assert finer - sizes[Quant.INT4] == numbers // 32 * 3 - numbers // 128 * 2
    work = {quant: support.workspace_bytes(spec.replace(quant=quant), shape) for quant in Quant}
    assert work[Quant.NVFP4] == work[Quant.BF16] < work[Quant.FP32]


def test_memory_names_both_sides() -> None:
    found = said(CPU, model="deepseek-v3", quant="fp32")
    assert "42.0 GiB" in found["model"]
    assert "16.0 GiB" in found["model"]
    found = said(CPU, num_tokens=2**20, quant="fp32")
    assert set(found) == set()
    small = DeviceInfo(type="cpu", name="Small", torch_device="cpu", memory_bytes=2**30)
    assert "num_tokens" in said(small, num_tokens=2**20, quant="fp32")
    nowhere = DeviceInfo(type="cpu", name="Unknown", torch_device="cpu")
    assert (
        memory_sentence(RunSpec(model="deepseek-v3"), support.model_shape(RunSpec(model="deepseek-v3")), nowhere)
        is None
    )


def test_missing_tools_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "cpp_compiler", lambda: None)
    monkeypatch.setattr(support, "c_compiler", lambda: None)
    assert "C++ compiler" in said(CPU, compile="default")["compile"]
    assert "C compiler" in said(H200, moe_backend="triton")["moe_backend"]
    monkeypatch.setattr(support, "TRITON_INSTALLED", False)
    assert "triton is not installed" in said(H200, compile="default", moe_backend="torch_grouped_mm")["compile"]
    assert said(CPU) == {}


def test_bad_specs_raise() -> None:
    for values, field in (({"top_k": 9}, "top_k"), ({"model": "nonesuch"}, "model"), ({"tp_size": 7}, "tp_size")):
        with pytest.raises(InvalidInput, match=field):
            said(CPU, **values)


def test_modules_are_found_without_importing_them() -> None:
    assert module_exists("torch.nn.functional")
    assert module_exists("workbench.spec")
    assert not module_exists("torch.nonesuch")
    assert not module_exists("json.decoder.deeper")
    code = (
        "import sys\nfrom workbench import RunSpec, supports\nfrom workbench.devices import find_device\n"
        "print(supports(RunSpec().replace(moe_backend='torch.nn.functional:relu'), find_device('cpu')))\n"
        "sys.exit(1 if 'torch' in sys.modules else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
