"""Checkpoints for the tests: a tiny Llama written by transformers, and one cache for the real model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from workbench.devices import DeviceInfo

HIDDEN, CHANNELS, LAYERS = 32, 48, 4


@pytest.fixture(scope="session")
def cpu() -> DeviceInfo:
    return DeviceInfo(type="cpu", name="cpu", torch_device="cpu")


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("MOE_WORKBENCH_CACHE", str(folder))
    return folder


@pytest.fixture(scope="session")
def smollm2_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Filled by the first test that loads the real checkpoint, which takes half a minute."""
    return tmp_path_factory.mktemp("smollm2")


@pytest.fixture
def real_cache(smollm2_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOE_WORKBENCH_CACHE", str(smollm2_cache))
    return smollm2_cache


@pytest.fixture
def write_config(tmp_path: Path) -> Any:
    def write(folder: str = "some-model", **values: Any) -> Path:
        path = tmp_path / folder / "config.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values), encoding="utf-8")
        return path

    return write


@pytest.fixture(scope="session")
def write_llama() -> Any:
    """A function that writes a random Llama-like checkpoint and its byte-level tokenizer; options change the config."""

    def write(folder: Path, **options: Any) -> Path:
        import torch
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers
        from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        values = {
            "vocab_size": 256,
            "hidden_size": HIDDEN,
            "intermediate_size": CHANNELS,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 2048,
        }
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**{**values, **options})).save_pretrained(folder)
        PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
        return folder

    return write


@pytest.fixture(scope="session")
def tiny_llama(write_llama: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = write_llama(tmp_path_factory.mktemp("checkpoints") / "tiny-llama")
    return folder
