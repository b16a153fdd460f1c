"""Layers from seeds: weights, routers, ranks, and the path with no file at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from moe_kernels import Routing, fused_experts, select_experts

from workbench.devices import DeviceInfo
from workbench.errors import InvalidInput
from workbench.models import locate
from workbench.models.layer import DenseCut, LayerSource, load_layer_source
from workbench.modes import Quant, RoutingKind
from workbench.spec import RunSpec

MOE = {
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_experts": 8,
    "moe_intermediate_size": 48,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
}
DENSE = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 96}


def relative(y: torch.Tensor, x: torch.Tensor) -> float:
    return float((y - x).norm() / x.norm())


def summed(source: LayerSource, x: torch.Tensor, routing: Routing) -> torch.Tensor:
    """The layer by its definition, in float64."""
    out = torch.zeros_like(x, dtype=torch.float64)
    for token in range(len(x)):
        for weight, expert in zip(routing.topk_weights[token], routing.topk_ids[token], strict=True):
            w1, w2 = (w.double() for w in source.expert(int(expert)))
            gate, up = (w1 @ x[token].double()).chunk(2)
            out[token] += weight * (w2 @ (torch.nn.functional.silu(gate) * up))
    return out


@pytest.fixture
def moe(write_config: Any, cpu: DeviceInfo) -> LayerSource:
    return load_layer_source(RunSpec(model=str(write_config("moe", **MOE)), seed=7), cpu)


def test_random_weights_are_seeded_per_expert_and_sane(moe: LayerSource, write_config: Any, cpu: DeviceInfo) -> None:
    w1, w2 = moe.expert(3)
    assert (w1.shape, w2.shape, w1.dtype) == ((96, 64), (64, 48), torch.float32)
    assert w1.std().item() == pytest.approx(64**-0.5, rel=0.05)
    assert w2.std().item() == pytest.approx(48**-0.5, rel=0.05)
    again, _ = moe.expert(3)
    assert torch.equal(w1, again)
    assert not torch.equal(w1, moe.expert(4)[0])
    other = load_layer_source(RunSpec(model=str(write_config("moe", **MOE)), seed=8), cpu)
    assert not torch.equal(w1, other.expert(3)[0])
    with pytest.raises(IndexError, match="from 0 to 7, not 8"):
        moe.expert(8)


def test_randomness_is_said(moe: LayerSource) -> None:
    assert moe.resolved == {"weights": "random, seed 7", "inputs": "random, seed 7", "router": "random gate, seed 7"}
    assert "Weights and inputs are random, seed 7." in moe.notes


@pytest.mark.parametrize(
    ("quant", "dtype"), [(Quant.FP32, torch.float32), (Quant.BF16, torch.bfloat16), (Quant.FP16, torch.float16)]
)
def test_built_weights_are_the_experts_rounded(moe: LayerSource, quant: Quant, dtype: torch.dtype) -> None:
    weights = moe.build_weights(quant)
    assert (weights.w1.dtype, weights.w1.shape, weights.w2.shape) == (dtype, (8, 96, 64), (8, 64, 48))
    for index in range(8):
        w1, w2 = moe.expert(index)
        assert torch.equal(weights.w1[index], w1.to(dtype))
        assert torch.equal(weights.w2[index], w2.to(dtype))


def test_model_routing_is_the_gate_of_the_inputs(moe: LayerSource) -> None:
    x = moe.hidden_states(5)
    logits = moe.router_logits(x)
    assert logits is not None
    expected = select_experts(logits, 3, renormalize=True)
    first, second, *_ = moe.routings(RoutingKind.MODEL, 5, 4)
    assert torch.equal(first.topk_ids, expected.topk_ids)
    assert torch.allclose(first.topk_weights, expected.topk_weights, atol=1e-6)
    assert torch.allclose(first.topk_weights.sum(dim=-1), torch.ones(5))
    assert not torch.equal(first.topk_ids, second.topk_ids)
    onwards = moe.router_logits(moe.hidden_states(10)[5:])
    assert onwards is not None
    assert torch.equal(second.topk_ids, select_experts(onwards, 3).topk_ids)


def test_routed_scaling_reaches_the_weights(write_config: Any, cpu: DeviceInfo) -> None:
    scaled = {**MOE, "routed_scaling_factor": 2.5}
    source = load_layer_source(RunSpec(model=str(write_config("scaled", **scaled))), cpu)
    (routing,) = source.routings(RoutingKind.MODEL, 9, 1)
    assert torch.allclose(routing.topk_weights.sum(dim=-1), torch.full((9,), 2.5))


def test_unsupported_gate_is_refused_not_replaced(write_config: Any, cpu: DeviceInfo) -> None:
    path = write_config("v3", **{**MOE, "model_type": "deepseek_v3", "scoring_func": "sqrtsoftplus"})
    source = load_layer_source(RunSpec(model=str(path)), cpu)
    assert source.router_logits(source.hidden_states(2)) is None
    assert source.resolved["router"] == "none"
    with pytest.raises(InvalidInput, match=r"routing: the gate of v3 .* balanced"):
        source.routings(RoutingKind.MODEL, 2, 1)
    assert len(source.routings(RoutingKind.BALANCED, 2, 3)) == 3


@pytest.mark.parametrize("kind", list(RoutingKind))
def test_routings_have_the_contracts_types(moe: LayerSource, kind: RoutingKind) -> None:
    made = moe.routings(kind, 6, 4, 1.2)
    assert len(made) == 4
    for routing in made:
        assert (routing.topk_weights.dtype, routing.topk_ids.dtype) == (torch.float32, torch.int32)
        assert routing.topk_weights.shape == routing.topk_ids.shape == (6, 3)
        assert torch.allclose(routing.topk_weights.sum(dim=-1), torch.ones(6))


@pytest.fixture
def dense(write_config: Any, own_cache: Path, cpu: DeviceInfo) -> LayerSource:
    return load_layer_source(RunSpec(model=str(write_config("dense", **DENSE)), experts=6, top_k=6), cpu)


def test_all_experts_of_a_cut_sum_to_the_dense_output(dense: LayerSource) -> None:
    x = dense.hidden_states(13)
    (routing,) = dense.routings(RoutingKind.MODEL, 13, 1)
    whole = dense.dense_output(x)
    assert whole is not None
    assert relative(summed(dense, x, routing), whole) < 1e-5
    assert relative(fused_experts(x, dense.build_weights(Quant.FP32), routing, impl="reference"), whole) < 1e-5
    assert dense.resolved["router"] == "all experts, weight 1"


def test_random_dense_weights_are_said(dense: LayerSource, own_cache: Path) -> None:
    assert dense.resolved["weights"] == "random, seed 0"
    assert any("No weights of dense" in note and "random" in note for note in dense.notes)
    assert not own_cache.exists()


@pytest.mark.parametrize("kind", list(RoutingKind))
def test_experts_of_a_cut_weigh_one_in_every_kind(kind: RoutingKind, write_config: Any, cpu: DeviceInfo) -> None:
    source = load_layer_source(RunSpec(model=str(write_config("dense", **DENSE)), experts=6), cpu)
    for routing in source.routings(kind, 4, 3):
        assert torch.equal(routing.topk_weights, torch.ones(4, 2))


def test_ranks_share_the_dense_mlp(write_config: Any, cpu: DeviceInfo) -> None:
    path = str(write_config("dense", **DENSE))
    whole = load_layer_source(RunSpec(model=path, experts=6, top_k=6), cpu)
    rank = load_layer_source(RunSpec(model=path, experts=6, top_k=6, tp_size=2), cpu)
    (w1, w2), (part1, part2) = whole.expert(2), rank.expert(2)
    assert torch.equal(part1, torch.cat((w1[:8], w1[16:24])))  # F is 16, of which a rank of two keeps 8
    assert torch.equal(part2, w2[:, :8])
    x = rank.hidden_states(5)
    mine = rank.dense_output(x)
    assert mine is not None
    assert relative(summed(rank, x, rank.routings(RoutingKind.MODEL, 5, 1)[0]), mine) < 1e-5
    assert any("One rank of 2" in note for note in rank.notes)


def test_oracle_router_is_the_best_pair_by_norm(write_config: Any, cpu: DeviceInfo) -> None:
    source = load_layer_source(RunSpec(model=str(write_config("dense", **DENSE)), experts=6), cpu)
    assert isinstance(source, DenseCut)
    x = source.hidden_states(11)
    norms = []
    for expert in range(6):
        alone = Routing(torch.ones(11, 1), torch.full((11, 1), expert, dtype=torch.int32))
        norms.append(summed(source, x, alone).norm(dim=-1))
    expected = torch.stack(norms, dim=-1).topk(2).indices
    (routing,) = source.routings(RoutingKind.MODEL, 11, 1)
    assert torch.equal(routing.topk_ids.long(), expected)
    assert source.router_logits(x) is None
    assert source.resolved["router"] == "oracle router"


def test_preset_without_its_file_goes_on_at_random(
    own_cache: Path, cpu: DeviceInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locate.importlib.util, "find_spec", lambda _name: None)
    source = load_layer_source(RunSpec(seed=3), cpu)
    assert source.resolved["weights"] == source.resolved["inputs"] == "random, seed 3"
    assert any("No weights of smollm2-135m on this machine" in note for note in source.notes)
    assert source.hidden_states(5000).shape == (5000, 576)
    assert torch.equal(source.hidden_states(5000)[4096:], source.hidden_states(904))
    assert len(source.routings(RoutingKind.MODEL, 5000, 2)[0].topk_ids) == 5000


def test_hidden_states_are_prefixes(moe: LayerSource) -> None:
    assert torch.equal(moe.hidden_states(3), moe.hidden_states(40)[:3])
