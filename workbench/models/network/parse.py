"""Read a Hugging Face `config.json` into a `NetworkConfig`. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.errors import InvalidInput, choices
from workbench.models.configs import parse_config
from workbench.models.network.rope_config import parse_rope
from workbench.models.network.shapes import ARCHITECTURES, MLAConfig, MoEConfig, NetworkConfig

# What transformers takes where a configuration leaves a key out.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mixtral": {"rope_theta": 1e6, "rms_norm_eps": 1e-5, "num_key_value_heads": 8},
    "qwen2_moe": {"qkv_bias": True},
    "qwen3_moe": {},
    "deepseek_v2": {},
    "deepseek_v3": {"first_k_dense_replace": 3},
}
_LATENT = ("deepseek_v2", "deepseek_v3")


def parse_network(data: Mapping[str, Any], name: str, source: str) -> NetworkConfig:
    """The network that a parsed configuration describes, all layers of it, on one rank.

    Args:
        data: the parsed config.json.
        name: of the model.
        source: where the numbers come from, as a sentence.

    Raises:
        InvalidInput: an architecture that is not supported (those that are stand in the sentence), or a key that is
            missing or amiss.
    """
    nested = data.get("text_config")  # multi-modal models keep the language model's numbers there
    if "hidden_size" not in data and isinstance(nested, Mapping):
        data = nested
    family = str(data.get("model_type") or "unknown")
    if family not in ARCHITECTURES:
        raise InvalidInput(
            f"model: the architecture of {name}, {family}, is not supported as a whole model; "
            f"supported are {choices(ARCHITECTURES)}"
        )
    known = {**_DEFAULTS[family], **{key: value for key, value in data.items() if value is not None}}
    activation = str(known.get("hidden_act", "silu"))
    if activation not in ("silu", "swish"):
        raise InvalidInput(f"model: hidden_act of {name} must be silu, not {activation}")
    if known.get("mlp_bias"):
        raise InvalidInput(f"model: mlp_bias of {name} must be false: MLPs with biases are not supported")
    hidden, heads = _size(known, "hidden_size", name), _size(known, "num_attention_heads", name)
    layers = _size(known, "num_hidden_layers", name)
    mla = _mla(known, name) if family in _LATENT else None
    # DeepSeek's configurations name key heads too, as many as queries: the latent has none.
    kv_heads = heads if mla is not None else _size({"num_key_value_heads": heads, **known}, "num_key_value_heads", name)
    if heads % kv_heads:
        raise InvalidInput(
            f"model: num_key_value_heads in the configuration of {name} must divide the {heads} heads, not {kv_heads}"
        )
    max_position = _size({"max_position_embeddings": 2048, **known}, "max_position_embeddings", name)
    bias = bool(known.get("qkv_bias" if family == "qwen2_moe" else "attention_bias", False)) and family != "mixtral"
    return NetworkConfig(
        name=name,
        architecture=family,
        vocab_size=_size(known, "vocab_size", name),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=_head_dim(known, name, hidden, heads) if mla is None else mla.qk_head_dim,
        intermediate_size=_size(known, "intermediate_size", name),
        rms_eps=_positive({"rms_norm_eps": 1e-6, **known}, "rms_norm_eps", name),
        rope=parse_rope(
            known,
            name,
            max_position,
            float(_DEFAULTS[family].get("rope_theta", 10000.0)),
            latent=mla is not None,
            interleaved=mla is not None and bool(known.get("rope_interleave", True)),
        ),
        tie_embeddings=bool(known.get("tie_word_embeddings", False)),
        attention_bias=bias,
        output_bias=bias and family != "qwen2_moe",
        qk_norm=family == "qwen3_moe",
        sliding_window=_window(known, family, name),
        max_position=max_position,
        moe=None if family == "llama" else _moe(known, family, name, source, layers),
        mla=mla,
        source=source,
    )


def _head_dim(data: Mapping[str, Any], name: str, hidden: int, heads: int) -> int:
    if data.get("head_dim") is not None:
        size = _size(data, "head_dim", name)
    elif hidden % heads:
        raise InvalidInput(
            f"model: num_attention_heads in the configuration of {name} must divide hidden_size {hidden}, not {heads}"
        )
    else:
        size = hidden // heads
    if size % 2:
        raise InvalidInput(f"model: the head size of {name} must be even, not {size}")
    return size


def _mla(data: Mapping[str, Any], name: str) -> MLAConfig:
    mla = MLAConfig(
        q_lora_rank=None if data.get("q_lora_rank") is None else _size(data, "q_lora_rank", name),
        kv_lora_rank=_size(data, "kv_lora_rank", name),
        qk_nope_head_dim=_size(data, "qk_nope_head_dim", name),
        qk_rope_head_dim=_size(data, "qk_rope_head_dim", name),
        v_head_dim=_size(data, "v_head_dim", name),
    )
    if mla.qk_rope_head_dim % 2:
        raise InvalidInput(f"model: qk_rope_head_dim of {name} must be even, not {mla.qk_rope_head_dim}")
    return mla


def _window(data: Mapping[str, Any], family: str, name: str) -> int | None:
    """The sliding window, which all layers have or none."""
    if family in ("llama", *_LATENT) or data.get("sliding_window") is None:
        return None
    if family != "mixtral" and not data.get("use_sliding_window", False):
        return None
    if family == "qwen2_moe":
        raise InvalidInput(
            f"model: use_sliding_window of {name} must be false: which layers of this architecture have it is not "
            "agreed upon"
        )
    return _size(data, "sliding_window", name)


def _moe(data: Mapping[str, Any], family: str, name: str, source: str, layers: int) -> MoEConfig:
    layer = parse_config(data, name, source=source)
    if layer.gate_reason:
        raise InvalidInput(f"model: {layer.gate_reason}")
    if layer.num_experts is None or layer.top_k is None:
        raise InvalidInput(f"model: the configuration of {name} must have more than one expert")
    held = layer.num_experts // layer.gate.num_groups * layer.gate.topk_group
    if layer.top_k > held:
        raise InvalidInput(f"model: top_k {layer.top_k} of {name} must be at most {held}, the experts it chooses among")
    shared = 0
    if family == "qwen2_moe":
        shared = _size(data, "shared_expert_intermediate_size", name)
    elif family in _LATENT and data.get("n_shared_experts"):
        shared = _size(data, "n_shared_experts", name) * layer.channels
    frequency = data.get("moe_layer_freq") or 1
    if isinstance(frequency, list):
        raise InvalidInput(f"model: moe_layer_freq of {name} must be a whole number, not a list")
    return MoEConfig(
        num_experts=layer.num_experts,
        top_k=layer.top_k,
        intermediate_size=layer.channels,
        renormalize=layer.renormalize,
        shared_intermediate_size=shared,
        shared_gate=family == "qwen2_moe",
        routed_scaling_factor=layer.routed_scaling_factor,
        gate=layer.gate,
        first_dense=min(int(data.get("first_k_dense_replace") or 0), layers),
        frequency=int(frequency),
        sparse_step=int(data.get("decoder_sparse_step") or 1),
        dense_layers=tuple(int(index) for index in data.get("mlp_only_layers") or ()),
    )


def _size(data: Mapping[str, Any], key: str, name: str) -> int:
    value = data.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        said = "is missing" if value is None else f"not {value!r}"
        raise InvalidInput(
            f"model: {key} in the configuration of {name} must be a whole number of at least 1"
            f"{'; it ' if value is None else ', '}{said}"
        )
    return value


def _positive(data: Mapping[str, Any], key: str, name: str) -> float:
    value = data.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise InvalidInput(f"model: {key} in the configuration of {name} must be a number above 0, not {value!r}")
    return float(value)
