"""The gates of DeepSeek's families: what they choose, against transformers' own, and where the bias comes from."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_kernels import ExpertWeights, Routing, fused_experts
from safetensors.torch import save_file

from workbench.devices import DeviceInfo
from workbench.errors import InvalidInput
from workbench.models.layer import RandomLayer, load_layer_source
from workbench.models.locate import find_files
from workbench.models.routing import gated
from workbench.models.shapes import model_shape
from workbench.modes import RoutingKind
from workbench.spec import RunSpec

V3 = {
    "model_type": "deepseek_v3",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "first_k_dense_replace": 1,
    "n_routed_experts": 48,
    "moe_intermediate_size": 40,
    "num_experts_per_tok": 5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "n_group": 8,
    "topk_group": 3,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
V2 = {
    **V3,
    "model_type": "deepseek_v2",
    "scoring_func": "softmax",
    "topk_method": "group_limited_greedy",
    "norm_topk_prob": False,
    "routed_scaling_factor": 16.0,
}
LITE = {**V2, "topk_method": "greedy", "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0}
KEY = "model.layers.{}.mlp.gate.e_score_correction_bias"


def layer(path: Path | str, cpu: DeviceInfo, **values: Any) -> RandomLayer:
    source = load_layer_source(RunSpec(model=str(path)).replace(**values), cpu)
    assert isinstance(source, RandomLayer)
    return source


def by_definition(source: RandomLayer, num_tokens: int) -> Routing:
    """DeepSeek-V3's gate in plain Python, double precision."""
    logits = source.router_logits(source.hidden_states(num_tokens))
    bias = source.correction_bias()
    assert logits is not None
    assert bias is not None
    shape, gate = source.shape, source.shape.gate
    size = shape.num_experts // gate.num_groups
    ids, weights = [], []
    for row in logits.tolist():
        score = [1 / (1 + math.exp(-v)) for v in row]
        choice = [s + b for s, b in zip(score, bias.tolist(), strict=True)]
        sums = [sum(sorted(choice[g * size : (g + 1) * size])[-2:]) for g in range(gate.num_groups)]
        kept = sorted(range(gate.num_groups), key=lambda g: -sums[g])[: gate.topk_group]
        inside = [e for g in kept for e in range(g * size, (g + 1) * size)]
        best = sorted(inside, key=lambda e: -choice[e])[: shape.top_k]
        total = sum(score[e] for e in best)
        ids.append(best)
        weights.append([2.5 * score[e] / total for e in best])
    return Routing(torch.tensor(weights), torch.tensor(ids, dtype=torch.int32))


