"""Read a Hugging Face `config.json` into a `LayerConfig`, whatever its family calls the numbers. No torch here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workbench.errors import InvalidInput, choices
from workbench.models.shapes import SOFTMAX_GATE, Gate, LayerConfig

EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
EXPERT_CHANNELS = ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size")
TOP_K = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k")

# Families whose gate is a plain softmax over all experts followed by top-k -> whether it renormalises when the config
# does not say. Renormalised softmax over all experts equals a softmax over the chosen logits (GPT-OSS, Granite).
SOFTMAX_GATES = {
    "mixtral": True,
    "gpt_oss": True,
    "granitemoe": True,
    "qwen2_moe": False,
    "qwen3_moe": False,
    "qwen3_vl_moe_text": False,
    "olmoe": False,
    "jamba": False,
    "deepseek_v2": False,
}
# Families whose configuration describes the gate in DeepSeek's keys -> what their code takes where a key is missing.
_V2 = {"scoring_func": "softmax", "topk_method": "greedy"}
_V3 = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True}
_V3_GROUPS = {**_V3, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5}
GATE_DEFAULTS: dict[str, dict[str, Any]] = {
    "deepseek_v2": _V2,
    "deepseek_v3": _V3_GROUPS,
    "deepseek_v32": _V3_GROUPS,
    "glm4_moe": _V3,
    "dots1": {**_V3, "norm_topk_prob": False},
}
# topk_method -> what ranks a group (none: all experts are one), and whether a bias corrects the choice.
_METHODS = {"greedy": (None, False), "group_limited_greedy": ("max", False), "noaux_tc": ("top2_sum", True)}
_SCORINGS = ("softmax", "sigmoid")
_ALLOWED = "a config.json with a number of experts, or with intermediate_size for a dense MLP, is allowed"


def read_config(path: Path, name: str) -> LayerConfig:
    """The layer that a `config.json` describes.

    Raises:
        InvalidInput: the file is not a JSON object, or lacks what a layer needs.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidInput(f"model: {path} cannot be read as a config.json ({error})") from None
    if not isinstance(data, dict):
        raise InvalidInput(f"model: {path} must hold a JSON object, not {type(data).__name__}; {_ALLOWED}")
    return parse_config(data, name, source=f"{path.name} of {name}")


def parse_config(data: Mapping[str, Any], name: str, *, source: str) -> LayerConfig:
    """The layer that a parsed configuration describes. Raises `InvalidInput` naming the key that is amiss."""
    nested = data.get("text_config")  # multi-modal models keep the language model's numbers there
    if "hidden_size" not in data and isinstance(nested, dict):
        data = nested
    family = str(data.get("model_type") or "unknown")
    experts_key = next((key for key in EXPERTS if data.get(key) not in (None, 0, 1)), None)
    if experts_key is None and data.get("intermediate_size") is None:
        raise InvalidInput(
            f"model: the configuration of {name} has neither experts ({choices(EXPERTS)}) "
            f"nor an MLP (intermediate_size); {_ALLOWED}"
        )
    hidden = _size(data, ("hidden_size",), name)
    layers = _size(data, ("num_hidden_layers",), name)
    activation = str(data.get("hidden_act") or data.get("hidden_activation") or "silu")
    notes = [] if activation in ("silu", "swish") else [f"The model's activation {activation} is replaced by SiLU."]
    if experts_key is None:
        channels = _size(data, ("intermediate_size",), name)
        return LayerConfig(
            name=name,
            hidden_size=hidden,
            channels=channels,
            num_experts=None,
            top_k=None,
            renormalize=False,
            num_layers=layers,
            source=f"{source}, its dense MLP cut into experts",
            notes=tuple(notes),
        )
    if any(data.get(key) for key in ("n_shared_experts", "shared_expert_intermediate_size", "moe_num_shared_experts")):
        notes.append("The shared experts that every token passes are left out.")
    if family == "gpt_oss":
        notes.append("The experts' biases and clamped activation are left out.")
    known = {**GATE_DEFAULTS.get(family, {}), **data}
    norm = known.get("norm_topk_prob")
    experts = _size(data, (experts_key,), name)
    gate, gate_reason = _gate(known, family, name, experts)
    return LayerConfig(
        name=name,
        hidden_size=hidden,
        channels=_size(data, EXPERT_CHANNELS, name),
        num_experts=experts,
        top_k=_size(data, TOP_K, name),
        renormalize=bool(SOFTMAX_GATES.get(family, False) if norm is None else norm),
        num_layers=_moe_layers(data, layers, name),
        source=source,
        routed_scaling_factor=_scaling(known, name),
        gate=gate,
        gate_reason=gate_reason,
        notes=tuple(notes),
    )


