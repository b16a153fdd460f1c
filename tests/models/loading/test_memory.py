"""Memory of a step from its numbers alone, against what networks and caches hold, and refusals before loading."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from load_cases import CPU_DEVICE, spec_of
from network_cases import CASES, config_of, random_tensors

from workbench.devices import DeviceInfo
from workbench.errors import InvalidInput
from workbench.models.network import load
from workbench.models.network.build import build_network
from workbench.models.network.config import NETWORKS, cut_network
from workbench.models.network.memory import GIB, StepMemory, free_host_bytes, stacked_experts, step_memory
from workbench.models.network.tensors import RandomTensors
from workbench.runtime.kv_cache import KVCache

FORMATS: list[dict[str, Any]] = [
    {"quant": "fp32"},
    {"quant": "fp8_block"},
    {"quant": "int4", "group_size": 32, "zero_points": True},
    {"quant": "nvfp4"},
]


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form["quant"])
@pytest.mark.parametrize("case", ["llama", "mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2-groups", "deepseek_v3"])
def test_weights_and_cache_take_what_is_foretold(case: str, form: dict[str, Any]) -> None:
    config = config_of(case)
    forms = [("expanded", "expanded")] if config.mla is None else [("expanded", "expanded"), ("expanded", "absorbed")]
    for prefill, decode in forms:
        own = {"mla_prefill": prefill, "mla_decode": decode}
        network = build_network(config, random_tensors(config), **form, **own)
        told = step_memory(config, form["quant"], 3, 21, page_size=4, **_rest(form), **own)
        assert told.weight_bytes == network.weight_bytes, own
        assert told.kv_cache_bytes == KVCache.for_network(network, 3, 21, 4).nbytes, own


def _rest(form: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in form.items() if name != "quant"}


def test_a_rank_takes_its_part() -> None:
    config = cut_network(
        config_of("qwen3_moe", vocab_size=102, moe_intermediate_size=12, intermediate_size=24), tp_size=6
    )
    network = build_network(config, random_tensors(config), quant="fp16")
    told = step_memory(config, "fp16", 2, 16)
    assert told.weight_bytes == network.weight_bytes
    assert told.kv_cache_bytes == KVCache.for_network(network, 2, 16, 16).nbytes


def test_numbers_of_models_that_are_served() -> None:
    """Llama-3-8B has 8.03 G parameters in bfloat16, and keeps 128 KiB a token; DeepSeek-V2-Lite 15.7 G and 30.4 KiB."""
    llama = step_memory(NETWORKS["llama-3-8b"], "bf16", 32, 1024)
    assert llama.weight_bytes == pytest.approx(2 * 8.03e9, rel=1e-3)
    assert llama.kv_cache_bytes == 32 * 1024 * 128 * 1024
    lite = step_memory(NETWORKS["deepseek-v2-lite"], "bf16", 1, 1024)
    assert lite.weight_bytes == pytest.approx(2 * 15.7e9, rel=2e-3)
    assert lite.kv_cache_bytes == 1024 * 27 * 576 * 2
    whole = step_memory(NETWORKS["deepseek-v2-lite"], "bf16", 1, 1024, mla_prefill="expanded", mla_decode="expanded")
    assert whole.kv_cache_bytes == 1024 * 27 * 16 * (192 + 128) * 2
    assert step_memory(NETWORKS["deepseek-v3"], "fp8_block", 1, 128).weight_bytes == pytest.approx(673e9, rel=0.01)


def test_the_sentence_says_needed_and_free_in_gib() -> None:
    memory = StepMemory(weight_bytes=29 * GIB + GIB // 4, kv_cache_bytes=GIB // 2, work_bytes=GIB)
    assert memory.total == 30 * GIB + 3 * GIB // 4
    assert memory.sentence("a-model", 139 * GIB, "NVIDIA H200") == (
        "a-model needs 30.75 GiB (29.25 of weights, 0.50 of cache and 1.00 to work in), and 139.00 GiB is free on "
        "NVIDIA H200"
    )
    assert memory.sentence("a-model", None, "cpu").endswith("1.00 to work in)")


def test_too_little_memory_is_said_before_anything_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The 671 G parameters of DeepSeek-V3 on a machine that has 10 GiB."""
    monkeypatch.setattr(load, "free_host_bytes", lambda: 10 * GIB)
    monkeypatch.setattr(RandomTensors, "_normal", lambda *_: pytest.fail("a tensor was made"))
    told: list[str] = []
    with pytest.raises(InvalidInput) as caught:
        load.load_network(spec_of("deepseek-v3", quant="bf16"), CPU_DEVICE, told.append)
    text = str(caught.value)
    assert text.startswith("model: deepseek-v3 needs 12")
    assert "and 10.00 GiB is free on cpu; fewer layers (num_layers), a smaller format (quant) or batch_size" in text
    assert told == []


