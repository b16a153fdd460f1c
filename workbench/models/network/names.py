"""Names and shapes of a checkpoint's tensors as the Hugging Face hub stores them, and a rank's part. No torch here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from workbench.models.network.shapes import MLAConfig, NetworkConfig

EMBED, NORM, LM_HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor.

    Attributes:
        shape: of the whole model's.
        dim: along which ranks share it; None where each has all of it.
        units: equal parts along `dim` that stay whole (heads); where there are fewer than ranks, ranks share one.
            0 where any division will do.
    """

    shape: tuple[int, ...]
    dim: int | None = None
    units: int = 0

    def part(self, tp_size: int, rank: int) -> tuple[int, int, int] | None:
        """`(dim, start, length)` of a rank's part; None where it is the whole.

        Three heads of 4 rows on 1 rank: rows 0..11. Two heads of 4 rows on 4 ranks: rank 3 has head 1, rows 4..7.
        """
        if self.dim is None or tp_size == 1:
            return None
        size = self.shape[self.dim]
        if 0 < self.units < tp_size:
            length = size // self.units
            return self.dim, rank * self.units // tp_size * length, length
        length = size // tp_size
        return self.dim, rank * length, length

    def rank_shape(self, tp_size: int) -> tuple[int, ...]:
        """Shape of a rank's part."""
        part = self.part(tp_size, 0)
        if part is None:
            return self.shape
        dim, _, length = part
        return (*self.shape[:dim], length, *self.shape[dim + 1 :])


def expected_tensors(config: NetworkConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the whole model that the layers kept need."""
    return {name: entry.shape for name, entry in entries(config)}


def rank_tensors(config: NetworkConfig) -> dict[str, tuple[int, ...]]:
    """The same with the shapes of one rank's parts."""
    return {name: entry.rank_shape(config.tp_size) for name, entry in entries(config)}


def layer_of(name: str) -> int | None:
    """The layer that a tensor belongs to; None for those of no layer."""
    match = _LAYER.match(name)
    return int(match[1]) if match else None


def layer_prefix(layer: int) -> str:
    """What the names of a layer's tensors begin with."""
    return f"model.layers.{layer}."


def moe_prefix(config: NetworkConfig, layer: int) -> str:
    """What the names of a sparse layer's gate and experts begin with."""
    return layer_prefix(layer) + ("block_sparse_moe." if config.architecture == "mixtral" else "mlp.")


def expert_names(config: NetworkConfig, layer: int, expert: int) -> tuple[str, str, str]:
    """Gate, up and down of one routed expert."""
    parts = ("w1", "w3", "w2") if config.architecture == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    gate, up, down = (f"{moe_prefix(config, layer)}experts.{expert}.{part}.weight" for part in parts)
    return gate, up, down


def shared_prefix(config: NetworkConfig, layer: int) -> str:
    """What the names of the shared experts' matrices begin with."""
    return moe_prefix(config, layer) + ("shared_expert." if config.architecture == "qwen2_moe" else "shared_experts.")


def entries(config: NetworkConfig) -> Iterator[tuple[str, Entry]]:
    """Every tensor that the network needs, in the order of layers."""
    yield EMBED, Entry((config.vocab_size, config.hidden_size), 0)
    for layer in range(config.num_layers):
        yield from layer_entries(config, layer)
    yield NORM, Entry((config.hidden_size,))
    if not config.tie_embeddings:
        yield LM_HEAD, Entry((config.vocab_size, config.hidden_size), 0)


def layer_entries(config: NetworkConfig, layer: int) -> Iterator[tuple[str, Entry]]:
    """Every tensor of one layer."""
    prefix, hidden = layer_prefix(layer), config.hidden_size
    yield f"{prefix}input_layernorm.weight", Entry((hidden,))
    attention = _plain_attention(config) if config.mla is None else _latent_attention(config, config.mla)
    for name, entry in attention:
        yield f"{prefix}self_attn.{name}", entry
    yield f"{prefix}post_attention_layernorm.weight", Entry((hidden,))
    if not config.is_moe_layer(layer):
        yield from _mlp(f"{prefix}mlp.", hidden, config.intermediate_size)
        return
    moe = config.moe
    assert moe is not None
    own = moe_prefix(config, layer)
    yield f"{own}gate.weight", Entry((moe.num_experts, hidden))
    if moe.gate.correction_bias:
        yield f"{own}gate.e_score_correction_bias", Entry((moe.num_experts,))
    for expert in range(moe.num_experts):
        gate, up, down = expert_names(config, layer, expert)
        yield gate, Entry((moe.intermediate_size, hidden), 0)
        yield up, Entry((moe.intermediate_size, hidden), 0)
        yield down, Entry((hidden, moe.intermediate_size), 1)
    if moe.shared_intermediate_size:
        yield from _mlp(shared_prefix(config, layer), hidden, moe.shared_intermediate_size)
        if moe.shared_gate:
            yield f"{own}shared_expert_gate.weight", Entry((1, hidden))


def _mlp(prefix: str, hidden: int, channels: int) -> Iterator[tuple[str, Entry]]:
    yield f"{prefix}gate_proj.weight", Entry((channels, hidden), 0)
    yield f"{prefix}up_proj.weight", Entry((channels, hidden), 0)
    yield f"{prefix}down_proj.weight", Entry((hidden, channels), 1)


def _plain_attention(config: NetworkConfig) -> Iterator[tuple[str, Entry]]:
    hidden, dim = config.hidden_size, config.head_dim
    for part, heads in (("q", config.num_heads), ("k", config.num_kv_heads), ("v", config.num_kv_heads)):
        yield f"{part}_proj.weight", Entry((heads * dim, hidden), 0, heads)
        if config.attention_bias:
            yield f"{part}_proj.bias", Entry((heads * dim,), 0, heads)
    yield "o_proj.weight", Entry((hidden, config.num_heads * dim), 1, config.num_heads)
    if config.output_bias:
        yield "o_proj.bias", Entry((hidden,))
    if config.qk_norm:
        yield "q_norm.weight", Entry((dim,))
        yield "k_norm.weight", Entry((dim,))


def _latent_attention(config: NetworkConfig, mla: MLAConfig) -> Iterator[tuple[str, Entry]]:
    hidden, heads, rank = config.hidden_size, config.num_heads, mla.q_lora_rank
    if rank is None:
        yield "q_proj.weight", Entry((heads * mla.qk_head_dim, hidden), 0, heads)
    else:
        yield "q_a_proj.weight", Entry((rank, hidden))
        if config.attention_bias:
            yield "q_a_proj.bias", Entry((rank,))
        yield "q_a_layernorm.weight", Entry((rank,))
        yield "q_b_proj.weight", Entry((heads * mla.qk_head_dim, rank), 0, heads)
    yield "kv_a_proj_with_mqa.weight", Entry((mla.latent_dim, hidden))
    if config.attention_bias:
        yield "kv_a_proj_with_mqa.bias", Entry((mla.latent_dim,))
    yield "kv_a_layernorm.weight", Entry((mla.kv_lora_rank,))
    yield "kv_b_proj.weight", Entry((heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank), 0, heads)
    yield "o_proj.weight", Entry((hidden, heads * mla.v_head_dim), 1, heads)
    if config.output_bias:
        yield "o_proj.bias", Entry((hidden,))