def test_deepseek_v3_runs_its_own_gate(cpu: DeviceInfo) -> None:
    source = layer("deepseek-v3", cpu, seed=4)
    (routing,) = source.routings(RoutingKind.MODEL, 11, 1)
    want = by_definition(source, 11)
    assert torch.equal(routing.topk_ids, want.topk_ids)
    torch.testing.assert_close(routing.topk_weights, want.topk_weights)
    torch.testing.assert_close(routing.topk_weights.sum(dim=-1), torch.full((11,), 2.5))
    assert all(len({e // 32 for e in row}) <= 4 for row in routing.topk_ids.tolist())
    assert source.resolved["router"] == "random gate and correction bias, seed 4"


def test_a_layer_of_v3s_kind_is_computed(write_config: Any, cpu: DeviceInfo) -> None:
    source = layer(write_config("v3", **V3), cpu)
    x = source.hidden_states(7)
    (routing,) = source.routings(RoutingKind.MODEL, 7, 1)
    assert torch.equal(routing.topk_ids, by_definition(source, 7).topk_ids)
    experts = [source.expert(index) for index in range(48)]
    weights = ExpertWeights.from_dense(*(torch.stack(parts) for parts in zip(*experts, strict=True)), "fp32")
    out = fused_experts(x, weights, routing, impl="reference")
    want = torch.zeros_like(x, dtype=torch.float64)
    for token in range(7):
        for weight, expert in zip(routing.topk_weights[token], routing.topk_ids[token], strict=True):
            w1, w2 = (w.double() for w in experts[int(expert)])
            gate, up = (w1 @ x[token].double()).chunk(2)
            want[token] += weight * (w2 @ (torch.nn.functional.silu(gate) * up))
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-6)


def test_the_seeded_bias_changes_choices_and_no_score(write_config: Any, cpu: DeviceInfo) -> None:
    path = write_config("v3", **V3)
    source, again, other = layer(path, cpu), layer(path, cpu), layer(path, cpu, seed=1)
    bias = source.correction_bias()
    assert bias is not None
    assert (bias.dtype, bias.shape) == (torch.float32, (48,))
    same, different = again.correction_bias(), other.correction_bias()
    assert same is not None
    assert torch.equal(bias, same)
    assert different is not None
    assert not torch.equal(bias, different)
    logits = source.router_logits(source.hidden_states(200))
    assert logits is not None
    with_bias, without = source.route(logits), gated(source.shape, logits, torch.zeros(48))
    moved = (with_bias.topk_ids.sort(dim=-1).values != without.topk_ids.sort(dim=-1).values).any(dim=-1)
    assert 0.2 < float(moved.float().mean()) <= 1.0
    scores = logits.sigmoid().gather(1, with_bias.topk_ids.long())
    torch.testing.assert_close(with_bias.topk_weights, 2.5 * scores / scores.sum(dim=-1, keepdim=True))


@pytest.mark.parametrize("name", ["v3", "v2", "lite", "glm4"])
def test_chooses_as_transformers_does(name: str, write_config: Any, cpu: DeviceInfo) -> None:
    values = {"v3": V3, "v2": V2, "lite": LITE, "glm4": {**V3, "model_type": "glm4_moe", "n_group": 1, "topk_group": 1}}
    source = layer(write_config(name, **values[name]), cpu, seed=2)
    x = source.hidden_states(64)
    logits = source.router_logits(x)
    assert logits is not None
    router = transformers_router(values[name])
    router.weight.data.copy_(torch.eye(48))  # so that its inputs are the logits
    bias = source.correction_bias()
    assert (bias is None) == (name in ("v2", "lite"))
    if bias is not None:
        router.e_score_correction_bias.copy_(bias)
    with torch.no_grad():
        _, weights, ids = router(logits)
    order = ids.sort(dim=-1)
    (routing,) = source.routings(RoutingKind.MODEL, 64, 1)
    mine = routing.topk_ids.long().sort(dim=-1)
    assert torch.equal(mine.values, order.values)
    torch.testing.assert_close(
        routing.topk_weights.gather(1, mine.indices), weights.gather(1, order.indices), rtol=1e-5, atol=1e-7
    )


def transformers_router(values: dict[str, Any]) -> Any:
    """The family's own router over inputs as wide as there are experts."""
    from transformers import DeepseekV2Config, DeepseekV3Config, Glm4MoeConfig
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
    from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter

    classes = {
        "deepseek_v2": (DeepseekV2Config, DeepseekV2TopkRouter),
        "deepseek_v3": (DeepseekV3Config, DeepseekV3TopkRouter),
        "glm4_moe": (Glm4MoeConfig, Glm4MoeTopkRouter),
    }
    config_class, router_class = classes[values["model_type"]]
    config = config_class(**{**values, "hidden_size": values["n_routed_experts"], "num_attention_heads": 4})
    return router_class(config)


def test_deepseek_v2_lite_is_a_plain_softmax(cpu: DeviceInfo) -> None:
    source = layer("deepseek-v2-lite", cpu)
    logits = source.router_logits(source.hidden_states(5))
    assert logits is not None
    (routing,) = source.routings(RoutingKind.MODEL, 5, 1)
    weights, ids = logits.softmax(dim=-1).topk(6)
    assert torch.equal(routing.topk_ids.long(), ids)
    torch.testing.assert_close(routing.topk_weights, weights)
    assert source.correction_bias() is None


def test_groups_that_top_k_does_not_fit_are_refused(write_config: Any, cpu: DeviceInfo) -> None:
    source = layer(write_config("v3", **V3), cpu, top_k=19)  # three groups hold 18
    assert source.router_logits(source.hidden_states(2)) is None
    with pytest.raises(InvalidInput, match=r"routing: the gate of v3 chooses among the 18 experts of 3 groups"):
        source.routings(RoutingKind.MODEL, 2, 1)
    assert len(source.routings(RoutingKind.BALANCED, 2, 3)) == 3


def test_a_bias_goes_with_a_gate_that_has_one(write_config: Any) -> None:
    for values, bias, words in ((V3, None, "has a correction bias"), (V2, torch.zeros(48), "has no correction bias")):
        shape = model_shape(RunSpec(model=str(write_config("m", **values))))
        with pytest.raises(ValueError, match=words):
            gated(shape, torch.zeros(1, 48), bias)


def test_a_trained_bias_is_read_from_beside_the_config(write_config: Any, cpu: DeviceInfo) -> None:
    path = write_config("v3", **V3)
    biases = {index: torch.randn(48, generator=torch.Generator().manual_seed(index)) for index in (1, 2, 3, 10)}
    other = {"model.layers.2.mlp.gate.weight": torch.zeros(48, 64)}
    save_file({KEY.format(1): biases[1], KEY.format(10): biases[10]}, path.parent / "model-1.safetensors")
    save_file(
        {KEY.format(2): biases[2], KEY.format(3): biases[3].bfloat16(), **other}, path.parent / "model-2.safetensors"
    )
    source = layer(path, cpu)
    bias = source.correction_bias()
    assert bias is not None
    assert bias.dtype == torch.float32
    assert torch.equal(bias, biases[3].bfloat16().float())  # the third of layers 1, 2, 3, 10
    assert "The gate's correction bias is the checkpoint's, of layer 3." in source.notes
    assert source.resolved["router"] == "random gate, seed 0; correction bias of layer 3"
    assert source.resolved["weights"] == "random, seed 0"
    (routing,) = source.routings(RoutingKind.MODEL, 9, 1)
    assert torch.equal(routing.topk_ids, by_definition(source, 9).topk_ids)


def test_weights_without_a_bias_leave_it_seeded(write_config: Any, cpu: DeviceInfo) -> None:
    path = write_config("v3", **V3)
    save_file({"model.layers.2.mlp.gate.weight": torch.zeros(48, 64)}, path.parent / "model.safetensors")
    assert layer(path, cpu).resolved["router"] == "random gate and correction bias, seed 0"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (torch.zeros(47), r"e_score_correction_bias in .* must be 48 finite numbers, one per expert; it is \[47\]"),
        (torch.full((48,), float("nan")), "must be 48 finite numbers"),
        (None, r"model\.safetensors cannot be read as a safetensors file"),
    ],
    ids=["short", "nan", "damaged"],
)
def test_a_bias_that_cannot_be_used_is_refused(
    values: torch.Tensor | None, words: str, write_config: Any, cpu: DeviceInfo
) -> None:
    path = write_config("v3", **V3)
    file = path.parent / "model.safetensors"
    if values is None:
        file.write_bytes(b"nothing")
    else:
        save_file({KEY.format(1): values}, file)
    with pytest.raises(InvalidInput, match=f"^model: .*{words}"):
        layer(path, cpu)


def test_only_gates_with_a_bias_look_for_one(write_config: Any) -> None:
    path = write_config("v2", **V2)
    (path.parent / "model.safetensors").write_bytes(b"nothing")
    assert find_files(str(path)).gate_weights == ()
