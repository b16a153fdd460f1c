"""What configurations say of a whole model, and which of them are refused."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from network_cases import CASES, config_of

from workbench.errors import InvalidInput
from workbench.models.network.config import ARCHITECTURES, NETWORKS, network_config, parse_network
from workbench.models.network.files import find_network
from workbench.models.network.rope import rope_frequencies
from workbench.models.network.rope_config import RopeConfig
from workbench.models.shapes import Gate


@pytest.mark.parametrize(
    ("name", "billions", "kv_bytes"),
    [
        ("smollm2-135m", 0.134515008, 2 * 2 * 30 * 3 * 64),
        ("llama-3-8b", 8.030261248, 2 * 2 * 32 * 8 * 128),
        ("mixtral-8x7b", 46.702792704, 2 * 2 * 32 * 8 * 128),
        ("qwen2-57b-a14b", 57.408658944, 2 * 2 * 28 * 4 * 128),
        ("qwen3-30b-a3b", 30.532122624, 2 * 2 * 48 * 4 * 128),
        ("deepseek-v2-lite", 15.706484224, 2 * 27 * 576),
        ("deepseek-v3", 671.0264192, 2 * 61 * 576),
    ],
)
def test_presets_have_the_published_numbers_of_parameters(name: str, billions: float, kv_bytes: int) -> None:
    config = NETWORKS[name]
    assert config.parameters() == pytest.approx(billions * 1e9, abs=1e4)
    assert config.kv_bytes_per_token(2) == kv_bytes
    if config.mla is not None:
        assert config.kv_bytes_per_token(2, "expanded") == 2 * config.num_layers * config.num_heads * (192 + 128)


def test_names_that_stand_for_one_model() -> None:
    for one, other in (("deepseek-v2-lite", "deepseek-coder-v2-lite"), ("deepseek-v3", "deepseek-r1")):
        assert replace(NETWORKS[one], name="") == replace(NETWORKS[other], name="")
    assert {config.architecture for config in NETWORKS.values()} == set(ARCHITECTURES)


def test_layers_are_counted_as_sparse_ones_where_a_model_starts_dense() -> None:
    assert network_config("deepseek-v3", num_layers=2).num_layers == 5
    assert network_config("deepseek-v3", num_layers=2).moe_layers == 2
    assert network_config("deepseek-v2-lite").num_layers == 27
    assert network_config("mixtral-8x7b", num_layers=2).num_layers == 2
    assert network_config("llama-3-8b", num_layers=3).num_layers == 3
    with pytest.raises(
        InvalidInput, match=r"num_layers: must be from 1 to 58, the sparse layers of deepseek-v3, not 59"
    ):
        network_config("deepseek-v3", num_layers=59)
    with pytest.raises(InvalidInput, match=r"num_layers: must be from 1 to 32, the layers of llama-3-8b, not 0"):
        network_config("llama-3-8b", num_layers=0)


def test_which_layers_are_sparse() -> None:
    assert [config_of("qwen2_moe").is_moe_layer(i) for i in range(4)] == [False, True, False, False]
    assert [config_of("qwen3_moe").is_moe_layer(i) for i in range(2)] == [False, True]
    assert [config_of("deepseek_v2", moe_layer_freq=2).is_moe_layer(i) for i in range(3)] == [False, False, True]
    assert not config_of("llama").is_moe_layer(0)


def test_one_rank() -> None:
    config = network_config("deepseek-v3", tp_size=8)
    assert (config.rank_vocab, config.rank_heads) == (16160, 16)
    assert (config.rank_intermediate, config.rank_shared) == (2304, 256)
    assert config.layer_shape.intermediate_size == 256
    assert any("One rank of 8" in note for note in config.notes)
    shared = network_config("qwen3-30b-a3b", tp_size=8)  # four key heads: two ranks share one
    assert (shared.rank_kv_heads, shared.rank_heads) == (1, 4)
    whole = NETWORKS["llama-3-8b"]
    norms = 65 * whole.hidden_size
    assert 8 * (network_config("llama-3-8b", tp_size=8).parameters() - norms) == whole.parameters() - norms
    with pytest.raises(InvalidInput, match=r"must divide 49152 \(vocabulary\) and 1536 .*, not 9; allowed are 1 or 3"):
        network_config("smollm2-135m", tp_size=9)
    with pytest.raises(InvalidInput, match=r"tp_size: must divide 28 \(heads\) .*, not 8; allowed are 1, 2 or 4"):
        network_config("qwen2-57b-a14b", tp_size=8)
    with pytest.raises(InvalidInput, match="tp_size: must be at least 1, not 0"):
        network_config("llama-3-8b", tp_size=0)


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("llama", {"model_type": "gemma3"}, "architecture of x, gemma3, is not supported .* llama, .* or deepseek_v3"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act of x must be silu"),
        ("llama", {"mlp_bias": True}, "mlp_bias of x must be false"),
        ("llama", {"vocab_size": None}, "vocab_size in the configuration of x must be a whole number .* is missing"),
        ("llama", {"num_attention_heads": 7}, "num_key_value_heads .* must divide the 7 heads, not 2"),
        ("llama", {"num_attention_heads": 8}, "num_attention_heads .* must divide hidden_size 60, not 8"),
        ("llama", {"head_dim": 9}, "head size of x must be even, not 9"),
        ("llama", {"rms_norm_eps": 0}, "rms_norm_eps .* above 0, not 0"),
        ("llama", {"rope_parameters": {"rope_type": "longrope"}}, "of type longrope, .*; default, linear, .* is"),
        ("llama", {"rope_parameters": {"rope_type": "linear"}}, "factor .* must be a number above 0, not None"),
        ("mixtral", {"num_experts_per_tok": None}, "lacks num_experts_per_tok"),
        ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 9}, "use_sliding_window of x must be false"),
        ("deepseek_v3", {"topk_method": "best"}, "the gate of x has topk_method best"),
        ("deepseek_v3", {"num_experts_per_tok": 9}, "top_k 9 of x must be at most 8"),
        ("deepseek_v2", {"kv_lora_rank": 0}, "kv_lora_rank .* at least 1, not 0"),
    ],
)  # fmt: skip
def test_configurations_that_are_refused(case: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message) as caught:
        parse_network({**CASES[case], **changes}, "x", "a test")
    assert str(caught.value).startswith("model: ")
    assert "\n" not in str(caught.value)


def test_older_and_newer_rope_keys_say_the_same() -> None:
    newer = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 16}
    older = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    base = {key: value for key, value in CASES["llama"].items() if key != "rope_parameters"}
    one = parse_network({**base, "rope_parameters": newer}, "x", "")
    other = parse_network({**base, "rope_theta": 5e5, "rope_scaling": older}, "x", "")
    assert one == other
    assert one.rope.magnitude == pytest.approx(1.138629436)  # 0.1 ln 4 + 1


def test_deepseek_scales_the_softmax_by_the_square_of_its_magnitude() -> None:
    rope = NETWORKS["deepseek-v2-lite"].rope
    assert rope.interleaved
    assert rope.magnitude == pytest.approx(1.0)  # mscale and mscale_all_dim are equal
    assert rope.score_magnitude == pytest.approx((0.1 * 0.707 * 3.6888794541) ** 2 + 2 * 0.1 * 0.707 * 3.6888794541 + 1)
    v3 = NETWORKS["deepseek-v3"]
    assert v3.moe is not None
    assert v3.moe.gate == Gate(
        scoring="sigmoid", correction_bias=True, num_groups=8, topk_group=4, group_score="top2_sum"
    )


def test_stretched_frequencies_at_their_ends() -> None:
    """Fast pairs are kept, slow ones divided, those between lie between; llama3 at its own numbers."""
    for kind, extra in (
        ("llama3", {"low_freq_factor": 1.0, "high_freq_factor": 4.0}),
        ("yarn", {"beta_fast": 32.0, "beta_slow": 1.0}),
    ):
        rope = RopeConfig(theta=5e5, kind=kind, factor=8.0, original_max_position=8192, **extra)
        plain, made = rope_frequencies(RopeConfig(theta=5e5), 128), rope_frequencies(rope, 128)
        assert torch.equal(made[:8], plain[:8])
        torch.testing.assert_close(made[-8:], plain[-8:] / 8, rtol=1e-15, atol=0)
        assert bool(((made <= plain) & (made >= plain / 8 * (1 - 1e-15))).all())
        assert bool(((made < plain * 0.999) & (made > plain / 8 * 1.001)).any())


def test_files(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CASES["qwen3_moe"]))
    for place in (folder, folder / "config.json"):
        assert network_config(str(place), num_layers=1).name == "tiny"
    (folder / "pytorch_model.bin").touch()
    with pytest.raises(InvalidInput, match="holds pickled weights"):
        network_config(str(folder))
    (folder / "config.json").write_text("[1]")
    with pytest.raises(InvalidInput, match="must hold a JSON object, not list"):
        network_config(str(folder / "config.json"))
    with pytest.raises(InvalidInput, match=r"model: must be smollm2-135m, .* not 'nothing/here'"):
        network_config("nothing/here")
    with pytest.raises(InvalidInput, match=r"must hold a config\.json"):
        network_config(str(tmp_path))


def test_gguf_header_gives_the_numbers_of_the_preset() -> None:
    gguf = find_network("smollm2-135m").gguf
    if gguf is None:
        pytest.skip("no GGUF file of SmolLM2 here")
    config = network_config(str(gguf))
    preset = NETWORKS["smollm2-135m"]
    assert config.rms_eps == pytest.approx(preset.rms_eps)
    assert replace(config, name=preset.name, source=preset.source, rms_eps=preset.rms_eps) == preset


def test_reading_configurations_needs_no_torch() -> None:
    code = "import sys; from workbench.models.network.config import network_config as n; n('deepseek-v3', tp_size=2).parameters(); print('torch' in sys.modules)"  # noqa: E501
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.stdout.strip() == "False", run.stderr
