"""Tokenizers beside checkpoints, and real text in their tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from load_cases import loaded, save

from workbench.errors import InvalidInput
from workbench.models.checkpoint import topics_text
from workbench.models.network.perplexity import perplexity
from workbench.models.network.tokens import load_tokenizer, topic_tokens
from workbench.runtime.kv_cache import KVCache


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Llama-like, with a tokenizer that has a token for every printable letter of ASCII, a space and a line's end."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    save("llama", tmp_path)
    letters = [*map(chr, range(33, 127)), "\u0120", "\u010a"]
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
    return tmp_path


def test_text_is_pythons_help_in_the_models_tokens(checkpoint: Path) -> None:
    tokenizer = load_tokenizer(str(checkpoint))
    found = topic_tokens(tokenizer, 40)
    assert found.bos is None
    assert found.ids == tokenizer(topics_text()[:40], add_special_tokens=False)["input_ids"]
    assert len(topic_tokens(tokenizer, 41).ids) == 41
    network = loaded(checkpoint).network
    told = perplexity(network, KVCache.for_network, found.ids, 16, 8)
    assert told.tokens == 39
    assert told.value > 20  # a random model of 101 tokens foretells nothing


def test_what_a_tokenizer_puts_first_is_found() -> None:
    class Stub:
        bos_token_id = 7
        first: int | None = 7

        def __call__(self, text: str, add_special_tokens: bool = True, **_: Any) -> dict[str, list[int]]:
            ids = [ord(letter) % 50 + 10 for letter in text]
            return {"input_ids": [self.first, *ids] if add_special_tokens and self.first is not None else ids}

    stub = Stub()
    found = topic_tokens(stub, 5)
    assert found.bos == 7
    assert found.ids == [ord(letter) % 50 + 10 for letter in topics_text()[:5]]
    stub.first = 9  # something else than its start
    assert topic_tokens(stub, 5).bos is None
    stub.first = None
    assert topic_tokens(stub, 5).bos is None


def test_models_without_files_have_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="model: llama-3-8b has no files on this machine, and so no tokenizer"):
        load_tokenizer("llama-3-8b")
    save("llama", tmp_path)
    with pytest.raises(InvalidInput, match=rf"model: {tmp_path} has no tokenizer that transformers can read"):
        load_tokenizer(str(tmp_path))
