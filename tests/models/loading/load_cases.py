"""Small checkpoints on disk, and the text that transformers makes of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from network_cases import CASES, config_of, oracle, random_tensors
from safetensors.torch import load_file, save_file

from workbench.devices import DeviceInfo
from workbench.models.network.batch import prefill_batch
from workbench.models.network.load import Loaded, load_network
from workbench.models.network.network import Network
from workbench.models.network.tensors import TensorSource
from workbench.runtime.kv_cache import KVCache
from workbench.spec import RunSpec

CPU_DEVICE = DeviceInfo(type="cpu", name="cpu", torch_device="cpu")
INDEX = "model.safetensors.index.json"
PROMPTS = [[5, 77, 3, 19, 88, 42], [100, 1, 64], [7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17]]


def spec_of(folder: Path | str, **values: Any) -> RunSpec:
    """A short step in float32; fields by their short names."""
    plain = {"quant": "fp32", "batch_size": 1, "input_len": 16, "output_len": 2}
    return RunSpec.from_flat({"subject": "step", "model": str(folder), **plain, **values})


def loaded(folder: Path | str, **values: Any) -> Loaded:
    return load_network(spec_of(folder, **values), CPU_DEVICE)


def save(case: str, folder: Path, dtype: torch.dtype = torch.float32, shard: str = "5GB") -> torch.nn.Module:
    """Write a case of `network_cases` as transformers saves it; gives transformers' model of it in float32."""
    model = oracle(case, Given({name: tensor.to(dtype) for name, tensor in tensors_of(case).items()}))
    # A copy: converted, a model's rotary frequencies are rounded too.
    deepcopy(model).to(dtype).save_pretrained(folder, max_shard_size=shard)
    return model


def write(folder: Path, case: str, tensors: Mapping[str, torch.Tensor], **changes: Any) -> Path:
    """Write tensors as one file, with the config.json of a case."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CASES[case], **changes}), encoding="utf-8")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def read(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def tensors_of(case: str) -> dict[str, torch.Tensor]:
    """All tensors of a case by the hub's names."""
    source = random_tensors(config_of(case))
    return {name: source.get(name) for name in source.names()}


@torch.no_grad()
def rows_of(network: Network, ids: list[int]) -> torch.Tensor:
    """Logits after every token of one sequence."""
    cache = KVCache.for_network(network, 1, len(ids), 4)
    return network.logits(network.hidden_states(prefill_batch([torch.tensor(ids)], cache), cache))


@torch.no_grad()
def difference(network: Network, model: torch.nn.Module, ids: list[int] | None = None) -> float:
    """Largest difference to transformers' logits, in units of what these deviate by."""
    ids = PROMPTS[2] if ids is None else ids
    wanted = model(input_ids=torch.tensor([ids])).logits[0]
    return float((rows_of(network, ids) - wanted).abs().max() / wanted.square().mean().sqrt())


@torch.no_grad()
def greedy(model: torch.nn.Module, prompt: list[int], count: int) -> list[int]:
    """The likeliest next token, again and again, every time from the whole text."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def in_blocks(tensor_NK: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 values and their scales as DeepSeek ships them: the largest number of a block becomes 448."""
    rows, columns = tensor_NK.shape
    data = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    scale = torch.empty(-(-rows // block[0]), -(-columns // block[1]))
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            at = (slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1]))
            scale[i, j] = tensor_NK[at].abs().max() / 448
            data[at] = (tensor_NK[at] / scale[i, j]).to(torch.float8_e4m3fn)
    return data, scale


def out_of_blocks(data_NK: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Float64, element by element: value times the scale at (row // rows, column // columns)."""
    rows, columns = (torch.arange(size) // width for size, width in zip(data_NK.shape, block, strict=True))
    return data_NK.double() * scale.double()[rows[:, None], columns[None, :]]


def fp8_checkpoint(
    case: str, folder: Path, block: tuple[int, int], scale_dtype: torch.dtype = torch.float32
) -> tuple[Path, dict[str, torch.Tensor]]:
    """A case with every projection in blocks of fp8; gives the values too that it stands for, in float32."""
    stored, values = {}, {}
    for name, tensor in tensors_of(case).items():
        if not name.endswith(("proj.weight", "proj_with_mqa.weight")):
            stored[name] = values[name] = tensor
            continue
        data, scale = in_blocks(tensor, block)
        stored[name], stored[f"{name}_scale_inv"] = data, scale.to(scale_dtype)
        values[name] = out_of_blocks(data, scale.to(scale_dtype), block).float()
    how = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(block)}
    return write(folder, case, stored, quantization_config=how), values


class Given(TensorSource):
    """Tensors that a test has in hand."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = dict(tensors)

    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def get(self, name: str) -> torch.Tensor:
        return self._tensors[name]
