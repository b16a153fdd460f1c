"""A tiny checkpoint through transformers: what is captured, what is refused, and the cache. No socket is opened."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from workbench.devices import DeviceInfo
from workbench.errors import InvalidInput
from workbench.models import checkpoint
from workbench.models.cache import cache_file, read_cache
from workbench.models.layer import DenseCut, load_layer_source
from workbench.models.locate import find_files
from workbench.modes import RoutingKind
from workbench.spec import RunSpec

MIDDLE = 2  # of four layers


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    def refuse(*_args: Any) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of every capture that was made."""
    made: list[int] = []
    original = checkpoint.capture

    def counted(files: Any, text: str, rows: int, fingerprint: str) -> Any:
        made.append(rows)
        return original(files, text, rows, fingerprint)

    monkeypatch.setattr(checkpoint, "capture", counted)
    return made


def layer_of(folder: Path, cpu: DeviceInfo, **values: Any) -> DenseCut:
    source = load_layer_source(RunSpec(model=str(folder)).replace(**values), cpu)
    assert isinstance(source, DenseCut)
    return source


def relative(y: torch.Tensor, x: torch.Tensor) -> float:
    return float((y - x).norm() / x.norm())


def test_captured_rows_and_weights_are_the_whole_models(tiny_llama: Path, cpu: DeviceInfo) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = layer_of(tiny_llama, cpu, experts=6, top_k=6, num_tokens=1500)
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(tiny_llama)(checkpoint.topics_text()[:8000])["input_ids"]
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    model.model.layers[MIDDLE].mlp.register_forward_hook(lambda _m, args, out: seen.append((args[0][0], out[0])))
    with torch.no_grad():
        for start in (0, 1024):
            model(torch.tensor([ids[start : start + 1024]]))
    hidden, output = (torch.cat(parts)[:1500] for parts in zip(*seen, strict=True))
    assert relative(source.hidden_states(1500), hidden) < 1e-5
    dense = source.dense_output(source.hidden_states(1500))
    assert dense is not None
    assert relative(dense, output) < 1e-5
    tensors = load_file(tiny_llama / "model.safetensors")
    w1, w2 = source.expert(1)  # channels 8 to 15 of 48
    name = f"model.layers.{MIDDLE}.mlp"
    assert torch.equal(w1, torch.cat([tensors[f"{name}.{part}_proj.weight"][8:16] for part in ("gate", "up")]))
    assert torch.equal(w2, tensors[f"{name}.down_proj.weight"][:, 8:16])


def test_what_was_loaded_is_said(tiny_llama: Path, cpu: DeviceInfo) -> None:
    resolved = layer_of(tiny_llama, cpu).resolved
    assert resolved["weights"] == "tiny-llama layer 2 MLP"
    assert str(resolved["inputs"]).startswith("text of pydoc_data.topics before the MLP of layer 2")
    assert resolved["router"] == "oracle router"


