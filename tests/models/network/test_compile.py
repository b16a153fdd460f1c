"""A pass is one graph: no host reads a value, and no shape depends on one."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from network_cases import config_of, random_tensors

from workbench.models.network import attention, mla
from workbench.models.network.batch import decode_batch, prefill_batch
from workbench.models.network.build import build_network
from workbench.runtime.kv_cache import KVCache


def plain_prefill(
    q_SHD: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, *, scale: float, **_: Any
) -> torch.Tensor:
    """Stands in for the attention of a prefill, which on a CPU reads lengths on the host."""
    group, rows = q_SHD.shape[1] // k.shape[1], torch.arange(q_SHD.shape[0])
    sequence = torch.searchsorted(cu_seqlens, rows, right=True)
    seen = (sequence[:, None] == sequence) & (rows[:, None] >= rows)
    scores = torch.einsum("qhd,khd->hqk", q_SHD, k.repeat_interleave(group, 1)) * scale
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(group, 1))


@torch.no_grad()
@pytest.mark.parametrize("case", ["qwen2_moe", "deepseek_v3"])
def test_a_pass_traces_whole_and_gives_the_same(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced, the reference experts run every expert on every row."""
    for module in (attention, mla):
        monkeypatch.setattr(module, "prefill_attention", plain_prefill)
    config = config_of(case, num_hidden_layers=2)
    network = build_network(
        config, random_tensors(config), quant="fp32", moe_backend="reference", attention_backend="sdpa"
    )
    cache = KVCache.for_network(network, 2, 12, 3)
    cache.reset()
    ids = torch.randint(0, 101, (2, 7), generator=torch.Generator().manual_seed(6))
    seen: list[str] = []

    def listed(graph: torch.fx.GraphModule, _inputs: object) -> Callable[..., object]:
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    torch.compiler.reset()
    traced = torch.compile(network, fullgraph=True, backend=listed)
    for batch in (prefill_batch(ids, cache), decode_batch(ids[:, 0], cache, 7)):
        torch.testing.assert_close(traced(batch, cache), network(batch, cache), rtol=1e-4, atol=1e-5)
    assert len(seen) > 100
    assert not [name for name in seen if re.search(r"\bitem\b|tolist|nonzero|unique|scalar_dense", name)]
