"""A whole step as it is run: one prefill, and the decode steps after it.

Shapes: B sequences, S tokens of a prompt, V tokens of one rank's vocabulary, K experts a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from moe_kernels import Routing

from workbench.errors import InvalidInput
from workbench.models.network.batch import Batch, decode_batch, prefill_batch
from workbench.models.network.moe import MoE
from workbench.models.network.network import Network
from workbench.models.network.shapes import NetworkConfig
from workbench.models.routing import synthetic_ids, synthetic_weights
from workbench.models.seeding import generator
from workbench.modes import RoutingKind
from workbench.parts import StepPoint
from workbench.runtime.kv_cache import KVCache

MAX_ROUTINGS = 32


class Routings(NamedTuple):
    """Routings that take the gates' place: layer l takes number l of its phase's, step s begins s further on.

    Attributes:
        prefill: each of B * S rows.
        decode: each of B rows.
    """

    prefill: Sequence[Routing]
    decode: Sequence[Routing]


class StepRunner:
    """Runs a network's prefill and its decode steps, greedily.

    Attributes:
        network: of one rank.
        cache: with room for the batch.
        prompts_BS: int64 token ids.
        output_len: tokens that each sequence gets; the prefill gives the first.
        routings: in place of the gates'; None for the model's own.
    """

    def __init__(
        self,
        network: Network,
        cache: KVCache,
        prompts_BS: torch.Tensor,
        output_len: int,
        routings: Routings | None = None,
    ) -> None:
        """Raises `InvalidInput` where the cache has no room for all of it."""
        batch_size, input_len = prompts_BS.shape
        if batch_size > cache.batch_size:
            raise InvalidInput(f"batch_size: the cache has room for {cache.batch_size} sequences, not {batch_size}")
        if input_len + output_len - 1 > cache.max_len:
            raise InvalidInput(
                f"output_len: the cache has room for {cache.max_len} tokens a sequence; {input_len} of input and "
                f"{output_len} of output need {input_len + output_len - 1}"
            )
        self.network, self.cache = network, cache
        self.prompts_BS, self.output_len = prompts_BS, output_len
        self.routings = routings

    @property
    def batch_size(self) -> int:
        """B."""
        return int(self.prompts_BS.shape[0])

    @property
    def input_len(self) -> int:
        """S."""
        return int(self.prompts_BS.shape[1])

    @property
    def decode_steps(self) -> int:
        """Steps after the prefill."""
        return self.output_len - 1

    def prepare(self, step: int | None) -> None:
        """Hand the layers their routings for the prefill (None) or decode step `step`, from 0; not part of a step."""
        given = self.routings
        for index, layer in enumerate(self.network.layers):
            if isinstance(layer.mlp, MoE):
                layer.mlp.forced = given and self.routing(step, index)

    def routing(self, step: int | None, layer: int) -> Routing | None:
        """The routing that `layer` is given; None for the model's own."""
        if self.routings is None:
            return None
        phase = self.routings.prefill if step is None else self.routings.decode
        return phase[(layer + (step or 0)) % len(phase)]

    def prefill_batch(self) -> Batch:
        """All prompts at once."""
        return prefill_batch(self.prompts_BS, self.cache)

    def decode_batch(self, step: int, token_ids_B: torch.Tensor) -> Batch:
        """One token of each sequence, in decode step `step`, from 0."""
        return decode_batch(token_ids_B, self.cache, self.input_len + step)

    def prefill(self) -> torch.Tensor:
        """Read the prompts: float32 logits `[B, V]`."""
        logits_BV: torch.Tensor = self.network(self.prefill_batch(), self.cache)
        return logits_BV

    def decode(self, step: int, token_ids_B: torch.Tensor) -> torch.Tensor:
        """Decode step `step`, from 0: float32 logits `[B, V]`."""
        logits_BV: torch.Tensor = self.network(self.decode_batch(step, token_ids_B), self.cache)
        return logits_BV

    def decode_tokens(self, step: int, token_ids_B: torch.Tensor) -> torch.Tensor:
        """The likeliest tokens after decode step `step`, int64 `[B]`; read them before the next step."""
        return next_tokens(self.decode(step, token_ids_B))

    def run(self, check: Callable[[], None] = lambda: None) -> torch.Tensor:
        """Everything once: the tokens chosen, int64 `[output_len, B]`."""
        self.prepare(None)
        chosen = [next_tokens(self.prefill())]
        for step in range(self.decode_steps):
            check()
            self.prepare(step)
            chosen.append(self.decode_tokens(step, chosen[-1]).clone())
        return torch.stack(chosen)


def next_tokens(logits_BV: torch.Tensor) -> torch.Tensor:
    """The likeliest token of each sequence, int64 `[B]`."""
    return logits_BV.argmax(-1)


def random_prompts(config: NetworkConfig, point: StepPoint, seed: int, device: torch.device) -> torch.Tensor:
    """Seeded prompts, int64 `[B, S]`, every token of the whole vocabulary equally likely."""
    shape = (point.batch_size, point.input_len)
    return torch.randint(config.vocab_size, shape, generator=generator(seed, "prompts")).to(device)


def step_routings(
    config: NetworkConfig, point: StepPoint, kind: RoutingKind, zipf_exponent: float, seed: int, device: torch.device
) -> Routings | None:
    """Seeded routings of the kind; None for `model`, and where the network has no experts."""
    moe = config.moe
    if kind is RoutingKind.MODEL or moe is None:
        return None
    phases = []
    for rows, steps in ((point.batch_size * point.input_len, 1), (point.batch_size, max(1, point.output_len - 1))):
        count = min(MAX_ROUTINGS, config.num_layers + steps - 1)
        ids = synthetic_ids(kind, rows, moe.num_experts, moe.top_k, count, zipf_exponent, seed)
        weights = [synthetic_weights(rows, moe.top_k, index, seed) for index in range(count)]
        phases.append([Routing(w.to(device), i.to(device)) for w, i in zip(weights, ids, strict=True)])
    return Routings(*phases)