def test_second_load_does_not_load_the_model(
    tiny_llama: Path, cpu: DeviceInfo, loads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = layer_of(tiny_llama, cpu)
    monkeypatch.setattr(checkpoint, "_load", lambda *_args: pytest.fail("transformers was asked"))
    second = layer_of(tiny_llama, cpu)
    assert loads == [2048]
    assert torch.equal(first.hidden_states(1024), second.hidden_states(1024))
    assert torch.equal(first.expert(0)[0], second.expert(0)[0])


def test_more_rows_are_captured_when_asked_for(tiny_llama: Path, cpu: DeviceInfo, loads: list[int]) -> None:
    source = layer_of(tiny_llama, cpu, num_tokens=16)
    few = source.hidden_states(16)
    routing = source.routings(RoutingKind.MODEL, 16, 20)
    assert source.hidden_states(1025).shape == (1025, 32)
    assert loads == [2048]  # a sweep from 1 to 1024 tokens reads the checkpoint once
    assert source.hidden_states(2049).shape == (2049, 32)
    assert torch.equal(source.hidden_states(16), few)
    again = source.routings(RoutingKind.MODEL, 16, 20)
    assert all(torch.equal(a.topk_ids, b.topk_ids) for a, b in zip(routing, again, strict=True))
    assert source.hidden_states(6000).shape == (6000, 32)
    assert torch.equal(source.hidden_states(6000)[4096:], source.hidden_states(1904))
    assert len(source.routings(RoutingKind.MODEL, 6000, 2)[1].topk_ids) == 6000
    layer_of(tiny_llama, cpu, num_tokens=4096)
    assert loads == [2048, 3072, 4096]


@pytest.mark.parametrize("damage", ["flipped", "cut", "text", "empty"])
def test_damaged_cache_is_rebuilt(damage: str, tiny_llama: Path, cpu: DeviceInfo, loads: list[int]) -> None:
    good = layer_of(tiny_llama, cpu).expert(0)[0]
    path = cache_file(find_files(str(tiny_llama)).identity)
    data = bytearray(path.read_bytes())
    if damage == "flipped":
        data[-100] ^= 0x40
    path.write_bytes({"flipped": data, "cut": data[:-7], "text": b"not tensors", "empty": b""}[damage])
    assert torch.equal(layer_of(tiny_llama, cpu).expert(0)[0], good)
    assert loads == [2048, 2048]
    layer_of(tiny_llama, cpu)
    assert loads == [2048, 2048]  # whole again


def test_changed_checkpoint_is_read_again(tiny_llama: Path, tmp_path: Path, cpu: DeviceInfo, loads: list[int]) -> None:
    folder = shutil.copytree(tiny_llama, tmp_path / "copy")
    layer_of(folder, cpu)
    (folder / "model.safetensors").touch()
    layer_of(folder, cpu)
    assert loads == [2048, 2048]


def test_cache_holds_nothing_half_written(tiny_llama: Path, own_cache: Path, cpu: DeviceInfo) -> None:
    layer_of(tiny_llama, cpu)
    (only,) = own_cache.iterdir()
    assert only.suffix == ".safetensors"
    assert read_cache(find_files(str(tiny_llama)).identity) is not None


def test_unwritable_cache_is_said_and_survived(
    tiny_llama: Path, tmp_path: Path, cpu: DeviceInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("MOE_WORKBENCH_CACHE", str(tmp_path / "file" / "cache"))
    source = layer_of(tiny_llama, cpu)
    assert any(note.startswith("Not cached: ") for note in source.notes)
    assert source.resolved["weights"] == "tiny-llama layer 2 MLP"


def test_a_safetensors_file_stands_for_its_folder(tiny_llama: Path, cpu: DeviceInfo) -> None:
    assert layer_of(tiny_llama / "model.safetensors", cpu).resolved["weights"] == "tiny-llama layer 2 MLP"


def test_config_json_alone_gives_random_weights(tiny_llama: Path, cpu: DeviceInfo, loads: list[int]) -> None:
    source = layer_of(tiny_llama / "config.json", cpu)
    assert source.resolved["weights"] == "random, seed 0"
    assert loads == []


def test_missing_packages_are_named(tiny_llama: Path, cpu: DeviceInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "find_spec", lambda _name: None)
    with pytest.raises(InvalidInput, match="reading it needs transformers"):
        layer_of(tiny_llama, cpu)


@pytest.mark.parametrize(
    ("options", "words"), [({"mlp_bias": True}, "has biases"), ({"hidden_act": "gelu"}, "activated by gelu")]
)
def test_other_mlps_are_refused(
    options: dict[str, Any], words: str, write_llama: Any, tmp_path: Path, cpu: DeviceInfo
) -> None:
    with pytest.raises(InvalidInput, match=words):
        layer_of(write_llama(tmp_path / "other", **options), cpu)


def test_mlp_without_a_gate_is_refused(tmp_path: Path, tiny_llama: Path, cpu: DeviceInfo) -> None:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    sizes = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 48}
    folder = shutil.copytree(tiny_llama, tmp_path / "neox")
    config = GPTNeoXConfig(**sizes, num_hidden_layers=2, num_attention_heads=4)
    GPTNeoXForCausalLM(config).save_pretrained(folder)
    with pytest.raises(InvalidInput, match="no mlp with gate_proj, up_proj and down_proj"):
        layer_of(folder, cpu)


def test_checkpoint_without_a_tokenizer_is_refused(tiny_llama: Path, tmp_path: Path, cpu: DeviceInfo) -> None:
    folder = shutil.copytree(tiny_llama, tmp_path / "mute", ignore=shutil.ignore_patterns("tokenizer*"))
    with pytest.raises(InvalidInput, match="no configuration and tokenizer"):
        layer_of(folder, cpu)


def test_damaged_weights_are_refused(tiny_llama: Path, tmp_path: Path, cpu: DeviceInfo) -> None:
    folder = shutil.copytree(tiny_llama, tmp_path / "damaged")
    (folder / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(InvalidInput, match="cannot be loaded by transformers"):
        layer_of(folder, cpu)


def test_code_of_a_checkpoint_is_never_run(tiny_llama: Path, tmp_path: Path, cpu: DeviceInfo) -> None:
    folder = shutil.copytree(tiny_llama, tmp_path / "code")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(InvalidInput, match="no configuration and tokenizer"):
        layer_of(folder, cpu)
    assert not (tmp_path / "ran").exists()


def write_gguf(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """A Llama of four layers as llama.cpp would name its parts, in float32, with a byte-level vocabulary."""
    from gguf import GGUFWriter
    from tokenizers import pre_tokenizers

    writer = GGUFWriter(path, "llama")
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(48)
    writer.add_block_count(4)
    writer.add_head_count(4)
    writer.add_head_count_kv(4)
    writer.add_context_length(2048)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(8)
    writer.add_vocab_size(259)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<s>", "</s>", *letters, letters[0] + letters[1]])
    writer.add_token_types([3, 3, *[1] * (len(letters) + 1)])
    writer.add_token_merges([f"{letters[0]} {letters[1]}"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_gguf_file_is_loaded(tmp_path: Path, cpu: DeviceInfo, loads: list[int]) -> None:
    torch.manual_seed(1)
    tensors = {"token_embd.weight": torch.randn(259, 32), "output_norm.weight": torch.ones(32)}
    for layer in range(4):
        part = f"blk.{layer}"
        for name in ("attn_norm", "ffn_norm"):
            tensors[f"{part}.{name}.weight"] = torch.ones(32)
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            tensors[f"{part}.{name}.weight"] = torch.randn(32, 32) / 6
        tensors[f"{part}.ffn_gate.weight"] = torch.randn(48, 32) / 6
        tensors[f"{part}.ffn_up.weight"] = torch.randn(48, 32) / 6
        tensors[f"{part}.ffn_down.weight"] = torch.randn(32, 48) / 7
    path = write_gguf(tmp_path / "tiny.gguf", tensors)
    source = layer_of(path, cpu, experts=3, top_k=3)
    w1, w2 = source.expert(2)  # channels 32 to 47
    assert torch.equal(w1, torch.cat([tensors[f"blk.2.ffn_{part}.weight"][32:] for part in ("gate", "up")]))
    assert torch.equal(w2, tensors["blk.2.ffn_down.weight"][:, 32:])
    x = source.hidden_states(1024)
    assert torch.allclose(x.square().mean(dim=-1), torch.ones(1024), atol=1e-3)  # each row left an RMS norm of weight 1
    assert source.resolved["weights"] == "tiny layer 2 MLP"
    layer_of(path, cpu)
    assert loads == [2048]
