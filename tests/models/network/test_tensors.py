"""Names and shapes against transformers' own models, the parts of ranks, and the random tensors."""

from __future__ import annotations

from math import prod

import pytest
import torch
from network_cases import CPU, Whole, config_of, oracle, random_tensors

from workbench.models.network.batch import prefill_batch
from workbench.models.network.build import build_network
from workbench.models.network.config import NETWORKS, NetworkConfig, cut_network
from workbench.models.network.moe import MoE
from workbench.models.network.names import entries, expected_tensors, layer_of, rank_tensors
from workbench.models.network.tensors import RandomTensors
from workbench.runtime.kv_cache import KVCache


@pytest.mark.parametrize("case", ["llama", "mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2-groups", "deepseek_v3"])
def test_names_are_those_that_a_checkpoint_is_saved_with(case: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """transformers turns its stacks of experts back into the hub's names when it saves."""
    from safetensors.torch import load_file

    folder = tmp_path_factory.mktemp("saved")
    oracle(case, random_tensors(config_of(case))).save_pretrained(folder)
    saved = load_file(folder / "model.safetensors")
    config = config_of(case)
    assert {name: tuple(tensor.shape) for name, tensor in saved.items()} == expected_tensors(config)
    source = random_tensors(config)
    for name in (min(saved), max(saved), next(n for n in saved if "layers.1.mlp" in n or "layers.1.block" in n)):
        assert torch.equal(saved[name], source.get(name)), name


def test_ranks_parts_make_the_whole() -> None:
    config = cut_network(
        config_of("qwen3_moe", vocab_size=102, moe_intermediate_size=12, intermediate_size=24), tp_size=6
    )
    for name, entry in entries(config):
        parts = [entry.part(6, rank) for rank in range(6)]
        if parts[0] is None:
            assert all(part is None for part in parts)
            assert name.endswith(("norm.weight", "gate.weight"))
            continue
        spans = [(part[1], part[1] + part[2]) for part in parts if part is not None]
        size = entry.shape[parts[0][0]]
        if name.endswith(("k_proj.weight", "v_proj.weight")):  # two heads of 14 rows, three ranks each
            assert spans == [(0, 14)] * 3 + [(14, 28)] * 3
        else:
            assert [low for low, _ in spans] == [rank * size // 6 for rank in range(6)]
            assert spans[-1][1] == size
    assert sum(map(prod, rank_tensors(config).values())) == config.parameters()
    assert layer_of("model.layers.12.mlp.gate.weight") == 12
    assert layer_of("model.norm.weight") is None


def test_random_tensors_are_seeded_and_sized() -> None:
    config = config_of("deepseek_v3")
    source = RandomTensors(config, CPU, 3)
    assert source.names() == frozenset(expected_tensors(config))
    name = "model.layers.1.mlp.experts.5.down_proj.weight"
    first = source.get(name)
    assert first.dtype == torch.bfloat16
    assert torch.equal(first, RandomTensors(config, CPU, 3).get(name))
    assert not torch.equal(first, RandomTensors(config, CPU, 4).get(name))
    assert not torch.equal(first, source.get(name.replace(".5.", ".6.")))
    assert float(first.float().std()) == pytest.approx(19**-0.5, rel=0.1)
    norm = source.get("model.norm.weight").float()
    assert float(norm.mean()) == pytest.approx(1.0, abs=0.1)
    assert float(norm.std()) > 0.01  # a norm that leaves its weight out shows
    with pytest.raises(KeyError):
        source.get("model.layers.9.mlp.gate.weight")


def test_a_tensor_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"embed_tokens.weight must be \[51, 60\]; the source gives \[50, 60\]"):
        build_network(config_of("llama", vocab_size=51), Whole(config_of("llama", vocab_size=50)), quant="fp32")


def shrunk(name: str, layers: int) -> NetworkConfig:
    """A preset with its depth, experts and gate, and small sizes else."""
    from dataclasses import replace

    config = NETWORKS[name]
    assert config.mla is not None
    assert config.moe is not None
    mla = replace(config.mla, kv_lora_rank=64, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16)
    if mla.q_lora_rank:
        mla = replace(mla, q_lora_rank=48)
    moe = replace(config.moe, intermediate_size=44, shared_intermediate_size=88)
    sizes = {"hidden_size": 128, "num_heads": 4, "num_kv_heads": 4, "head_dim": 24, "vocab_size": 997}
    return replace(config, **sizes, intermediate_size=300, num_layers=layers, mla=mla, moe=moe)


@torch.no_grad()
@pytest.mark.parametrize(("name", "layers"), [("deepseek-v2-lite", 27), ("deepseek-v3", 8)])
def test_activations_stay_sane_and_every_expert_is_chosen(name: str, layers: int) -> None:
    config = shrunk(name, layers)
    network = build_network(config, RandomTensors(config, CPU, 0), quant="fp32", moe_backend="reference")
    cache = KVCache.for_network(network, 4, 384, 16)
    batch = prefill_batch(torch.randint(0, 997, (4, 384), generator=torch.Generator().manual_seed(0)), cache)
    x, turn = network.embed(batch.token_ids_S), network.rope(batch.positions_S)
    for layer, own in zip(network.layers, cache.layers, strict=True):
        if isinstance(layer.mlp, MoE):
            layer.mlp.keep_routing = True
        x = layer(x, batch, own, turn)
        assert 0.1 < float(x.square().mean().sqrt()) < 30
        if isinstance(layer.mlp, MoE):
            routing = layer.mlp.last_routing
            counts = torch.bincount(routing.topk_ids.flatten().to(torch.int64), minlength=layer.mlp.experts.num_experts)
            assert int(counts.min()) > 0
            assert int(counts.max()) < 5 * float(counts.float().mean())
    logits = network.logits(x)
    assert 0.3 < float(logits.square().mean().sqrt()) < 3
