"""Greedy text from a network.

Shapes: B sequences, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch

from workbench.errors import InvalidInput
from workbench.models.network.batch import Cache, decode_batch, prefill_batch
from workbench.models.network.network import Network

PAGE_SIZE = 16
CacheMaker = Callable[[Network, int, int, int], Cache]
"""Makes a cache from a network, `batch_size`, `max_len` and `page_size`, as `KVCache.for_network` does."""


@torch.no_grad()
def generate(
    network: Network,
    cache_maker: CacheMaker,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    eos: int | Collection[int] = (),
    page_size: int = PAGE_SIZE,
) -> list[list[int]]:
    """The likeliest next token, again and again, for several prompts at once.

    All prompts are prefilled in one pass, and then decoded together until each has ended.

    Args:
        network: of one rank.
        cache_maker: `KVCache.for_network`.
        prompts: token ids of each, at least one.
        max_new_tokens: tokens that each gets at most.
        eos: tokens that end a sequence; they are kept as its last.
        page_size: tokens of a page of the cache.

    Returns:
        The new tokens of each prompt.

    Raises:
        InvalidInput: a prompt without tokens or with one outside the vocabulary, a number of new tokens below 1, or a
            network that is one rank of several.
    """
    check_whole(network, "generation")
    if max_new_tokens < 1:
        raise InvalidInput(f"max_new_tokens: must be at least 1, not {max_new_tokens}")
    if not prompts:
        return []
    rows = [check_tokens(network, prompt, f"prompts[{index}]") for index, prompt in enumerate(prompts)]
    ends = {eos} if isinstance(eos, int) else set(eos)
    lengths = [len(row) for row in rows]
    cache = cache_maker(network, len(rows), max(lengths) + max_new_tokens, page_size)
    logits_BV = network(prefill_batch(rows, cache), cache)
    made: list[list[int]] = [[] for _ in rows]
    running = set(range(len(rows)))
    for step in range(max_new_tokens):
        next_B = logits_BV.argmax(-1)
        for index, token in enumerate(next_B.tolist()):
            if index in running:
                made[index].append(token)
                if token in ends:
                    running.discard(index)
        if not running or step + 1 == max_new_tokens:
            break
        # Sequences that have ended go along; what they give is not looked at.
        logits_BV = network(decode_batch(next_B, cache, [length + step for length in lengths]), cache)
    return made


def check_whole(network: Network, what: str) -> None:
    """Refuse one rank of several: it has a part of the vocabulary, and sums over ranks are not made."""
    if network.config.tp_size > 1:
        raise InvalidInput(
            f"tp_size: {what} needs a whole network, tp_size 1; this is one rank of {network.config.tp_size}"
        )


def check_tokens(network: Network, token_ids: Sequence[int] | torch.Tensor, name: str) -> torch.Tensor:
    """Token ids as int64 on the network's device. Raises `InvalidInput` where there are none or one is no token."""
    ids = torch.as_tensor(token_ids, dtype=torch.int64).flatten()
    vocabulary = network.config.vocab_size
    if not len(ids):
        raise InvalidInput(f"{name}: must have at least one token")
    if int(ids.min()) < 0 or int(ids.max()) >= vocabulary:
        raise InvalidInput(
            f"{name}: tokens must be from 0 to {vocabulary - 1}, not {int(ids.min())} to {int(ids.max())}"
        )
    return ids.to(network.device)
