"""Perplexity of a text: how well a network foretells it.

Shapes: S rows, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import exp, inf
from typing import Any

import torch

from workbench.errors import InvalidInput
from workbench.models.network.batch import prefill_batch
from workbench.models.network.build import build_network
from workbench.models.network.generate import PAGE_SIZE, CacheMaker, check_tokens, check_whole
from workbench.models.network.network import Network
from workbench.models.network.shapes import NetworkConfig
from workbench.models.network.tensors import TensorSource

WINDOW = 1024
# Rows whose logits are held at a time.
_ROWS = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Perplexity:
    """Of one text.

    Attributes:
        value: `exp` of the mean of `-log p(token)`, natural logarithms.
        tokens: that were foretold.
        windows: passes through the network.
    """

    value: float
    tokens: int
    windows: int


@torch.no_grad()
def perplexity(
    network: Network,
    cache_maker: CacheMaker,
    token_ids: Sequence[int] | torch.Tensor,
    window: int = WINDOW,
    stride: int | None = None,
    *,
    bos: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Perplexity:
    """How well `network` foretells each token from those before it in its window.

    Windows begin every `stride` tokens, and each token counts once, in the first window that has it: with a stride
    below the window every token but the first ones sees at least `window - stride` before it. The first token of the
    text counts only behind `bos`; with windows that do not overlap, so does each window's first.

    Args:
        network: of one rank.
        cache_maker: `KVCache.for_network`.
        token_ids: the text, at least 2 tokens.
        window: tokens that are read at once, `bos` included.
        stride: from one window's start to the next; None for windows that do not overlap.
        bos: a token that every window begins with, as the model was trained; None for none.
        progress: called after each window with how many are done, and of how many.

    Raises:
        InvalidInput: a window below 2, a stride that passes over tokens, too short a text, a token that the
            vocabulary does not have, or a network that is one rank of several.
    """
    check_whole(network, "perplexity")
    room = window - (bos is not None)
    if window < 2:
        raise InvalidInput(f"window: must be at least 2, not {window}")
    step = room if stride is None else stride
    if not 1 <= step <= room:
        raise InvalidInput(f"stride: must be from 1 to {room}, the tokens of the text in a window, not {step}")
    ids = check_tokens(network, token_ids, "token_ids")
    if len(ids) < 2:
        raise InvalidInput(f"token_ids: must be at least 2 tokens, not {len(ids)}")
    first = [] if bos is None else [check_tokens(network, [bos], "bos")]
    planned = list(_windows(len(ids), room, step, 0 if first else 1))
    longest = max(end - start for start, end, _ in planned) + len(first)
    cache = cache_maker(network, 1, longest, PAGE_SIZE)
    total, count = 0.0, 0
    for done, (start, end, fresh) in enumerate(planned, 1):
        text = torch.cat([*first, ids[start:end]])
        told = end - fresh
        x_SD = network.hidden_states(prefill_batch([text], cache), cache)
        total += _surprise(network, x_SD[-told - 1 : -1], text[-told:])
        count += told
        if progress is not None:
            progress(done, len(planned))
    mean = total / count
    return Perplexity(value=exp(mean) if mean < 700 else inf, tokens=count, windows=len(planned))


def perplexities(
    config: NetworkConfig,
    source: TensorSource,
    quants: Iterable[str],
    cache_maker: CacheMaker,
    token_ids: Sequence[int] | torch.Tensor,
    window: int = WINDOW,
    stride: int | None = None,
    *,
    bos: int | None = None,
    **options: Any,
) -> dict[str, Perplexity]:
    """The perplexity of one text in each weight format: what quantisation does to a model.

    Networks are built and dropped one after another. `options` go to `build_network`; the others are those of
    `perplexity`.
    """
    found = {}
    for quant in quants:
        network = build_network(config, source, quant=quant, **options)
        found[quant] = perplexity(network, cache_maker, token_ids, window, stride, bos=bos)
        del network
    return found


def _windows(length: int, room: int, step: int, unseen: int) -> Iterator[tuple[int, int, int]]:
    """Start, end, and the first token that counts.

    5 tokens in windows of 3 without overlap and without a first token: (0, 3, 1), (3, 5, 4). With stride 1:
    (0, 3, 1), (1, 4, 3), (2, 5, 4).
    """
    seen = 0
    for start in range(0, length, step):
        end = min(start + room, length)
        fresh = max(seen, start + unseen)
        if fresh < end:
            yield start, end, fresh
        seen = end
        if end == length:
            return


def _surprise(network: Network, x_SD: torch.Tensor, next_S: torch.Tensor) -> float:
    """Sum of `-log p(next)` over the rows, in float64."""
    total = torch.zeros((), dtype=torch.float64, device=x_SD.device)
    for x_RD, next_R in zip(x_SD.split(_ROWS), next_S.split(_ROWS), strict=True):
        logits_RV = network.logits(x_RD)
        total += torch.nn.functional.cross_entropy(logits_RV, next_R, reduction="none").to(torch.float64).sum()
    return float(total)
