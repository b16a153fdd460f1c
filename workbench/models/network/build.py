"""From a configuration and a source of tensors to a network, layer by layer.

Shapes: N outputs, K inputs of a matrix; D model, F channels of an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain

import torch
from moe_kernels import ExpertWeights, LinearWeights
from moe_kernels.types import TORCH_DTYPE

from workbench.errors import InvalidInput, choices
from workbench.models.network.attention import Attention
from workbench.models.network.layer import DecoderLayer
from workbench.models.network.linear import Linear
from workbench.models.network.mla import LatentAttention
from workbench.models.network.mlp import MLP
from workbench.models.network.moe import Gate, MoE
from workbench.models.network.names import (
    EMBED,
    LM_HEAD,
    NORM,
    Entry,
    entries,
    expert_names,
    layer_prefix,
    moe_prefix,
    shared_prefix,
)
from workbench.models.network.network import Embedding, Head, Network
from workbench.models.network.norm import ResidualNorm, RMSNorm
from workbench.models.network.rope import Rope, halves_order
from workbench.models.network.shapes import MLA_FORMS, NetworkConfig
from workbench.models.network.tensors import TensorSource
from workbench.modes import Quant, Reduction, resolve

# DeepSeek's norms inside latent attention have an epsilon of their own, whatever rms_norm_eps says.
_LATENT_EPS = 1e-6


def build_network(
    config: NetworkConfig,
    source: TensorSource,
    *,
    quant: str = "bf16",
    group_size: int = 128,
    zero_points: bool = False,
    moe_backend: str | None = "triton",
    split_k: int | None = None,
    reduction: str = "deterministic",
    attention_backend: str | None = "sdpa",
    mla_prefill: str = "expanded",
    mla_decode: str = "absorbed",
    fused: bool = False,
    device: torch.device | str = "cpu",
    progress: Callable[[int, int], None] | None = None,
    rank: int = 0,
) -> Network:
    """Read every tensor once and store it as it is run.

    Projections of attention and MLPs, and experts, are stored as `quant`; embedding, norms, biases and output in the
    compute dtype (that of a plain format, else bfloat16); gates in float32. No more is held at a time than the result
    and the tensors of one matrix, one expert or two stacks of random experts.

    Args:
        config: the network, cut to the layers and ranks that are run.
        source: its tensors.
        quant, group_size, zero_points: format of the weights; the last two of int4.
        moe_backend, split_k, reduction: how experts are run; see `moe_kernels.fused_experts`.
        attention_backend: how attention is run; see `moe_kernels.decode_attention`. None for the best.
        mla_prefill, mla_decode: `absorbed` or `expanded`; without latent attention they are not read.
        fused: whether small kernels are fused (`Network.set_fused`), and shared experts run among the routed ones where
            they are of their size and have no gate.
        device: where the network is.
        progress: called after each layer with how many are done, and of how many.
        rank: whose part is taken, of `config.tp_size`.

    Raises:
        InvalidInput: an unknown `quant`, `reduction`, `mla_prefill` or `mla_decode`, or a rank that there is not.
        ValueError: a tensor of another shape than the configuration says.
    """
    for name, value in (("mla_prefill", mla_prefill), ("mla_decode", mla_decode)):
        if value not in MLA_FORMS:
            raise InvalidInput(f"{name}: must be {choices(MLA_FORMS)}, not {value!r}")
    if not 0 <= rank < config.tp_size:
        raise InvalidInput(f"rank: must be from 0 to {config.tp_size - 1}, not {rank}")
    if source.sharded and rank:
        raise InvalidInput(f"rank: must be 0, the one that this source makes, not {rank}")
    form = _Form(
        quant=resolve(Quant, quant, "quant"),
        group_size=group_size,
        zero_points=zero_points,
        moe_backend=moe_backend,
        split_k=split_k,
        reduction=resolve(Reduction, reduction, "reduction").value,
        attention_backend=attention_backend,
        mla_prefill=mla_prefill,
        mla_decode=mla_decode,
        fused=fused,
    )
    builder = _Builder(config, source, form, torch.device(device), rank)
    with torch.no_grad():
        return builder.network(progress)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Form:
    """How a network is stored and run."""

    quant: Quant
    group_size: int
    zero_points: bool
    moe_backend: str | None
    split_k: int | None
    reduction: str
    attention_backend: str | None
    mla_prefill: str
    mla_decode: str
    fused: bool

    @property
    def dtype(self) -> torch.dtype:
        """Of activations."""
        return TORCH_DTYPE.get(self.quant, torch.bfloat16)


class _Builder:
    def __init__(
        self, config: NetworkConfig, source: TensorSource, form: _Form, device: torch.device, rank: int
    ) -> None:
        self.config, self.source, self.form, self.device, self.rank = config, source, form, device, rank
        self.entries: dict[str, Entry] = dict(entries(config))
        mla = config.mla
        self.rope = Rope(config.rope, config.head_dim if mla is None else mla.qk_rope_head_dim, device)

    def network(self, progress: Callable[[int, int], None] | None) -> Network:
        config, total = self.config, self.config.num_layers
        embed = self.plain(EMBED)
        layers = []
        for index in range(total):
            layers.append(self.layer(index))
            if progress is not None:
                progress(index + 1, total)
        made = Network(
            config,
            Embedding(embed, wrap=config.tp_size > 1),
            layers,
            self.residual_norm(NORM),
            Head(embed if config.tie_embeddings else self.plain(LM_HEAD)),
            self.rope,
            quant=self.form.quant.value,
            mla_prefill=self.form.mla_prefill,
            mla_decode=self.form.mla_decode,
        ).eval()
        made.set_fused(self.form.fused)
        return made

    def layer(self, index: int) -> DecoderLayer:
        prefix, config = layer_prefix(index), self.config
        sparse = config.is_moe_layer(index)
        return DecoderLayer(
            self.residual_norm(f"{prefix}input_layernorm.weight"),
            (self.attention if config.mla is None else self.latent_attention)(index),
            self.residual_norm(f"{prefix}post_attention_layernorm.weight"),
            self.moe(index) if sparse else self.mlp(f"{prefix}mlp.", "mlp"),
            self.rope,
            index,
        )

    def attention(self, index: int) -> Attention:
        config, prefix = self.config, f"{layer_prefix(index)}self_attn."
        parts = [f"{prefix}{part}_proj" for part in "qkv"]
        norms = [self.norm(f"{prefix}{part}_norm", config.rms_eps) if config.qk_norm else None for part in "qk"]
        return Attention(
            self.linear(parts, "attention", bias=config.attention_bias),
            self.output(prefix),
            heads=config.rank_heads,
            kv_heads=config.rank_kv_heads,
            head_dim=config.head_dim,
            q_norm=norms[0],
            k_norm=norms[1],
            window=config.sliding_window,
            impl=self.form.attention_backend,
        )

    def latent_attention(self, index: int) -> LatentAttention:
        config, mla, prefix = self.config, self.config.mla, f"{layer_prefix(index)}self_attn."
        assert mla is not None
        whole = mla.q_lora_rank is None
        down = [f"{prefix}{'q_proj' if whole else 'q_a_proj'}", f"{prefix}kv_a_proj_with_mqa"]
        return LatentAttention(
            self.linear(down, "attention", bias=config.attention_bias),
            self.norm(f"{prefix}kv_a_layernorm", _LATENT_EPS),
            self.linear([f"{prefix}kv_b_proj"], "attention"),
            self.output(prefix),
            mla=mla,
            heads=config.rank_heads,
            scale=mla.qk_head_dim**-0.5 * config.rope.score_magnitude,
            prefill=self.form.mla_prefill,
            decode=self.form.mla_decode,
            q_norm=None if whole else self.norm(f"{prefix}q_a_layernorm", _LATENT_EPS),
            q_up=None if whole else self.linear([f"{prefix}q_b_proj"], "attention"),
            impl=self.form.attention_backend,
        )

    def output(self, prefix: str) -> Linear:
        # Ranks' outputs are added up: one of them adds the bias.
        return self.linear([f"{prefix}o_proj"], "attention", bias=self.config.output_bias and self.rank == 0)

    def mlp(self, prefix: str, part: str) -> MLP:
        made = MLP(
            self.linear([f"{prefix}gate_proj", f"{prefix}up_proj"], part), self.linear([f"{prefix}down_proj"], part)
        )
        made.part = part
        return made

    def moe(self, index: int) -> MoE:
        config, moe, prefix, form = self.config, self.config.moe, moe_prefix(self.config, index), self.form
        assert moe is not None
        bias = self.tensor(f"{prefix}gate.e_score_correction_bias") if moe.gate.correction_bias else None
        weight = self.tensor(f"{prefix}gate.weight")
        gate = Gate(config.layer_shape, weight.to(torch.float32), None if bias is None else bias.to(torch.float32))
        inside = shared_inside(config) if form.fused else 0
        experts = ExpertWeights.from_experts(
            chain(self.experts(index, moe.num_experts), self.shared_experts(index, inside)),
            moe.num_experts + inside,
            form.quant.value,
            dtype=form.dtype,
            group_size=form.group_size,
            zero_points=form.zero_points,
        )
        if inside:
            experts = replace(experts, num_shared=inside)
        apart = bool(moe.shared_intermediate_size) and not inside
        shared_gate = None
        if moe.shared_gate:
            shared_gate = self.tensor(f"{prefix}shared_expert_gate.weight").to(torch.float32)
        return MoE(
            gate,
            experts,
            shared=self.mlp(shared_prefix(config, index), "moe") if apart else None,
            shared_gate=shared_gate,
            backend=form.moe_backend,
            split_k=form.split_k,
            reduction=form.reduction,
        )

    def shared_experts(self, index: int, count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The shared MLP as `count` experts: each has some of its channels."""
        if not count:
            return
        prefix = shared_prefix(self.config, index)
        gate, up, down = (self.tensor(f"{prefix}{part}_proj.weight") for part in ("gate", "up", "down"))
        parts = (gate.chunk(count), up.chunk(count), down.chunk(count, dim=1))
        for gate_FD, up_FD, down_DF in zip(*parts, strict=True):
            yield torch.cat((gate_FD, up_FD)), down_DF

    def experts(self, index: int, count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        stacks = self.source.expert_stacks(index)
        if stacks is not None:
            for w1_C2FD, w2_CDF in stacks:
                yield from zip(w1_C2FD.to(self.device), w2_CDF.to(self.device), strict=True)
            return
        for expert in range(count):
            gate, up, down = expert_names(self.config, index, expert)
            yield torch.cat((self.tensor(gate), self.tensor(up))), self.tensor(down)

    def residual_norm(self, name: str) -> ResidualNorm:
        return ResidualNorm(self.plain(name), self.config.rms_eps)

    def norm(self, name: str, eps: float) -> RMSNorm:
        return RMSNorm(self.plain(f"{name}.weight"), eps)

    def linear(self, names: list[str], part: str, *, bias: bool = False) -> Linear:
        """Matrices that read the same input, as one: their rows one after another."""
        weights = [self.rows(name, self.tensor(f"{name}.weight")) for name in names]
        biases = [self.rows(name, self.plain(f"{name}.bias")) for name in names] if bias else []
        form = self.form
        return Linear(
            LinearWeights.from_dense(
                torch.cat(weights) if len(weights) > 1 else weights[0],
                form.quant.value,
                dtype=form.dtype,
                group_size=form.group_size,
                zero_points=form.zero_points,
            ),
            torch.cat(biases) if biases else None,
            part=part,
        )

    def rows(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Put the turned rows of latent attention, in pairs of neighbours, a half apart, as `rope.turned` has them."""
        mla = self.config.mla
        ends = ("q_proj", "q_b_proj", "kv_a_proj_with_mqa")
        if mla is None or not self.config.rope.interleaved or not name.endswith(ends):
            return tensor
        turned = mla.qk_rope_head_dim
        block = mla.latent_dim if name.endswith(ends[2]) else mla.qk_head_dim
        order = torch.arange(block, device=tensor.device)
        order[-turned:] = block - turned + halves_order(turned).to(tensor.device)
        ordered: torch.Tensor = tensor.unflatten(0, (-1, block))[:, order].flatten(0, 1)
        return ordered

    def plain(self, name: str) -> torch.Tensor:
        """A tensor in the compute dtype."""
        return self.tensor(name).to(self.form.dtype)

    def tensor(self, name: str) -> torch.Tensor:
        """One rank's part of a tensor, on the network's device, holding no more than that."""
        entry, found = self.entries[name], self.source.get(name)
        wanted = entry.rank_shape(self.config.tp_size) if self.source.sharded else entry.shape
        if tuple(found.shape) != wanted:
            raise ValueError(f"{name} must be {list(wanted)}; the source gives {list(found.shape)}")
        part = None if self.source.sharded else entry.part(self.config.tp_size, self.rank)
        if part is not None:
            found = found.narrow(*part).clone()
        return found.to(self.device)


def shared_inside(config: NetworkConfig) -> int:
    """As how many experts of the routed ones' size shared experts can be run among them; 0 where they cannot.

    They cannot where they have a gate of their own, or channels that are no multiple of an expert's.
    """
    moe = config.moe
    if moe is None or moe.shared_gate or not moe.shared_intermediate_size:
        return 0
    channels = moe.intermediate_size // config.tp_size
    return config.rank_shared // channels if config.rank_shared % channels == 0 else 0
