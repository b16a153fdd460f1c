"""The numbers of a whole model, and those of one rank of it. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from workbench.models.network.rope_config import RopeConfig
from workbench.models.shapes import SOFTMAX_GATE, Gate, ModelShape

ARCHITECTURES = ("llama", "mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3")
MLA_FORMS = ("absorbed", "expanded")


@dataclass(frozen=True, kw_only=True, slots=True)
class MLAConfig:
    """Multi-head latent attention: keys and values are kept as one latent vector a token.

    Attributes:
        q_lora_rank: rank of the query's projection; None where it is whole.
        kv_lora_rank: size of the latent.
        qk_nope_head_dim: part of a head's query and key without position.
        qk_rope_head_dim: part with position, shared by all heads' keys.
        v_head_dim: of a head's value.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @property
    def qk_head_dim(self) -> int:
        """Size of a head's query and key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """What a token keeps: the latent and the shared key."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True, kw_only=True, slots=True)
class MoEConfig:
    """The sparse layers' experts, before they are spread over ranks.

    Attributes:
        num_experts: E, routed.
        top_k: K.
        intermediate_size: F of a routed expert.
        shared_intermediate_size: of the experts that every token passes, together; 0 for none.
        shared_gate: whether a sigmoid weighs the shared experts (Qwen2).
        renormalize: whether a token's weights are made to sum to 1.
        routed_scaling_factor: multiplies the router's weights.
        gate: how the router chooses.
        first_dense: layers at the start that are dense.
        frequency: of the others, those whose index it divides are sparse.
        sparse_step: of these, those where it divides index + 1.
        dense_layers: indices of layers that are dense all the same.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    renormalize: bool
    shared_intermediate_size: int = 0
    shared_gate: bool = False
    routed_scaling_factor: float = 1.0
    gate: Gate = SOFTMAX_GATE
    first_dense: int = 0
    frequency: int = 1
    sparse_step: int = 1
    dense_layers: tuple[int, ...] = ()

    def holds(self, layer: int) -> bool:
        """Whether layer `layer` has experts."""
        return (
            layer >= self.first_dense
            and layer % self.frequency == 0
            and (layer + 1) % self.sparse_step == 0
            and layer not in self.dense_layers
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkConfig:
    """A whole model, of which one rank of `tp_size` is run. Sizes are the model's; `rank_...` are those of a rank.

    Attributes:
        name: how it is shown.
        architecture: one of `ARCHITECTURES`.
        vocab_size: tokens.
        hidden_size: D.
        num_layers: that are kept.
        num_heads: query heads.
        num_kv_heads: key and value heads; with latent attention as many as `num_heads`.
        head_dim: of a query; with latent attention both parts together.
        intermediate_size: channels of a dense MLP.
        rms_eps: of the layers' norms.
        rope: rotary embedding.
        tie_embeddings: whether the embedding is the output's matrix too.
        attention_bias: whether the projections into attention have biases (with latent attention the low-rank ones).
        output_bias: whether the projection out of attention has one.
        qk_norm: whether every head's query and key is normed.
        sliding_window: keys that a query sees, itself counted; None for all.
        max_position: context that the model was made for.
        moe: experts; None for a dense model.
        mla: latent attention; None for plain heads.
        tp_size: ranks.
        source: where these numbers come from, as a sentence.
        notes: to be shown beside a result.
    """

    name: str
    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_eps: float
    rope: RopeConfig
    tie_embeddings: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    max_position: int = 4096
    moe: MoEConfig | None = None
    mla: MLAConfig | None = None
    tp_size: int = 1
    source: str = ""
    notes: tuple[str, ...] = ()

    def is_moe_layer(self, layer: int) -> bool:
        """Whether layer `layer` has experts."""
        return self.moe is not None and self.moe.holds(layer)

    @property
    def moe_layers(self) -> int:
        """Layers with experts."""
        return sum(map(self.is_moe_layer, range(self.num_layers)))

    @property
    def value_dim(self) -> int:
        """Size of a head's value."""
        return self.head_dim if self.mla is None else self.mla.v_head_dim

    @property
    def rank_vocab(self) -> int:
        """Rows of the embedding, and logits, of one rank."""
        return self.vocab_size // self.tp_size

    @property
    def rank_heads(self) -> int:
        """Query heads of one rank."""
        return self.num_heads // self.tp_size

    @property
    def rank_kv_heads(self) -> int:
        """Key and value heads of one rank; where there are fewer heads than ranks, ranks share one."""
        return max(1, self.num_kv_heads // self.tp_size)

    @property
    def rank_intermediate(self) -> int:
        """Channels of a dense MLP on one rank."""
        return self.intermediate_size // self.tp_size

    @property
    def rank_shared(self) -> int:
        """Channels of the shared experts on one rank; 0 for none."""
        return 0 if self.moe is None else self.moe.shared_intermediate_size // self.tp_size

    @property
    def layer_shape(self) -> ModelShape:
        """One rank's sparse layer; the model must have some."""
        moe = self.moe
        assert moe is not None
        return ModelShape(
            name=self.name,
            num_experts=moe.num_experts,
            hidden_size=self.hidden_size,
            intermediate_size=moe.intermediate_size // self.tp_size,
            top_k=moe.top_k,
            renormalize=moe.renormalize,
            tp_size=self.tp_size,
            dense_source=False,
            num_layers=self.moe_layers,
            source=self.source,
            routed_scaling_factor=moe.routed_scaling_factor,
            gate=moe.gate,
        )

    def parameters(self) -> int:
        """Weights of one rank, norms and biases included."""
        from workbench.models.network.names import rank_tensors

        return sum(map(prod, rank_tensors(self).values()))

    def cached_per_token(self, mla_decode: str = "absorbed") -> int:
        """Numbers that one layer of one rank keeps of a token: keys and values, or the latent."""
        if self.mla is not None and mla_decode == "absorbed":
            return self.mla.latent_dim
        return self.rank_kv_heads * (self.head_dim + self.value_dim)

    def kv_bytes_per_token(self, dtype_size: int, mla_decode: str = "absorbed") -> int:
        """Bytes that all layers of one rank keep of a token, each number taking `dtype_size` bytes."""
        return self.num_layers * self.cached_per_token(mla_decode) * dtype_size