def _size(data: Mapping[str, Any], keys: tuple[str, ...], name: str) -> int:
    for key in keys:
        value = data.get(key)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InvalidInput(
                    f"model: {key} in the configuration of {name} must be a whole number of at least 1, not {value!r}"
                )
            return value
    raise InvalidInput(f"model: the configuration of {name} lacks {choices(keys)}; {_ALLOWED}")


def _scaling(data: Mapping[str, Any], name: str) -> float:
    value = data.get("routed_scaling_factor")
    if value is None:
        return 1.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise InvalidInput(
            f"model: routed_scaling_factor in the configuration of {name} must be a number above 0, not {value!r}"
        )
    return float(value)


def _gate(data: Mapping[str, Any], family: str, name: str, experts: int) -> tuple[Gate, str]:
    """The model's gate, and why it cannot be run; empty where it can.

    A configuration of any family that says both how scores are made and how experts are chosen describes its gate.
    """
    scoring = data.get("scoring_func")
    method = data.get("topk_method")
    if family not in GATE_DEFAULTS and (scoring is None or method is None):
        if family not in SOFTMAX_GATES:
            families = choices(sorted({*SOFTMAX_GATES, *GATE_DEFAULTS}))
            return SOFTMAX_GATE, f"the gate of {name} (model type {family}) is not known; known are those of {families}"
        scoring, method = scoring or "softmax", method or "greedy"
        if (scoring, method) != ("softmax", "greedy"):
            return SOFTMAX_GATE, (
                f"the gate of {name} ({family}: scoring_func {scoring}, topk_method {method}) is not known"
            )
    if scoring not in _SCORINGS:
        return SOFTMAX_GATE, f"the gate of {name} has scoring_func {scoring}; known are {choices(_SCORINGS)}"
    if method not in _METHODS:
        return SOFTMAX_GATE, f"the gate of {name} has topk_method {method}; known are {choices(_METHODS)}"
    group_score, bias = _METHODS[method]
    if group_score is None:
        return Gate(scoring=scoring), ""
    groups = 1 if data.get("n_group") is None else _size(data, ("n_group",), name)
    kept = 1 if groups == 1 else _size(data, ("topk_group",), name)
    if experts % groups:
        return SOFTMAX_GATE, f"the gate of {name} has n_group {groups}, which does not divide its {experts} experts"
    if kept > groups:
        return SOFTMAX_GATE, f"the gate of {name} has topk_group {kept}, which is more than its n_group {groups}"
    return (
        Gate(scoring=scoring, correction_bias=bias, num_groups=groups, topk_group=kept, group_score=group_score),
        "",
    )


def _moe_layers(data: Mapping[str, Any], layers: int, name: str) -> int:
    """Layers with experts: DeepSeek starts dense, Qwen may take every n-th layer or leave some out."""
    first = data.get("first_k_dense_replace") or 0
    step = data.get("decoder_sparse_step") or 1
    frequency = data.get("moe_layer_freq") or 1
    dense = data.get("mlp_only_layers") or ()

    def has_experts(layer: int) -> bool:
        if isinstance(frequency, list):
            return layer < len(frequency) and bool(frequency[layer])
        return layer >= first and layer % frequency == 0 and (layer + 1) % step == 0 and layer not in dense

    try:
        count = sum(has_experts(layer) for layer in range(layers))
    except TypeError:
        count = 0
    if count == 0:
        keys = ("first_k_dense_replace", "moe_layer_freq", "decoder_sparse_step", "mlp_only_layers")
        raise InvalidInput(f"model: the configuration of {name} leaves no layers with experts; look at {choices(keys)}")
    return count
