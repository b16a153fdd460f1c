"""The shape of one MoE layer: presets, and what any model's files say. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt

from workbench.errors import InvalidInput, choices
from workbench.spec import RunSpec

DEFAULT_CUT = 8
DEFAULT_TOP_K = 2
OTHER_ROUTINGS = "balanced, uniform, zipf or single_expert"


@dataclass(frozen=True, kw_only=True, slots=True)
class Gate:
    """How a model's router scores the experts and chooses among them; as it stands, a softmax and the K largest.

    Attributes:
        scoring: `softmax` or `sigmoid`.
        correction_bias: whether a trained bias per expert is added to the scores that choose, not to the weights.
        num_groups: groups of neighbouring experts, of which the best stay; 1 for none.
        topk_group: groups that stay.
        group_score: what ranks a group: its best score (`max`) or the sum of its two best (`top2_sum`).
    """

    scoring: str = "softmax"
    correction_bias: bool = False
    num_groups: int = 1
    topk_group: int = 1
    group_score: str = "max"


SOFTMAX_GATE = Gate()


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerConfig:
    """What a model's configuration says about its MLP, before it is cut or spread over ranks.

    Attributes:
        name: how it is shown.
        hidden_size: D.
        channels: width of one expert, or of the dense MLP.
        num_experts: None for a dense MLP, which is then cut into experts.
        top_k: experts per token; None for a dense MLP.
        renormalize: whether the router makes a token's weights sum to 1.
        num_layers: layers that hold such an MLP.
        source: where these numbers come from, as a sentence.
        routed_scaling_factor: multiplies the router's weights.
        gate: how the router chooses; not to be read where `gate_reason` is not empty.
        gate_reason: why the model's own router cannot be run; empty where it can.
        cut: experts that a dense MLP is cut into when nothing else is asked.
        notes: what the layer leaves out of the model's, as sentences.
    """

    name: str
    hidden_size: int
    channels: int
    num_experts: int | None
    top_k: int | None
    renormalize: bool
    num_layers: int
    source: str
    routed_scaling_factor: float = 1.0
    gate: Gate = SOFTMAX_GATE
    gate_reason: str = ""
    cut: int = DEFAULT_CUT
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """One rank's MoE layer.

    Attributes:
        name: of the model.
        num_experts: E.
        hidden_size: D.
        intermediate_size: F of one rank, already divided by `tp_size`.
        top_k: K.
        renormalize: whether the model's router makes a token's weights sum to 1.
        tp_size: tensor-parallel ranks that share each expert.
        dense_source: whether the experts are cut from a dense MLP.
        num_layers: layers of this kind in the model.
        source: where the numbers come from, as a sentence.
        routed_scaling_factor: multiplies the router's weights.
        gate: how the router chooses; not to be read where `gate_reason` is not empty.
        gate_reason: why the model's own router cannot be run; empty where it can.
        notes: what the layer leaves out of the model's, as sentences.
    """

    name: str
    num_experts: int
    hidden_size: int
    intermediate_size: int
    top_k: int
    renormalize: bool
    tp_size: int
    dense_source: bool
    num_layers: int
    source: str
    routed_scaling_factor: float = 1.0
    gate: Gate = SOFTMAX_GATE
    gate_reason: str = ""
    notes: tuple[str, ...] = ()

    @property
    def parameters(self) -> int:
        """Weights of all experts of one layer on one rank."""
        return self.num_experts * 3 * self.hidden_size * self.intermediate_size


_SHARED = "The shared experts that every token passes are left out."
_PUBLIC = "the model's public config.json"

PRESETS: dict[str, LayerConfig] = {
    config.name: config
    for config in (
        LayerConfig(
            name="smollm2-135m",
            hidden_size=576,
            channels=1536,
            num_experts=None,
            top_k=None,
            renormalize=False,
            num_layers=30,
            source="SmolLM2-135M-Instruct, its dense MLP cut into experts",
        ),
        LayerConfig(
            name="mixtral-8x7b",
            hidden_size=4096,
            channels=14336,
            num_experts=8,
            top_k=2,
            renormalize=True,
            num_layers=32,
            source=_PUBLIC,
        ),
        LayerConfig(
            name="qwen2-57b-a14b",
            hidden_size=3584,
            channels=2560,
            num_experts=64,
            top_k=8,
            renormalize=False,
            num_layers=28,
            source=_PUBLIC,
            notes=(_SHARED,),
        ),
        LayerConfig(
            name="qwen3-30b-a3b",
            hidden_size=2048,
            channels=768,
            num_experts=128,
            top_k=8,
            renormalize=True,
            num_layers=48,
            source=_PUBLIC,
        ),
        LayerConfig(
            name="deepseek-v2-lite",
            hidden_size=2048,
            channels=1408,
            num_experts=64,
            top_k=6,
            renormalize=False,
            num_layers=26,
            source=_PUBLIC,
            notes=(_SHARED,),
        ),
        LayerConfig(
            name="deepseek-v3",
            hidden_size=7168,
            channels=2048,
            num_experts=256,
            top_k=8,
            renormalize=True,
            num_layers=58,
            source=_PUBLIC,
            routed_scaling_factor=2.5,
            gate=Gate(scoring="sigmoid", correction_bias=True, num_groups=8, topk_group=4, group_score="top2_sum"),
            notes=(_SHARED,),
        ),
    )
}


def router_reason(shape: ModelShape) -> str | None:
    """Why `routing="model"` cannot be honoured for `shape`, as a sentence; None where it can.

    A gate that is not known is refused rather than stood in for: another would choose other experts.
    """
    if shape.dense_source:
        return None
    reason, gate = shape.gate_reason, shape.gate
    held = shape.num_experts // gate.num_groups * gate.topk_group
    if not reason and shape.top_k > held:
        reason = (
            f"the gate of {shape.name} chooses among the {held} experts of {gate.topk_group} groups, "
            f"which are fewer than top_k {shape.top_k}"
        )
    return f"{reason}; {OTHER_ROUTINGS} is allowed" if reason else None


def model_shape(spec: RunSpec) -> ModelShape:
    """The shape of the layer that `spec` runs, on one rank.

    Raises:
        InvalidInput: the model is unknown or has no MLP that can be run, `experts` does not divide the MLP's channels,
            `top_k` exceeds the experts, or `tp_size` does not divide an expert's channels.
    """
    return rank_shape(layer_config(spec.model), experts=spec.experts, top_k=spec.top_k, tp_size=spec.tp_size)


def layer_config(model: str) -> LayerConfig:
    """Look `model` up: a preset's name, a file, a folder or a cached Hugging Face id.

    Raises:
        InvalidInput: none of these, or its configuration cannot be used.
    """
    if model in PRESETS:
        return PRESETS[model]
    from workbench.models.locate import find_files

    return find_files(model).config


def rank_shape(config: LayerConfig, *, experts: int | None, top_k: int | None, tp_size: int) -> ModelShape:
    """Cut a dense MLP into `experts`, take `top_k`, and keep one rank's share of every expert."""
    dense = config.num_experts is None
    count = config.num_experts or experts or config.cut
    if not dense and experts not in (None, config.num_experts):
        raise InvalidInput(
            f"experts: {config.name} has {config.num_experts}, not {experts}; "
            "only a dense MLP can be cut into another number"
        )
    if dense and config.channels % count:
        raise InvalidInput(
            f"experts: must divide the {config.channels} channels of the MLP, not {count}; "
            f"the nearest that do are {choices(_nearest(config.channels, count))}"
        )
    channels = config.channels // count if dense else config.channels
    chosen = top_k or config.top_k or min(DEFAULT_TOP_K, count)
    if chosen > count:
        raise InvalidInput(f"top_k: must be from 1 to {count}, the number of experts, not {chosen}")
    if channels % tp_size:
        raise InvalidInput(
            f"tp_size: must divide the {channels} channels of an expert, not {tp_size}; allowed are "
            f"{choices(d for d in _divisors(channels) if d <= 64)}" + (" and larger divisors" if channels > 64 else "")
        )
    return ModelShape(
        name=config.name,
        num_experts=count,
        hidden_size=config.hidden_size,
        intermediate_size=channels // tp_size,
        top_k=chosen,
        renormalize=config.renormalize,
        tp_size=tp_size,
        dense_source=dense,
        num_layers=config.num_layers,
        source=config.source,
        routed_scaling_factor=config.routed_scaling_factor,
        gate=config.gate,
        gate_reason=config.gate_reason,
        notes=config.notes,
    )


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def _nearest(number: int, wanted: int) -> list[int]:
    """The divisors of `number` on both sides of `wanted`: 1536 and 7 -> 6, 8."""
    divisors = _divisors(number)
    return [d for d in divisors if d < wanted][-1:] + [d for d in divisors if d > wanted][:1]
