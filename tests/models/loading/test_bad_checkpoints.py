"""Checkpoints that are not whole: everything that is wrong is said at once, and nothing of them is loaded."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from load_cases import INDEX, fp8_checkpoint, loaded, read, save, tensors_of, write
from network_cases import CASES, CPU, config_of
from safetensors.torch import load_file, save_file

from workbench.errors import InvalidInput
from workbench.models.network.check import listed
from workbench.models.network.safetensors_source import SafetensorsSource

EXPERT = "model.layers.1.mlp.experts.{}.{}_proj.weight"
UP = "model.layers.1.self_attn.q_a_proj.weight"


@pytest.fixture
def values_are_read() -> None:
    """Marks the tests in which values are wrong, not what the headers say."""


@pytest.fixture(autouse=True)
def nothing_is_loaded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "values_are_read" in request.fixturenames:
        return

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(SafetensorsSource, "_read", refuse)
    monkeypatch.setattr("workbench.models.network.load.build_network", refuse)


def sentence(folder: Path | str, **values: Any) -> str:
    with pytest.raises(InvalidInput) as caught:
        loaded(folder, **values)
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith("model: ")
    return text


def test_missing_extra_and_misshapen_tensors_are_all_listed(tmp_path: Path) -> None:
    tensors = tensors_of("deepseek_v3")
    for name in (EXPERT.format(3, "up"), "model.norm.weight"):
        del tensors[name]
    tensors["model.layers.0.mlp.experts.0.up_proj.weight"] = torch.ones(3, 3)  # the first layer is dense
    tensors["lm_head.bias"] = torch.ones(101)
    tensors[EXPERT.format(5, "down")] = torch.ones(19, 64)  # transposed
    tensors["model.embed_tokens.weight"] = torch.ones(100, 64)
    text = sentence(write(tmp_path, "deepseek_v3", tensors))
    assert "are not those of " in text
    assert str(tmp_path) in text
    missing, extra, misshapen = re.split("; ", text.split(": ", 2)[2], maxsplit=2)
    assert missing == f"missing 2: {EXPERT.format(3, 'up')}, model.norm.weight"
    assert extra.startswith("not of this model 2: ")
    assert "lm_head.bias" in extra
    assert "model.layers.0.mlp.experts.0.up_proj.weight" in extra
    assert f"{EXPERT.format(5, 'down')} ([19, 64], must be [64, 19])" in misshapen
    assert "model.embed_tokens.weight ([100, 64], must be [101, 64])" in misshapen


def test_a_whole_layer_that_is_missing_is_told_in_few_words(tmp_path: Path) -> None:
    tensors = {name: t for name, t in tensors_of("deepseek_v3").items() if ".layers.2.mlp.experts." not in name}
    text = sentence(write(tmp_path, "deepseek_v3", tensors))
    assert "missing 36: " in text
    for part in ("gate", "up", "down"):
        assert f"model.layers.2.mlp.experts.{{0..11}}.{part}_proj.weight" in text
    assert len(text) < 500


def test_patterns_stand_for_exactly_what_they_say() -> None:
    names = [f"layers.{i}.experts.{j}.w" for i in range(3) for j in (0, 1, 2, 5, 7, 8, 9, 10, 11)]
    names.remove("layers.1.experts.5.w")
    assert listed(names) == ["layers.{0, 2}.experts.{0..2, 5, 7..11}.w", "layers.1.experts.{0..2, 7..11}.w"]
    assert listed(names[:3]) == names[:3]


@pytest.mark.usefixtures("values_are_read")
def test_layers_that_are_not_run_may_be_missing_and_may_not_be_wrong(tmp_path: Path) -> None:
    """Someone who keeps two layers need not have the other two; what is there must still be this model."""
    tensors = tensors_of("qwen2_moe")
    del tensors["model.layers.3.mlp.up_proj.weight"]
    folder = write(tmp_path, "qwen2_moe", tensors)
    assert len(loaded(folder, num_layers=1).network.layers) == 2
    assert "missing 1: model.layers.3.mlp.up_proj.weight" in sentence(folder)
    write(folder, "qwen2_moe", {**tensors, "model.layers.3.mlp.up_proj.weight": torch.ones(1)})
    text = sentence(folder, num_layers=1)
    assert "of another shape 1: model.layers.3.mlp.up_proj.weight ([1], must be [37, 56])" in text


def _cut(folder: Path) -> str:
    path = sorted(folder.glob("*.safetensors"))[1]
    path.write_bytes(path.read_bytes()[:-9])
    return rf"{path.name} cannot be read \(.+\)$"


def _cut_in_its_header(folder: Path) -> str:
    path = sorted(folder.glob("*.safetensors"))[0]
    path.write_bytes(path.read_bytes()[:20])
    return rf"{path.name} cannot be read \(.+\)$"


def _two_gone(folder: Path) -> str:
    first, _, last = sorted(folder.glob("*.safetensors"))[:3]
    first.unlink()
    last.write_bytes(b"")
    return rf"{first.name} is missing; {last.name} cannot be read \(.+\)$"


def _all_gone(folder: Path) -> str:
    for path in folder.glob("*.safetensors"):
        path.unlink()
    return r"-00001-of-\d+\.safetensors is missing; .* is missing$"


def _names_an_absent_file(folder: Path) -> str:
    data = json.loads((folder / INDEX).read_text())
    data["weight_map"]["model.norm.weight"] = "model-00009-of-00009.safetensors"
    (folder / INDEX).write_text(json.dumps(data))
    return r"of the safetensors files of .*, model-00009-of-00009.safetensors is missing$"


def _names_a_file_elsewhere(folder: Path) -> str:
    data = json.loads((folder / INDEX).read_text())
    data["weight_map"]["model.norm.weight"] = "../secret.safetensors"
    (folder / INDEX).write_text(json.dumps(data))
    return r"must name safetensors files beside it; it names \.\./secret\.safetensors$"


def _no_json(folder: Path) -> str:
    (folder / INDEX).write_text("{")
    return r"model.safetensors.index.json cannot be read as an index"


def _no_map(folder: Path) -> str:
    (folder / INDEX).write_text("[]")
    return r"model.safetensors.index.json cannot be read as an index"


def _no_index(folder: Path) -> str:
    (folder / INDEX).unlink()
    first, second = sorted(folder.glob("*.safetensors"))[:2]
    held = load_file(second)
    save_file({**held, "model.norm.weight": torch.ones(41)}, first, metadata={"format": "pt"})
    name = min(held)
    return rf"{re.escape(name)} is in {first.name} and {second.name} of .*, and no index says which counts$"


@pytest.mark.parametrize(
    "damage",
    [_cut, _cut_in_its_header, _two_gone, _all_gone, _names_an_absent_file, _names_a_file_elsewhere, _no_json, _no_map,
     _no_index],
)  # fmt: skip
def test_damaged_files_are_named(damage: Callable[[Path], str], tmp_path: Path) -> None:
    save("qwen3_moe", tmp_path, shard="30KB")
    pattern = damage(tmp_path)
    assert re.search(pattern, sentence(tmp_path)), sentence(tmp_path)


def test_an_unsupported_architecture_is_named_with_those_that_are(tmp_path: Path) -> None:
    write(tmp_path, "llama", {"a": torch.ones(1)}, model_type="mamba2")
    text = sentence(tmp_path)
    assert "mamba2" in text
    for name in ("llama", "mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3"):
        assert name in text


def _fp8(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """A checkpoint in blocks of 16 x 24 with something changed in it."""
    fp8_checkpoint("deepseek_v3", folder, (16, 24))
    tensors = read(folder)
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_scales_that_are_missing_or_misshapen_are_all_listed(tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[f"{UP}_scale_inv"]
        name = EXPERT.format(7, "down")  # [64, 19]: 4 x 1 blocks
        tensors[f"{name}_scale_inv"] = torch.ones(1, 4)
        tensors["model.layers.9.mlp.up_proj.weight_scale_inv"] = torch.ones(1, 1)
        tensors["model.layers.0.mlp.up_proj.weight"] = torch.ones(45, 64)
        tensors["model.layers.0.mlp.gate_proj.weight_scale_inv"] = torch.ones(3, 3, dtype=torch.int32)

    text = sentence(_fp8(tmp_path, change))
    assert "not readable" in text
    assert f"{UP}_scale_inv (is missing, must be [2, 3])" in text
    assert f"{EXPERT.format(7, 'down')}_scale_inv (is [1, 4], must be [4, 1])" in text
    assert "model.layers.0.mlp.up_proj.weight_scale_inv (stands beside a matrix of F32, which has no scales)" in text
    assert "model.layers.0.mlp.gate_proj.weight_scale_inv (is I32; F32, BF16 or F16 is allowed)" in text


def test_a_scale_without_a_matrix_is_named(tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.1.mlp.up_proj.weight_scale_inv"] = torch.ones(1, 1)

    assert "model.layers.1.mlp.up_proj.weight_scale_inv (has no matrix beside it)" in sentence(_fp8(tmp_path, change))


@pytest.mark.usefixtures("values_are_read")
@pytest.mark.parametrize(("value", "word"), [(0.0, "0"), (float("nan"), "nan"), (float("inf"), "inf"), (-1.0, "-1")])
def test_a_scale_that_is_no_scale_names_its_tensor(value: float, word: str, tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{UP}_scale_inv"][1, 2] = value

    text = sentence(_fp8(tmp_path, change))
    assert text.startswith(f"model: every weight_scale_inv of {UP} of ")
    assert text.endswith(f" must be finite and above 0; that of block [1, 2] is {word}")


@pytest.mark.usefixtures("values_are_read")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_a_value_that_is_not_finite_names_its_tensor(dtype: torch.dtype, tmp_path: Path) -> None:
    name = UP if dtype == torch.float8_e4m3fn else "model.norm.weight"

    def change(tensors: dict[str, torch.Tensor]) -> None:
        values = tensors[name].float()
        values.view(-1)[3] = float("nan")
        tensors[name] = values.to(dtype)

    assert re.search(rf"every value of {re.escape(name)} of .* must be finite", sentence(_fp8(tmp_path, change)))


def test_number_formats_that_are_not_read_are_named(tmp_path: Path) -> None:
    tensors = tensors_of("qwen3_moe")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)
    matrix = "model.layers.0.mlp.up_proj.weight"
    tensors[matrix] = tensors[matrix].to(torch.float8_e4m3fn)
    text = sentence(write(tmp_path, "qwen3_moe", tensors))
    assert "model.norm.weight (is I8; F32, BF16 or F16, or fp8 in blocks as DeepSeek ships it, is allowed)" in text
    assert f"{matrix} (is F8_E4M3, and quantization_config in config.json says no weight_block_size)" in text


@pytest.mark.parametrize(
    ("how", "pattern"),
    [
        ({"quant_method": "gptq", "bits": 4}, "the quantisation of .*, gptq, is not read; .*fp8 in blocks"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "the quantisation of .*, fp8, is not read"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size of .* must be two whole numbers"),
        ({"quant_method": "fp8"}, r"weight_block_size of .* must be two whole numbers.* not None"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, r"not \[0, 128\]"),
        ("awq", "the quantisation of .*, awq, is not read"),
    ],
)
def test_quantisations_that_are_not_read_are_named(how: object, pattern: str, tmp_path: Path) -> None:
    folder = write(tmp_path, "qwen3_moe", tensors_of("qwen3_moe"), quantization_config=how)
    assert re.search(pattern, sentence(folder))


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CASES["llama"]))
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert "pickled weights (pytorch_model.bin), which are never read" in sentence(tmp_path)


def test_asking_for_a_tensor_that_is_not_there(tmp_path: Path) -> None:
    source = SafetensorsSource(write(tmp_path, "llama", tensors_of("llama")), config_of("llama"), CPU)
    with pytest.raises(KeyError, match="lm_head"):
        source.get("lm_head.weight")
