"""A step as it is run: against the network called by hand, and its bounds."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "check"))
from step_cases import CPU, LATENT, step_runner

from workbench.errors import InvalidInput
from workbench.models.network.batch import prefill_batch
from workbench.models.network.config import parse_network
from workbench.models.network.moe import MoE
from workbench.modes import RoutingKind
from workbench.parts import StepPoint
from workbench.runtime.kv_cache import KVCache
from workbench.runtime.step import StepRunner, random_prompts, step_routings


@torch.no_grad()
@pytest.mark.parametrize("case", ["dense", "latent"])
def test_decode_gives_what_a_longer_prefill_gives(case: str) -> None:
    runner = step_runner(case, batch_size=2, input_len=9, output_len=4)
    chosen = runner.run()
    assert chosen.shape == (4, 2)
    text = runner.prompts_BS
    for tokens in chosen:
        cache = KVCache.for_network(runner.network, 2, 16, 5)
        assert torch.equal(runner.network(prefill_batch(text, cache), cache).argmax(-1), tokens)
        text = torch.cat((text, tokens[:, None]), dim=1)


def test_prompts_are_seeded_and_of_the_whole_vocabulary() -> None:
    config = parse_network(LATENT, "latent", "a test")
    point = StepPoint(batch_size=50, input_len=40)
    prompts = random_prompts(config, point, 3, CPU)
    assert prompts.shape == (50, 40)
    assert torch.equal(prompts, random_prompts(config, point, 3, CPU))
    assert not torch.equal(prompts, random_prompts(config, point, 4, CPU))
    assert prompts.unique().tolist() == list(range(101))


def test_a_step_longer_than_the_cache_is_refused() -> None:
    runner = step_runner("dense")
    cache = KVCache.for_network(runner.network, 3, 13, 4)
    StepRunner(runner.network, cache, runner.prompts_BS, 3)
    with pytest.raises(InvalidInput, match="room for 13 tokens a sequence; 11 of input and 4 of output need 14"):
        StepRunner(runner.network, cache, runner.prompts_BS, 4)
    small = KVCache.for_network(runner.network, 2, 20, 4)
    with pytest.raises(InvalidInput, match="batch_size: the cache has room for 2 sequences, not 3"):
        StepRunner(runner.network, small, runner.prompts_BS, 4)


def test_routings_are_dealt_to_layers_and_steps() -> None:
    runner = step_runner("latent", routing="balanced", output_len=5)
    assert runner.routings is not None
    runner.prepare(None)
    moes = [layer.mlp for layer in runner.network.layers if isinstance(layer.mlp, MoE)]
    assert len(moes) == 2
    for moe in moes:
        assert moe.forced is not None
        assert moe.forced.topk_ids.shape == (3 * 11, 3)
        assert moe.forced.topk_ids.flatten().bincount(minlength=8).tolist() in [[13, 12] * 4, sorted([13, 12] * 4)] or (
            set(moe.forced.topk_ids.flatten().bincount(minlength=8).tolist()) <= {12, 13}
        )
    assert not torch.equal(moes[0].forced.topk_ids, moes[1].forced.topk_ids)
    seen = []
    for step in range(4):
        runner.prepare(step)
        assert moes[0].forced is not None
        assert moes[0].forced.topk_ids.shape == (3, 3)
        seen.append(moes[0].forced.topk_ids.tolist())
    assert len({str(one) for one in seen}) == 4


def test_no_routing_where_the_model_chooses_or_has_no_experts() -> None:
    config = parse_network(LATENT, "latent", "a test")
    assert step_routings(config, StepPoint(), RoutingKind.MODEL, 1.2, 0, CPU) is None
    runner = step_runner("dense", routing="balanced")
    assert runner.routings is None
    runner.prepare(None)


def test_a_step_of_prefill_alone() -> None:
    runner = step_runner("dense", output_len=1)
    assert runner.decode_steps == 0
    with torch.no_grad():
        assert runner.run().shape == (1, 3)
