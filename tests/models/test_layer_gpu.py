"""What must hold on a GPU: everything is there, and routings and inputs are the CPU's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from workbench.devices import DeviceInfo
from workbench.models.layer import load_layer_source
from workbench.modes import Quant, RoutingKind
from workbench.spec import RunSpec

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

GPU = DeviceInfo(type="cuda", name="gpu", torch_device="cuda:0")
MOE = {
    "model_type": "qwen3_moe",
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_experts": 16,
    "moe_intermediate_size": 64,
    "num_experts_per_tok": 4,
}


@pytest.mark.parametrize("kind", list(RoutingKind))
def test_routings_and_inputs_are_the_same_as_on_the_cpu(kind: RoutingKind, write_config: Any, cpu: DeviceInfo) -> None:
    spec = RunSpec(model=str(write_config("moe", **MOE)))
    there, here = load_layer_source(spec, GPU), load_layer_source(spec, cpu)
    assert torch.equal(there.hidden_states(9).cpu(), here.hidden_states(9))
    for a, b in zip(there.routings(kind, 9, 5), here.routings(kind, 9, 5), strict=True):
        assert a.topk_ids.device.type == "cuda"
        assert torch.equal(a.topk_ids.cpu(), b.topk_ids)
        assert torch.equal(a.topk_weights.cpu(), b.topk_weights)


def test_weights_are_built_with_one_expert_to_spare() -> None:
    source = load_layer_source(RunSpec(model="qwen3-30b-a3b"), GPU)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    weights = source.build_weights(Quant.BF16)
    expert = 3 * 2048 * 768 * 4
    assert torch.cuda.max_memory_allocated() - before <= weights.nbytes + 2 * expert
    assert torch.equal(weights.w1[5], source.expert(5)[0].to(torch.bfloat16))
