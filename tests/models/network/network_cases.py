"""Small models of every architecture, with transformers' own implementation of each as the oracle."""

from __future__ import annotations

from typing import Any

import torch

from workbench.models.network.config import NetworkConfig, parse_network
from workbench.models.network.names import expert_names
from workbench.models.network.tensors import RandomTensors, TensorSource

CPU = torch.device("cpu")
_COMMON: dict[str, Any] = {"vocab_size": 101, "max_position_embeddings": 64, "rms_norm_eps": 1e-3}
_LATENT: dict[str, Any] = {
    **_COMMON,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 45,
    "moe_intermediate_size": 19,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "first_k_dense_replace": 1,
}
# A stretch from 16 to 64 positions over a short base, so that within 20 positions every rule of it shows.
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 4, "beta_slow": 1}
CASES: dict[str, dict[str, Any]] = {
    "llama": {
        **_COMMON,
        "model_type": "llama",
        "hidden_size": 60,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "intermediate_size": 77,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "llama-linear": {
        **_COMMON,
        "model_type": "llama",
        "hidden_size": 35,
        "num_hidden_layers": 2,
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
        "head_dim": 6,
        "intermediate_size": 19,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.5},
    },
    "mixtral": {
        **_COMMON,
        "model_type": "mixtral",
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "intermediate_size": 33,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "sliding_window": 5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    },
    "qwen2_moe": {
        **_COMMON,
        "model_type": "qwen2_moe",
        "hidden_size": 56,
        "num_hidden_layers": 4,
        "num_attention_heads": 7,
        "num_key_value_heads": 1,
        "intermediate_size": 37,
        "moe_intermediate_size": 13,
        "shared_expert_intermediate_size": 29,
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    },
    "qwen3_moe": {
        **_COMMON,
        "model_type": "qwen3_moe",
        "hidden_size": 41,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 14,
        "intermediate_size": 21,
        "moe_intermediate_size": 11,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "mlp_only_layers": [0],
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    },
    "deepseek_v2": {
        **_LATENT,
        "model_type": "deepseek_v2",
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "q_lora_rank": None,
        "topk_method": "greedy",
        "rope_parameters": {**_YARN, "rope_theta": 100.0, "mscale": 0.707, "mscale_all_dim": 0.707},
    },
    "deepseek_v2-groups": {
        **_LATENT,
        "model_type": "deepseek_v2",
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 3,
        "q_lora_rank": 24,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 16.0,
        "attention_bias": True,
        "rope_parameters": {**_YARN, "rope_theta": 100.0, "mscale": 1.2, "mscale_all_dim": 0.7},
    },
    "deepseek_v3": {
        **_LATENT,
        "model_type": "deepseek_v3",
        "n_routed_experts": 12,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "q_lora_rank": 20,
        "n_group": 3,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "rope_parameters": {**_YARN, "rope_theta": 100.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "deepseek_v3-halves": {
        **_LATENT,
        "model_type": "deepseek_v3",
        "n_routed_experts": 6,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "q_lora_rank": None,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "rope_interleave": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    },
}


def config_of(case: str, **changes: Any) -> NetworkConfig:
    return parse_network({**CASES[case], **changes}, case, "a test")


def random_tensors(config: NetworkConfig, seed: int = 0) -> RandomTensors:
    """In float32, so that nothing is rounded on the way to either side."""
    return RandomTensors(config, CPU, seed, torch.float32)


class Whole(TensorSource):
    """The same tensors as those of a checkpoint: the whole model's, whatever the number of ranks."""

    def __init__(self, config: NetworkConfig, seed: int = 0) -> None:
        self._made = random_tensors(config, seed)

    def names(self) -> frozenset[str]:
        return self._made.names()

    def get(self, name: str) -> torch.Tensor:
        return self._made.get(name)


def oracle(case: str, source: TensorSource) -> torch.nn.Module:
    """transformers' model of the case in float32 with the tensors of `source`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {key: value for key, value in CASES[case].items() if key != "model_type"}
    own = AutoConfig.for_model(CASES[case]["model_type"], **values)
    model = AutoModelForCausalLM.from_config(
        own, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    config = config_of(case)
    state = {name: _stored(name, config, source) for name in model.state_dict()}
    model.load_state_dict(state, strict=True)
    return model


def _stored(name: str, config: NetworkConfig, source: TensorSource) -> torch.Tensor:
    """A tensor of transformers' model, which keeps experts in stacks and calls Mixtral's block `mlp`."""
    if name == "lm_head.weight" and config.tie_embeddings:
        return source.get("model.embed_tokens.weight")
    if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        layer, count = int(name.split(".")[2]), config.moe.num_experts if config.moe else 0
        parts = [expert_names(config, layer, expert) for expert in range(count)]
        if name.endswith("down_proj"):
            return torch.stack([source.get(down) for _, _, down in parts])
        return torch.stack([torch.cat((source.get(gate), source.get(up))) for gate, up, _ in parts])
    if config.architecture == "mixtral":
        name = name.replace(".mlp.gate.", ".block_sparse_moe.gate.")
    return source.get(name)
