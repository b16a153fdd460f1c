"""Shapes from `config.json` of every family, from folders, GGUF headers and the local hub cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from workbench.errors import InvalidInput
from workbench.models.configs import parse_config
from workbench.models.locate import find_files
from workbench.models.shapes import Gate, model_shape, rank_shape, router_reason
from workbench.spec import RunSpec

BASE = {"hidden_size": 64, "num_hidden_layers": 12, "intermediate_size": 256, "hidden_act": "silu"}
# family: config -> experts, channels, top_k, renormalise, MoE layers, scaling, whether its own gate runs
FAMILIES: dict[str, tuple[dict[str, Any], tuple[Any, ...]]] = {
    "mixtral": (
        {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2},
        (8, 256, 2, True, 12, 1.0, True),
    ),
    "qwen2_moe": (
        {
            "model_type": "qwen2_moe",
            "num_experts": 16,
            "moe_intermediate_size": 96,
            "num_experts_per_tok": 4,
            "norm_topk_prob": False,
            "decoder_sparse_step": 2,
        },
        (16, 96, 4, False, 6, 1.0, True),
    ),
    "qwen3_moe": (
        {
            "model_type": "qwen3_moe",
            "num_experts": 16,
            "moe_intermediate_size": 96,
            "num_experts_per_tok": 4,
            "norm_topk_prob": True,
            "mlp_only_layers": [0, 3],
        },
        (16, 96, 4, True, 10, 1.0, True),
    ),
    "deepseek_v2": (
        {
            "model_type": "deepseek_v2",
            "n_routed_experts": 32,
            "moe_intermediate_size": 80,
            "num_experts_per_tok": 6,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
            "first_k_dense_replace": 1,
            "topk_method": "greedy",
            "n_group": 1,
            "n_shared_experts": 2,
        },
        (32, 80, 6, False, 11, 1.0, True),
    ),
    "deepseek_v2_groups": (
        {
            "model_type": "deepseek_v2",
            "n_routed_experts": 32,
            "moe_intermediate_size": 80,
            "num_experts_per_tok": 6,
            "routed_scaling_factor": 16,
            "topk_method": "group_limited_greedy",
            "n_group": 8,
            "topk_group": 3,
        },
        (32, 80, 6, False, 12, 16.0, True),
    ),
    "deepseek_v3": (
        {
            "model_type": "deepseek_v3",
            "n_routed_experts": 32,
            "moe_intermediate_size": 80,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "first_k_dense_replace": 3,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "n_group": 4,
            "topk_group": 2,
        },
        (32, 80, 8, True, 9, 2.5, True),
    ),
    "deepseek_v3_bare": (  # the family's own code knows the rest
        {"model_type": "deepseek_v3", "n_routed_experts": 32, "moe_intermediate_size": 80, "num_experts_per_tok": 8},
        (32, 80, 8, True, 12, 2.5, True),
    ),
    "glm4_moe": (
        {
            "model_type": "glm4_moe",
            "n_routed_experts": 20,
            "moe_intermediate_size": 80,
            "num_experts_per_tok": 4,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.5,
        },
        (20, 80, 4, True, 12, 1.5, True),
    ),
    "described": (  # no family that is known, but its gate in full
        {
            "model_type": "kimi_k2",
            "n_routed_experts": 24,
            "moe_intermediate_size": 80,
            "num_experts_per_tok": 4,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.827,
        },
        (24, 80, 4, True, 12, 2.827, True),
    ),
    "gpt_oss": (
        {"model_type": "gpt_oss", "num_local_experts": 32, "num_experts_per_tok": 4, "experts_per_token": 4},
        (32, 256, 4, True, 12, 1.0, True),
    ),
    "generic": (
        {"model_type": "newcomer", "num_experts": 4, "moe_intermediate_size": 32, "moe_topk": 3},
        (4, 32, 3, False, 12, 1.0, False),
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_config_json_of_each_family(family: str, write_config: Any) -> None:
    config, expected = FAMILIES[family]
    path = write_config(f"model-{family}", **BASE, **config)
    shape = model_shape(RunSpec(model=str(path)))
    numbers = (shape.num_experts, shape.intermediate_size, shape.top_k, shape.renormalize, shape.num_layers)
    assert (*numbers, shape.routed_scaling_factor, router_reason(shape) is None) == expected
    assert (shape.hidden_size, shape.dense_source, shape.name) == (64, False, f"model-{family}")
    assert model_shape(RunSpec(model=str(path.parent))) == shape  # a folder that holds it works the same


PLAIN = Gate()
BIASED = Gate(scoring="sigmoid", correction_bias=True, group_score="top2_sum")


@pytest.mark.parametrize(
    ("family", "changes", "gate"),
    [
        ("mixtral", {}, PLAIN),
        ("deepseek_v2", {}, PLAIN),
        ("deepseek_v2", {"n_group": 8, "topk_group": 3}, PLAIN),  # greedy looks at no groups
        ("deepseek_v2", {"scoring_func": "sigmoid"}, Gate(scoring="sigmoid")),
        ("deepseek_v2_groups", {}, Gate(num_groups=8, topk_group=3)),
        ("deepseek_v3", {}, replace(BIASED, num_groups=4, topk_group=2)),
        ("deepseek_v3", {"n_group": None, "topk_group": None}, BIASED),
        ("deepseek_v3", {"n_group": 1, "topk_group": 1}, BIASED),
        ("deepseek_v3", {"topk_method": "group_limited_greedy"}, Gate(scoring="sigmoid", num_groups=4, topk_group=2)),
        ("deepseek_v3_bare", {}, replace(BIASED, num_groups=8, topk_group=4)),
        ("glm4_moe", {}, BIASED),
        ("described", {}, BIASED),
    ],
)
def test_the_gate_is_what_the_keys_say(family: str, changes: dict[str, Any], gate: Gate) -> None:
    config = parse_config({**BASE, **FAMILIES[family][0], **changes}, "m", source="s")
    assert (config.gate, config.gate_reason) == (gate, "")


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("generic", {}, "model type newcomer) is not known; known are those of deepseek_v2, deepseek_v3"),
        ("generic", {"scoring_func": "sigmoid"}, "model type newcomer"),
        ("mixtral", {"scoring_func": "sigmoid"}, "scoring_func sigmoid, topk_method greedy"),
        ("deepseek_v3", {"scoring_func": "sqrtsoftplus"}, "scoring_func sqrtsoftplus; known are softmax or sigmoid"),
        (
            "deepseek_v3",
            {"topk_method": "hash"},
            "topk_method hash; known are greedy, group_limited_greedy or",
        ),
        ("deepseek_v3", {"n_group": 5}, "n_group 5, which does not divide its 32 experts"),
        ("deepseek_v3", {"topk_group": 5}, "topk_group 5, which is more than its n_group 4"),
    ],
)
def test_a_gate_that_is_not_known_is_said(family: str, changes: dict[str, Any], words: str) -> None:
    config = parse_config({**BASE, **FAMILIES[family][0], **changes}, "m", source="s")
    assert config.gate == PLAIN
    assert config.gate_reason.startswith("the gate of m ")
    assert words in config.gate_reason
    reason = router_reason(rank_shape(config, experts=None, top_k=None, tp_size=1))
    assert reason == f"{config.gate_reason}; balanced, uniform, zipf or single_expert is allowed"


def test_more_experts_than_the_chosen_groups_hold_is_said() -> None:
    config = parse_config({**BASE, **FAMILIES["deepseek_v3"][0]}, "m", source="s")
    assert router_reason(rank_shape(config, experts=None, top_k=16, tp_size=1)) is None
    reason = router_reason(rank_shape(config, experts=None, top_k=17, tp_size=1))
    assert reason is not None
    assert reason.startswith("the gate of m chooses among the 16 experts of 2 groups, which are fewer than top_k 17; ")


def test_what_is_left_out_is_said() -> None:
    assert "shared" in parse_config({**BASE, **FAMILIES["deepseek_v2"][0]}, "m", source="s").notes[0]
    assert "biases" in parse_config({**BASE, **FAMILIES["gpt_oss"][0]}, "m", source="s").notes[0]
    assert parse_config({**BASE, **FAMILIES["mixtral"][0]}, "m", source="s").notes == ()
    gelu = parse_config({**BASE, "hidden_act": "gelu"}, "m", source="s")
    assert gelu.notes == ("The model's activation gelu is replaced by SiLU.",)


def test_nested_text_config_of_a_multimodal_model() -> None:
    config = parse_config({"model_type": "outer", "text_config": {**BASE, **FAMILIES["qwen3_moe"][0]}}, "m", source="s")
    assert (config.num_experts, config.channels, config.gate_reason) == (16, 96, "")


def test_dense_config_is_cut(write_config: Any) -> None:
    path = write_config("llama", model_type="llama", **BASE)
    shape = model_shape(RunSpec(model=str(path), experts=4, top_k=3))
    assert (shape.num_experts, shape.intermediate_size, shape.top_k, shape.dense_source) == (4, 64, 3, True)
    assert model_shape(RunSpec(model=str(path))).num_experts == 8


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "vit", "hidden_size": 4, "num_hidden_layers": 2}, ["neither experts", "intermediate_size"]),
        ({**BASE, "num_local_experts": 8}, ["lacks num_experts_per_tok"]),
        ({**BASE, "hidden_size": -3}, ["hidden_size", "at least 1", "-3"]),
        ({**BASE, "hidden_size": "64"}, ["hidden_size", "whole number", "'64'"]),
        ({**BASE, "num_experts": 2.5, "num_experts_per_tok": 1}, ["num_experts", "whole number", "2.5"]),
        ({**BASE, "num_experts": 8, "top_k": 2, "routed_scaling_factor": -1}, ["routed_scaling_factor", "above 0"]),
        ({**BASE, **FAMILIES["deepseek_v3"][0], "n_group": 2.5}, ["n_group", "whole number", "2.5"]),
        ({**BASE, **FAMILIES["deepseek_v3"][0], "topk_group": 0}, ["topk_group", "at least 1"]),
        ({**BASE, **FAMILIES["deepseek_v3"][0], "topk_group": None}, ["lacks topk_group"]),
        ({**BASE, "num_experts": 8, "top_k": 2, "mlp_only_layers": 3}, ["layers with experts", "mlp_only_layers"]),
        ({**BASE, "num_experts": 8, "top_k": 2, "first_k_dense_replace": 12}, ["layers with experts"]),
    ],
)
def test_unusable_configs_are_refused_by_key(config: dict[str, Any], words: list[str], write_config: Any) -> None:
    with pytest.raises(InvalidInput) as caught:
        find_files(str(write_config(**config)))
    assert str(caught.value).startswith("model: ")
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("text", ["[1, 2]", "{", "\udcff"])
def test_files_that_are_no_config(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(InvalidInput, match=r"^model: .*config\.json"):
        find_files(str(path))


def test_moe_weights_are_refused_and_the_config_offered(write_config: Any) -> None:
    path = write_config("moe", **BASE, **FAMILIES["mixtral"][0])
    (path.parent / "model.safetensors").write_bytes(b"")
    with pytest.raises(InvalidInput, match=r"Mixture-of-Experts checkpoint.*config\.json is allowed"):
        model_shape(RunSpec(model=str(path.parent)))
    assert model_shape(RunSpec(model=str(path))).num_experts == 8


def test_pickled_weights_are_refused(write_config: Any) -> None:
    path = write_config("pickled", model_type="llama", **BASE)
    (path.parent / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(InvalidInput, match=r"pickled weights .*never read"):
        find_files(str(path.parent))


def test_folder_without_config_names_what_it_needs(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"must hold a config\.json"):
        find_files(str(tmp_path))
    (tmp_path / "weights.gguf").write_bytes(b"")
    with pytest.raises(InvalidInput, match=r"weights\.gguf"):
        find_files(str(tmp_path))


def test_hub_id_in_the_local_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_config: Any) -> None:
    from huggingface_hub import constants, file_download

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(file_download.constants, "HF_HUB_CACHE", str(tmp_path))
    write_config("models--maker--sparse/snapshots/abc123", **BASE, **FAMILIES["qwen3_moe"][0])
    refs = tmp_path / "models--maker--sparse" / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc123")
    shape = model_shape(RunSpec(model="maker/sparse"))
    assert (shape.name, shape.num_experts) == ("maker/sparse", 16)
    with pytest.raises(InvalidInput, match="local cache, not 'maker/other'"):
        model_shape(RunSpec(model="maker/other"))


def write_header(path: Path, *, experts: int | None = None, channels: int | None = 48) -> Path:
    from gguf import GGUFWriter

    writer = GGUFWriter(path, "llama")
    writer.add_token_list(["a", "bc", "d" * 300])  # strings to be skipped before the numbers
    writer.add_array("some.numbers", [1, 2, 3])
    writer.add_embedding_length(32)
    writer.add_block_count(6)
    if channels is not None:
        writer.add_feed_forward_length(channels)
    if experts is not None:
        writer.add_expert_count(experts)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_gguf_header_gives_the_shape(tmp_path: Path) -> None:
    config = find_files(str(write_header(tmp_path / "tiny.gguf"))).config
    assert (config.name, config.hidden_size, config.channels, config.num_layers) == ("tiny", 32, 48, 6)
    assert rank_shape(config, experts=None, top_k=None, tp_size=2).intermediate_size == 3


def test_gguf_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"Mixture-of-Experts checkpoint \(8 experts\)"):
        find_files(str(write_header(tmp_path / "moe.gguf", experts=8)))
    with pytest.raises(InvalidInput, match=r"no single llama\.feed_forward_length"):
        find_files(str(write_header(tmp_path / "odd.gguf", channels=None)))


def test_broken_gguf_files(tmp_path: Path) -> None:
    whole = write_header(tmp_path / "whole.gguf").read_bytes()
    for name, data in {
        "empty": b"",
        "other": b"PK\x03\x04" + whole[4:],
        "version": whole[:4] + b"\x09\0\0\0" + whole[8:],
        "count": whole[:16] + b"\xff" * 8 + whole[24:],
        **{f"cut{n}": whole[:n] for n in (3, 10, 30, 60, len(whole) // 2)},
    }.items():
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(data)
        with pytest.raises(InvalidInput, match="cannot be read as a GGUF file"):
            find_files(str(path))
