"""What cannot run says so in sentences, without torch."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from workbench import support
from workbench.devices import DeviceInfo
from workbench.errors import InvalidInput
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
            "moe_backend: must be reference, torch_grouped_mm, triton or your",
        ),
        (H200, {"moe_backend": "no_such_module:f"}, "moe_backend", "cannot be found"),
        (H200, {"moe_backend": "json:not a name"}, "moe_backend", "package.module:function"),
        (H200, {"model": "deepseek-v3", "routing": "model", "quant": "bf16"}, "routing", "router"),
    ],
)
def test_what_does_not_run_and_why(device: DeviceInfo, values: dict[str, Any], field: str, words: str) -> None:
    found = said(device, **values)
    assert words in found[field]
    assert all(sentence.endswith(".") for sentence in found.values())


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
