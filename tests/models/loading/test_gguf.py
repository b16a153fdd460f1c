"""GGUF files that the tests write: names, turned rows, number formats and damage, against transformers' own reading."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from load_cases import CPU_DEVICE, difference, loaded, spec_of
from network_cases import CPU

from workbench.errors import InvalidInput
from workbench.models.network.config import NetworkConfig, parse_network
from workbench.models.network.gguf_source import GgufSource, hub_rows
from workbench.models.network.load import load_network
from workbench.models.network.names import LM_HEAD, expected_tensors
from workbench.models.network.tensors import RandomTensors

gguf = pytest.importorskip("gguf")
pytest.importorskip("accelerate")

# Rows of a multiple of 32 numbers, which a block of Q8_0 or Q4_1 has; heads of 8, two of them for keys.
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 101,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-4,
    "rope_theta": 500.0,
}
NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def config_of(**changes: Any) -> NetworkConfig:
    return parse_network({**CONFIG, **changes}, "tiny", "a test")


def gguf_name(name: str) -> str:
    for hub, own in (("model.embed_tokens", "token_embd"), ("model.norm", "output_norm"), ("lm_head", "output")):
        name = name.replace(hub, own)
    name = name.replace("model.layers.", "blk.")
    for hub, own in NAMES.items():
        name = name.replace(hub, own)
    return name


def permuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """As llama.cpp's conversion turns the hub's rows into its own."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(rows.shape)


def write(path: Path, kind: str = "F32", *, change: Callable[[dict[str, np.ndarray]], None] | None = None) -> Path:
    """A random model with its matrices in format `kind`."""
    config = config_of()
    source = RandomTensors(config, CPU, 0, torch.float32)
    tensors = {}
    for name in expected_tensors(config):
        values = source.get(name).numpy()
        for part, heads in (("q_proj", 8), ("k_proj", 2)):
            values = permuted(values, heads) if part in name else values
        tensors[gguf_name(name)] = values
    if change is not None:
        change(tensors)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(101)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_head_count(8)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-4)
    writer.add_rope_freq_base(500.0)
    writer.add_rope_dimension_count(8)
    writer.add_token_list([f"token {i}" for i in range(101)])
    form = gguf.GGMLQuantizationType[kind]
    for name, values in tensors.items():
        plain = values.ndim == 1 or form is gguf.GGMLQuantizationType.F32
        stored = values if plain else gguf.quants.quantize(values, form)
        writer.add_tensor(name, stored, raw_dtype=None if plain else form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def by_transformers(path: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=torch.float32, local_files_only=True
    )
    return model.eval()


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_1"])
def test_logits_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", kind)
    network, resolved, notes = loaded(path)
    assert resolved["weights"] == f"GGUF file tiny.gguf ({', '.join(sorted(('F32', kind)))})"
    assert any("dequantised" in note for note in notes) == (kind != "F16")
    assert difference(network, by_transformers(path)) < 2e-5


def test_values_of_every_tensor(tmp_path: Path) -> None:
    """In float32 nothing is rounded: each tensor is the one that was written, rows of queries and keys put back."""
    config = config_of()
    source, wanted = GgufSource(write(tmp_path / "a.gguf"), config, CPU), RandomTensors(config, CPU, 0, torch.float32)
    assert source.names() == wanted.names()
    assert not source.quantized
    for name in wanted.names():
        assert torch.equal(source.get(name), wanted.get(name)), name


def test_rows_of_a_head_are_put_back() -> None:
    """Two heads of 4 rows: a pair's rows 0 and 1 become rows 0 and 2."""
    rows = torch.arange(8.0)[:, None]
    assert hub_rows(rows, 2).flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert torch.equal(torch.from_numpy(permuted(hub_rows(rows, 2).numpy(), 2)), rows)


def test_a_file_without_an_output_uses_its_embedding(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", change=lambda tensors: tensors.pop("output.weight"))
    network = loaded(path).network
    assert network.lm_head.weight is network.embed.weight
    assert LM_HEAD not in GgufSource(path, config_of(), CPU).names()


def sentence(path: Path) -> str:
    with pytest.raises(InvalidInput) as caught:
        loaded(path)
    return str(caught.value)


def test_missing_extra_and_misshapen_tensors_are_all_listed(tmp_path: Path) -> None:
    def change(tensors: dict[str, np.ndarray]) -> None:
        del tensors["blk.1.attn_k.weight"]
        tensors["blk.0.ffn_gate.weight"] = np.zeros((95, 64), np.float32)
        tensors["blk.0.attn_sinks.weight"] = np.zeros(8, np.float32)

    text = sentence(write(tmp_path / "a.gguf", change=change))
    assert "missing 1: model.layers.1.self_attn.k_proj.weight;" in text
    assert "not of this model 1: blk.0.attn_sinks.weight;" in text
    assert "of another shape 1: model.layers.0.mlp.gate_proj.weight ([95, 64], must be [96, 64])" in text


@pytest.mark.parametrize("left", [2, 50, 700])
def test_a_file_cut_in_its_header(left: int, tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf")
    path.write_bytes(path.read_bytes()[:left])
    assert re.fullmatch(rf"model: {path} cannot be read as a GGUF file \(.+\)", sentence(path))


def test_a_file_cut_in_its_tensors_names_them(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf")
    data = path.read_bytes()
    path.write_bytes(data[: -101 * 64 * 4 - 5])  # the output's matrix, and the end of the final norm before it
    text = sentence(path)
    assert "not readable 2: model.norm.weight, lm_head.weight (ends past the file's " in text


def test_a_value_that_is_not_finite_names_its_tensor(tmp_path: Path) -> None:
    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors["blk.1.ffn_up.weight"][3, 5] = np.nan

    text = sentence(write(tmp_path / "a.gguf", change=change))
    assert text.startswith("model: every value of model.layers.1.mlp.up_proj.weight of ")


def test_without_package_gguf_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that was asked for is refused; SmolLM2's own gets random weights, and a note."""
    path = write(tmp_path / "a.gguf")
    for module in ("load", "gguf_source"):
        monkeypatch.setattr(f"workbench.models.network.{module}.find_spec", lambda _name: None)
    assert "package gguf, which is not installed" in sentence(path)
    with pytest.raises(InvalidInput, match="package gguf, which is not installed"):
        GgufSource(path, config_of(), CPU)


def test_memory_is_looked_at_before_a_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.gguf")
    monkeypatch.setattr("workbench.models.network.load.free_host_bytes", lambda: 1000)
    monkeypatch.setattr(GgufSource, "get", lambda *_: pytest.fail("a tensor was read"))
    with pytest.raises(InvalidInput, match=r"a needs 0.00 GiB .* and 0.00 GiB is free on cpu"):
        load_network(spec_of(path), CPU_DEVICE)
