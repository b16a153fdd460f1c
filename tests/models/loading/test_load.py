"""From a spec to a network: random weights, dense MLPs cut into experts, what is said of them, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from load_cases import CPU_DEVICE, PROMPTS, difference, greedy, loaded, rows_of, save, spec_of
from network_cases import CASES, CPU, config_of, random_tensors

from workbench.errors import InvalidInput
from workbench.models.network import memory
from workbench.models.network.build import build_network
from workbench.models.network.choose import choose_network
from workbench.models.network.config import cut_network
from workbench.models.network.generate import generate
from workbench.models.network.load import load_network
from workbench.models.network.names import expert_names, rank_tensors
from workbench.models.network.network import Network
from workbench.models.network.tensors import RandomTensors
from workbench.runtime.kv_cache import KVCache


@pytest.fixture
def numbers(tmp_path: Path) -> Any:
    """A function that writes a case's config.json alone."""

    def write(case: str, **changes: Any) -> Path:
        path = tmp_path / case / "config.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({**CASES[case], **changes}), encoding="utf-8")
        return path

    return write


def test_a_config_alone_gets_seeded_random_weights(numbers: Any) -> None:
    path = numbers("deepseek_v3")
    network, resolved, notes = loaded(path, seed=5)
    assert resolved == {"weights": "random, seed 5", "router": "random gate, seed 5"}
    assert "Weights are random, seed 5." in notes
    again, other = loaded(path, seed=5).network, loaded(path, seed=6).network
    assert torch.equal(rows_of(network, PROMPTS[0]), rows_of(again, PROMPTS[0]))
    assert not torch.equal(rows_of(network, PROMPTS[0]), rows_of(other, PROMPTS[0]))


def test_modes_of_the_spec_reach_the_network(numbers: Any) -> None:
    options = {"quant": "int4", "group_size": 32, "zero_points": True, "moe_backend": "triton", "split_k": 2}
    ways = {
        "reduction": "atomic",
        "attention_backend": "reference",
        "mla_prefill": "absorbed",
        "mla_decode": "expanded",
    }
    network = loaded(numbers("deepseek_v3"), **options, **ways).network
    moe, attention = network.layers[1].mlp, network.layers[1].attention
    assert (network.quant, network.dtype, network.mla_prefill, network.mla_decode) == (
        "int4", torch.bfloat16, "absorbed", "expanded",
    )  # fmt: skip
    assert (moe.experts.group_size, moe.backend, moe.split_k, moe.reduction) == (32, "triton", 2, "atomic")
    assert moe.experts.w1_zero is not None
    assert (attention.prefill, attention.decode, attention.impl) == ("absorbed", "expanded", "reference")


def test_layers_and_ranks_are_noted(numbers: Any) -> None:
    network, _, notes = loaded(numbers("deepseek_v3", vocab_size=102, moe_intermediate_size=18, intermediate_size=44),
                               num_layers=1, tp_size=2)  # fmt: skip
    assert [layer.part for layer in network.layers] == ["layer"] * 2  # one dense, one sparse
    assert network.config.tp_size == 2
    assert "The first 2 of 3 layers are run." in notes
    assert any(note.startswith("One rank of 2") for note in notes)


@pytest.mark.parametrize("case", ["llama", "llama-linear"])
def test_a_dense_model_cut_into_experts_makes_the_same_text(case: str, tmp_path: Path) -> None:
    """Channels of 77 in 7 experts of 11, of 19 in 19 of 1: all are chosen, so that nothing but the order of sums
    changes."""
    model = save(case, tmp_path, shard="30KB")
    experts = {"llama": 7, "llama-linear": 19}[case]
    network, resolved, notes = loaded(tmp_path, experts=experts)
    assert resolved["router"] == "all experts, weight 1"
    assert f"Every MLP is cut into {experts} experts, all of which are chosen with weight 1." in notes
    moe = network.layers[1].mlp
    assert moe.experts.num_experts == experts
    moe.keep_routing = True
    made = generate(network, KVCache.for_network, PROMPTS, 6, page_size=4)
    assert made == [greedy(model, prompt, 6) for prompt in PROMPTS]
    assert difference(network, model) < 2e-5
    assert torch.equal(moe.last_routing.topk_weights, torch.ones(len(PROMPTS[2]), experts))
    assert {tuple(sorted(row)) for row in moe.last_routing.topk_ids.tolist()} == {tuple(range(experts))}