def test_memory_is_told_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CASES["llama"]))
    monkeypatch.setattr(load, "free_host_bytes", lambda: 10 * GIB)
    told: list[str] = []
    load.load_network(spec_of(tmp_path / "config.json"), CPU_DEVICE, told.append)
    assert told[0].startswith(f"{tmp_path.name} needs 0.00 GiB (")
    assert told[0].endswith("and 10.00 GiB is free on cpu")
    assert told[1:] == [f"{tmp_path.name}: 1 of 2 layers", f"{tmp_path.name}: 2 of 2 layers"]


def test_a_long_context_counts() -> None:
    """The weights alone would fit; the cache of 32 sequences of 100 000 tokens does not."""
    config = NETWORKS["llama-3-8b"]
    short, long = step_memory(config, "bf16", 32, 1000), step_memory(config, "bf16", 32, 100_000, input_len=1000)
    assert long.weight_bytes == short.weight_bytes
    assert long.kv_cache_bytes == 100 * short.kv_cache_bytes * 1000 // 1008
    assert long.total > 400 * GIB


def test_stacks_of_random_experts_are_of_a_bounded_size() -> None:
    for name in ("deepseek-v2-lite", "deepseek-v3", "mixtral-8x7b", "qwen3-30b-a3b"):
        config = NETWORKS[name]
        assert config.moe is not None
        one = 3 * config.hidden_size * config.moe.intermediate_size
        count = stacked_experts(config)
        assert count == 1 or count * one <= 2**27
        assert count == config.moe.num_experts or (count + 1) * one > 2**27
        assert step_memory(config, "bf16").work_bytes >= 4 * count * one


def test_memory_of_this_machine() -> None:
    free = free_host_bytes()
    assert free is None or 2**20 < free < 2**50


class _Cuda:
    """As much of torch.cuda as is asked."""

    @staticmethod
    def memory_reserved(_device: object) -> int:
        return 7 * GIB

    @staticmethod
    def memory_allocated(_device: object) -> int:
        return 5 * GIB

    @staticmethod
    def mem_get_info(_device: object) -> tuple[int, int]:
        return 100 * GIB, 140 * GIB


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> DeviceInfo:
    monkeypatch.setattr(load.torch, "cuda", _Cuda)
    return DeviceInfo(type="cuda", name="NVIDIA H200", torch_device="cuda:0", index=0)


def test_what_the_allocator_holds_and_does_not_use_is_free(a_gpu: DeviceInfo) -> None:
    assert load.free_bytes(a_gpu) == 102 * GIB


def test_planning_needs_no_torch() -> None:
    code = (
        "import sys; from workbench.models.network.memory import step_memory;"
        "from workbench.models.network.choose import choose_network; from workbench.spec import RunSpec;"
        "c = choose_network(RunSpec(subject='step', model='mixtral-8x7b', num_layers=2));"
        "print(step_memory(c.config, 'bf16').weight_bytes > 2**30, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["True", "False"], done.stderr
