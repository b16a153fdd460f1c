"""Small whole steps: a dense network with grouped queries, and one with latent attention and experts."""

from __future__ import annotations

from typing import Any

import torch

from workbench.models.network.build import build_network
from workbench.models.network.config import parse_network
from workbench.models.network.tensors import RandomTensors
from workbench.modes import RoutingKind
from workbench.parts import StepPoint
from workbench.runtime.kv_cache import KVCache
from workbench.runtime.step import StepRunner, random_prompts, step_routings

CPU = torch.device("cpu")
DENSE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 101,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 77,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
LATENT: dict[str, Any] = {
    **DENSE,
    "model_type": "deepseek_v2",
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 19,
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "topk_method": "greedy",
}
CONFIGS = {"dense": DENSE, "latent": LATENT}


def step_runner(
    case: str,
    *,
    quant: str = "fp32",
    batch_size: int = 3,
    input_len: int = 11,
    output_len: int = 4,
    page_size: int = 4,
    routing: str = "model",
    **options: Any,
) -> StepRunner:
    config = parse_network(CONFIGS[case], case, "a test")
    given = {"moe_backend": "reference", **options}
    network = build_network(config, RandomTensors(config, CPU, 0, torch.float32), quant=quant, **given)
    point = StepPoint(batch_size=batch_size, input_len=input_len, output_len=output_len, page_size=page_size)
    cache = KVCache.for_network(network, batch_size, point.max_len, page_size)
    routings = step_routings(config, point, RoutingKind(routing), 1.2, 0, CPU)
    return StepRunner(network, cache, random_prompts(config, point, 0, CPU), output_len, routings)
