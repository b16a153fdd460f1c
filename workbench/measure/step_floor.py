"""The least that a pass of a whole network must do, part by part: bytes to and from memory, and operations.

Shapes: S rows, B sequences, E experts, K experts a token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import nn

from workbench.measure.floor import SampleWork
from workbench.models.network.batch import DECODE
from workbench.models.network.layer import DecoderLayer
from workbench.models.network.linear import Linear
from workbench.models.network.mla import LatentAttention
from workbench.models.network.moe import MoE
from workbench.models.network.network import Network

Place = tuple[int | None, str]
"""A layer (None outside of them) and a part of the network."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """One pass over a network, in numbers.

    Attributes:
        kind: `prefill` or `decode`.
        rows: S, tokens that are computed.
        sequences: B, rows whose logits are.
        keys: keys that each sequence has after it.
        experts: of each MoE layer, how many distinct experts are touched; all of them where a layer is not named.
        slots: of each MoE layer, how many experts are chosen by all rows together; `rows * K` where not named.
    """

    kind: str
    rows: int
    sequences: int
    keys: int
    experts: Mapping[int, float]
    slots: Mapping[int, float]


def pass_work(network: Network, one: Pass) -> dict[Place, SampleWork]:
    """What each part must do at least.

    Bytes: weights with their scales once (of experts, those touched), looked-up rows of the embedding, keys and values
    read and written. What passes from part to part is not counted: a kernel that keeps it on the chip need not move
    it. Operations: two a weight a row; attention's two products over what a query may see.
    """
    found: dict[Place, SampleWork] = {}
    size = network.embed.weight.element_size()
    width = network.config.hidden_size
    add(found, (None, "embed"), one.rows * width * size, 0)
    add(found, (None, "norm"), network.norm.weight.nbytes, 0)
    head = network.lm_head.weight
    add(found, (None, "lm_head"), head.nbytes + 4 * one.sequences * head.shape[0], 2 * one.sequences * head.numel())
    for index, layer in enumerate(network.layers):
        assert isinstance(layer, DecoderLayer)
        for module in _parts(layer, one.kind):
            part = str(getattr(module, "part", "other"))
            if isinstance(module, MoE):
                _add_experts(found, index, module, one)
            elif isinstance(module, Linear):
                add(found, (index, part), _bytes(module.tensors()), 2 * one.rows * module.weights.N * module.weights.K)
            elif hasattr(module, "tensors"):
                tensors: list[torch.Tensor] = module.tensors()  # type: ignore[operator]
                operations = 2 * one.rows * sum(t.numel() for t in tensors if t.dim() > 1)
                add(found, (index, part), _bytes(tensors), operations)
        _add_attention(found, index, network, one)
    return found


def total_work(parts: Mapping[Place, SampleWork]) -> SampleWork:
    """All parts together; `experts` is the mean over the layers that have some."""
    counts = [work.experts for work in parts.values() if work.experts]
    mean = round(sum(counts) / len(counts)) if counts else 0
    return SampleWork(sum(w.bytes for w in parts.values()), sum(w.operations for w in parts.values()), mean)


def add(found: dict[Place, SampleWork], place: Place, nbytes: float, operations: float, experts: int = 0) -> None:
    """Count something more at `place`."""
    old = found.get(place, SampleWork(0, 0, 0))
    found[place] = SampleWork(old.bytes + round(nbytes), old.operations + round(operations), old.experts + experts)


def _parts(layer: DecoderLayer, kind: str) -> Iterable[nn.Module]:
    """The modules whose weights a pass of this kind reads."""
    unread: set[int] = set()
    attention = layer.attention
    if isinstance(attention, LatentAttention):
        form = attention.decode if kind == DECODE else attention.prefill
        if form == "absorbed" and attention.decode == "absorbed":
            unread.add(id(attention.kv_up))  # read head by head instead
        elif form == "expanded":
            unread.add(id(attention))
    return (module for module in layer.modules() if id(module) not in unread)


def _add_experts(found: dict[Place, SampleWork], index: int, moe: MoE, one: Pass) -> None:
    experts = moe.experts
    count = experts.num_experts
    each = _bytes(experts.tensors().values()) / count
    touched = one.experts.get(index, float(experts.num_routed)) + experts.num_shared
    slots = one.slots.get(index, one.rows * moe.gate.shape.top_k) + one.rows * experts.num_shared
    operations = 2 * slots * 3 * experts.hidden_size * experts.intermediate_size
    add(found, (index, "moe"), touched * each, operations, round(touched))
    if moe.shared_gate is not None:
        add(found, (index, "moe"), moe.shared_gate.nbytes, 2 * one.rows * moe.shared_gate.numel())


def _add_attention(found: dict[Place, SampleWork], index: int, network: Network, one: Pass) -> None:
    config, size = network.config, network.embed.weight.element_size()
    seen = one.keys if config.sliding_window is None else min(one.keys, config.sliding_window)
    a_token = config.kv_bytes_per_token(size, network.mla_decode) / config.num_layers
    read = one.sequences * seen if one.kind == DECODE else 0
    mla = config.mla
    form = network.mla_decode if one.kind == DECODE else network.mla_prefill
    if mla is not None and form == "absorbed":
        sizes = mla.latent_dim + mla.kv_lora_rank
    else:
        sizes = config.head_dim + config.value_dim
    # A prompt's queries see half of its keys on average.
    pairs = one.sequences * seen if one.kind == DECODE else one.rows * (seen + 1) / 2
    add(found, (index, "attention"), (read + one.rows) * a_token, 2 * config.rank_heads * sizes * pairs)


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(prod(tensor.shape) * tensor.element_size() for tensor in tensors)
