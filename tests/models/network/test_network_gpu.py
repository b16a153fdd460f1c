"""On a GPU: the same numbers as float32 on the CPU, no host in a decode step, and a step that a CUDA graph can hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from network_cases import CASES, CPU

from workbench.models.network.batch import Batch, decode_batch, prefill_batch
from workbench.models.network.build import build_network
from workbench.models.network.config import NetworkConfig, parse_network
from workbench.models.network.network import Network
from workbench.models.network.tensors import RandomTensors
from workbench.runtime.kv_cache import KVCache

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

_WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 320, "vocab_size": 1000}
_LATENT: dict[str, Any] = {"kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64}
SIZES: dict[str, dict[str, Any]] = {
    "llama": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "mixtral": {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 192},
    "qwen3_moe": {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64, "moe_intermediate_size": 96},
    "deepseek_v2": {**_LATENT, "moe_intermediate_size": 96},
    "deepseek_v3": {**_LATENT, "moe_intermediate_size": 96},
}
LENGTHS = (33, 7, 18)


def config_for(case: str) -> NetworkConfig:
    return parse_network({**CASES[case], **_WIDE, **SIZES[case]}, case, "a test")


def passes(network: Network, ids: list[torch.Tensor]) -> list[torch.Tensor]:
    """Logits of a prefill, of a second chunk, and of two decode steps, on the CPU."""
    cache = KVCache.for_network(network, len(ids), 64, 16)
    cache.reset()
    ids = [row.to(network.device) for row in ids]
    lengths = [len(row) for row in ids]
    found = [network(prefill_batch(ids, cache), cache)]
    found.append(network(prefill_batch([row[:5] for row in ids], cache, lengths), cache))
    for step in range(2):
        tokens = torch.stack([row[step] for row in ids])
        found.append(network(decode_batch(tokens, cache, [n + 5 + step for n in lengths]), cache))
    return [logits.cpu() for logits in found]


def made(case: str, device: str, **options: Any) -> Network:
    config = config_for(case)
    return build_network(config, RandomTensors(config, CPU, 0), device=device, **options)


@torch.no_grad()
@pytest.mark.parametrize("attention", ["sdpa", "triton"])
@pytest.mark.parametrize("case", list(SIZES))
def test_half_precision_on_a_gpu_against_float32(case: str, attention: str) -> None:
    """In float16: bfloat16 would route some of these tokens to other experts."""
    draw = torch.Generator().manual_seed(1)
    ids = [torch.randint(0, 1000, (n,), generator=draw) for n in LENGTHS]
    wanted = passes(made(case, "cpu", quant="fp32", moe_backend="reference", attention_backend="reference"), ids)
    forms = [{}] if not case.startswith("deepseek") else [{}, {"mla_prefill": "absorbed"}, {"mla_decode": "expanded"}]
    for form in forms:
        network = made(case, "cuda", quant="fp16", moe_backend="triton", attention_backend=attention, **form)
        for got, want in zip(passes(network, ids), wanted, strict=True):
            assert float((got - want).norm() / want.norm()) < 0.05, form


@torch.no_grad()
@pytest.mark.parametrize("case", ["llama", "deepseek_v2"])
def test_a_decode_step_goes_into_a_graph(case: str) -> None:
    network = made(case, "cuda", moe_backend="triton", attention_backend="triton")
    cache = KVCache.for_network(network, 3, 64, 16)
    ids = torch.randint(0, 1000, (3, 20), generator=torch.Generator().manual_seed(2)).cuda()
    network(prefill_batch(ids, cache), cache)
    batch: Batch = decode_batch(ids[:, 0], cache, 20)
    for _ in range(2):
        wanted = network(batch, cache)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        network(batch, cache)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = network(batch, cache)
    captured.fill_(float("nan"))
    graph.replay()
    assert torch.equal(captured, wanted)