def test_a_random_dense_model_can_be_cut_too(numbers: Any) -> None:
    path = numbers("llama")
    whole, cut = loaded(path), loaded(path, experts=11, top_k=11)
    assert cut.resolved == {"weights": "random, seed 0", "router": "all experts, weight 1"}
    torch.testing.assert_close(rows_of(cut.network, PROMPTS[0]), rows_of(whole.network, PROMPTS[0]))


@pytest.mark.parametrize(
    ("case", "values", "pattern"),
    [
        ("llama", {"experts": 8}, "experts: must divide the 77 channels of the MLP of llama, not 8; .* 7 or 11$"),
        ("llama", {"experts": 7, "top_k": 2}, "top_k: .*has no router that could choose 2 of 7 experts; only 7 is all"),
        ("llama", {"top_k": 2}, "top_k: llama has no experts; it must be left out, or experts given too"),
        ("mixtral", {"experts": 4}, "experts: mixtral has 5, not 4; only a dense MLP can be cut into others"),
        ("mixtral", {"top_k": 1}, "top_k: a step of mixtral takes the model's own, 2, not 1"),
        ("mixtral", {"num_layers": 3}, "num_layers: must be from 1 to 2, the layers of mixtral, not 3"),
        ("mixtral", {"tp_size": 3}, r"tp_size: must divide 101 \(vocabulary\)"),
        ("llama", {"quant": "fp8_tensor", "activation_scale": "static"}, "activation_scale: static needs a run for"),
    ],
)
def test_what_a_step_cannot_be_is_refused(numbers: Any, case: str, values: dict[str, Any], pattern: str) -> None:
    with pytest.raises(InvalidInput, match=pattern):
        load_network(spec_of(numbers(case), **values), CPU_DEVICE)


def test_a_models_own_experts_may_be_said(numbers: Any) -> None:
    chosen = choose_network(spec_of(numbers("mixtral"), experts=5, top_k=2))
    assert chosen.config is chosen.dense


def test_an_unknown_model_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"model: must be .*deepseek-v2-lite.*, not 'no-such-model'"):
        load_network(spec_of("no-such-model"), CPU_DEVICE)


@pytest.fixture(params=[1, 2, 5, 1000])
def at_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Random experts that are made at once: an odd number in the last stack, one each, or all."""
    config = config_of("deepseek_v3")
    one = 3 * 64 * 19
    monkeypatch.setattr(memory, "_STACK", request.param * one + one // 2)
    assert memory.stacked_experts(config) == min(12, request.param)
    return int(request.param)


def test_stacks_hold_what_is_asked_for_by_name(at_once: int) -> None:
    config = config_of("deepseek_v3")
    source = random_tensors(config)
    stacks = list(source.expert_stacks(1))
    assert [len(w1) for w1, _ in stacks] == [min(at_once, 12 - first) for first in range(0, 12, at_once)]
    w1, w2 = (torch.cat(parts) for parts in zip(*stacks, strict=True))
    for expert in range(12):
        gate, up, down = expert_names(config, 1, expert)
        assert torch.equal(w1[expert], torch.cat((source.get(gate), source.get(up))))
        assert torch.equal(w2[expert], source.get(down))
    assert len({float(x) for x in w1[:, 0, 0]}) == 12  # no two experts alike
    assert not torch.equal(next(iter(source.expert_stacks(2)))[0], stacks[0][0])
    assert float(w1.std()) == pytest.approx(64**-0.5, rel=0.03)
    assert float(w2.std()) == pytest.approx(19**-0.5, rel=0.03)


class _OneByOne(RandomTensors):
    """The same tensors, of which no stacks are given."""

    def expert_stacks(self, layer: int) -> None:  # type: ignore[override]
        return None


@pytest.mark.parametrize("quant", ["fp32", "fp8_block", "int4"])
def test_a_network_from_stacks_is_that_from_single_tensors(at_once: int, quant: str) -> None:
    config = cut_network(config_of("deepseek_v3", vocab_size=102, moe_intermediate_size=20, intermediate_size=44),
                         tp_size=2)  # fmt: skip

    def made(source: RandomTensors) -> Network:
        return build_network(config, source, quant=quant, group_size=32)

    stacked, single = made(RandomTensors(config, CPU, 3)), made(_OneByOne(config, CPU, 3))
    for layer in (1, 2):
        mine, other = stacked.layers[layer].mlp.experts.tensors(), single.layers[layer].mlp.experts.tensors()
        assert mine.keys() == other.keys()
        for name, tensor in mine.items():
            assert torch.equal(tensor.view(torch.uint8), other[name].view(torch.uint8)), name
    shapes = rank_tensors(config)
    assert shapes[expert_names(config, 1, 0)[2]] == (64, 10)
