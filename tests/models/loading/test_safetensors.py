"""Folders of safetensors against transformers, which wrote them: every architecture, number format and block of fp8."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from load_cases import INDEX, PROMPTS, Given, difference, fp8_checkpoint, greedy, loaded, save, tensors_of, write
from network_cases import CASES, CPU, config_of, oracle
from safetensors.torch import load_file, save_file

from workbench.models.network.build import build_network
from workbench.models.network.config import cut_network
from workbench.models.network.generate import generate
from workbench.models.network.names import EMBED
from workbench.models.network.safetensors_source import SafetensorsSource, dequantized
from workbench.runtime.kv_cache import KVCache

ARCHITECTURES = ["llama", "mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3"]
LIMIT = 2e-5  # as in tests/models/network: float32 rounds at 6e-8, in sums over a few dozen terms


@pytest.mark.parametrize("case", ARCHITECTURES)
def test_a_sharded_folder_gives_the_text_of_transformers(case: str, tmp_path: Path) -> None:
    model = save(case, tmp_path, shard="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    network, resolved, notes = loaded(tmp_path)
    assert resolved["weights"] == f"safetensors of {tmp_path.name} (F32)"
    assert resolved.get("router", "the model's gate") == "the model's gate"
    assert not any("random" in note for note in notes)
    assert difference(network, model) < LIMIT
    made = generate(network, KVCache.for_network, PROMPTS, 5, page_size=4)
    assert made == [greedy(model, prompt, 5) for prompt in PROMPTS]


@pytest.mark.parametrize(("dtype", "kind"), [(torch.bfloat16, "BF16"), (torch.float16, "F16")])
def test_half_precision_is_read_as_it_is(dtype: torch.dtype, kind: str, tmp_path: Path) -> None:
    model = save("qwen3_moe", tmp_path, dtype)
    network, resolved, _ = loaded(tmp_path)
    assert resolved["weights"] == f"safetensors of {tmp_path.name} ({kind})"
    assert difference(network, model) < LIMIT
    source = SafetensorsSource(tmp_path, config_of("qwen3_moe"), CPU)
    name = "model.layers.1.mlp.experts.4.down_proj.weight"
    assert source.get(name).dtype == dtype
    assert torch.equal(source.get(name), tensors_of("qwen3_moe")[name].to(dtype))
    assert not source.quantized


def test_layers_and_ranks_take_their_part_of_a_folder(tmp_path: Path) -> None:
    """The first layers alone are needed; a rank has its rows and columns of the checkpoint's matrices."""
    tensors = {name: torch.cat((t, t[:1])) if t.shape[0] == 101 else t for name, t in tensors_of("mixtral").items()}
    folder = write(tmp_path, "mixtral", tensors, vocab_size=102)
    down = torch.stack([tensors[f"model.layers.0.block_sparse_moe.experts.{e}.w2.weight"] for e in range(5)])
    network = loaded(folder, num_layers=1, tp_size=3).network
    assert len(network.layers) == 1
    assert torch.equal(network.layers[0].mlp.experts.w2, down[..., :11])
    assert torch.equal(network.embed.weight, tensors[EMBED][:34])
    config = cut_network(config_of("mixtral", vocab_size=102), num_layers=1, tp_size=3)
    last = build_network(config, SafetensorsSource(folder, config, CPU), quant="fp32", rank=2)
    assert torch.equal(last.layers[0].mlp.experts.w2, down[..., 22:])
    assert torch.equal(last.embed.weight, tensors[EMBED][68:])


@pytest.mark.parametrize(
    ("case", "block", "scale_dtype"),
    [
        ("deepseek_v3", (128, 128), torch.float32),  # every matrix smaller than a block, or with a cut one
        ("deepseek_v3", (16, 24), torch.bfloat16),
        ("qwen3_moe", (5, 7), torch.float32),
    ],
)
def test_blocks_of_fp8(case: str, block: tuple[int, int], scale_dtype: torch.dtype, tmp_path: Path) -> None:
    folder, values = fp8_checkpoint(case, tmp_path, block, scale_dtype)
    network, resolved, notes = loaded(folder)
    assert resolved["weights"] == f"safetensors of {folder.name} (F32, F8_E4M3)"
    assert "The checkpoint's own quantised weights are dequantised, then stored as asked." in notes
    assert difference(network, oracle(case, Given(values))) < LIMIT
    source = SafetensorsSource(folder, config_of(case), CPU)
    assert source.quantized
    assert source.names() == frozenset(values)
    for name, value in values.items():
        torch.testing.assert_close(source.get(name), value, rtol=1e-7, atol=0)


def test_a_cut_block_has_its_own_scale() -> None:
    """130 rows and 200 columns in blocks of 128: the last 2 rows and 72 columns take the second scale."""
    data = torch.ones(130, 200).to(torch.float8_e4m3fn)
    made = dequantized(data, torch.tensor([[1.0, 2.0], [3.0, 5.0]]), (128, 128), "a matrix")
    assert made.dtype == torch.float32
    assert made[0, 0] == made[127, 127] == 1
    assert made[0, 128] == made[127, 199] == 2
    assert made[128, 0] == made[129, 127] == 3
    assert made[128, 128] == made[129, 199] == 5


def test_a_block_of_zeros_may_have_a_scale_of_zero() -> None:
    data = torch.tensor([[0.0, 0.0, 3.0]]).to(torch.float8_e4m3fn)
    assert dequantized(data, torch.tensor([[0.0, 0.5]]), (1, 2), "a matrix").tolist() == [[0, 0, 1.5]]


def test_files_that_the_index_does_not_name_do_not_count(tmp_path: Path) -> None:
    """Mixtral's folders hold the same weights once more, under other names."""
    model = save("mixtral", tmp_path, shard="60KB")
    (tmp_path / "consolidated.safetensors").write_bytes(b"not read")
    assert difference(loaded(tmp_path).network, model) < LIMIT


def test_the_index_says_which_of_two_files_counts(tmp_path: Path) -> None:
    model = save("qwen3_moe", tmp_path, shard="60KB")
    placed = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    right = placed["model.norm.weight"]
    other = next(name for name in sorted(set(placed.values())) if name != right)
    held = load_file(tmp_path / other)
    save_file({**held, "model.norm.weight": torch.zeros(41)}, tmp_path / other, metadata={"format": "pt"})
    assert difference(loaded(tmp_path).network, model) < LIMIT


def test_tensors_that_no_model_needs_may_be_there(tmp_path: Path) -> None:
    """Rotary frequencies, scales of a cache, and the layer behind DeepSeek-V3's last that foretells a token more."""
    tensors = tensors_of("deepseek_v3")
    more = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
        "model.layers.0.self_attn.k_scale": torch.ones(1),
        "model.layers.3.eh_proj.weight": torch.ones(64, 128),
        "model.layers.3.input_layernorm.weight": torch.ones(64),
    }
    folder = write(tmp_path, "deepseek_v3", {**tensors, **more})
    assert difference(loaded(folder).network, oracle("deepseek_v3", Given(tensors))) < LIMIT


def test_a_tied_output_is_not_read(tmp_path: Path) -> None:
    """The model's own configuration says that its embedding is the output; the file has another matrix there."""
    tensors = tensors_of("llama")
    folder = write(tmp_path, "llama", {**tensors, "lm_head.weight": torch.zeros(101, 60)})
    network = loaded(folder).network
    assert network.lm_head.weight is network.embed.weight
    assert CASES["llama"]["tie_word_embeddings"]
