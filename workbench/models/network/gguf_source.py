"""A GGUF file of the llama architecture as a source of tensors, by their Hugging Face names.

Package `gguf` dequantises. Its reader takes seconds over the vocabulary's strings, which are passed over here.
Shapes: N outputs, K inputs of a matrix.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

import torch

from workbench.errors import InvalidInput
from workbench.models.gguf_header import _string, _value
from workbench.models.network.names import EMBED, LM_HEAD, NORM
from workbench.models.network.shapes import NetworkConfig
from workbench.models.network.stored import StoredTensors

NEEDS_GGUF = "a GGUF file is read by package gguf, which is not installed; pip install 'moe-workbench[gguf]'"
_NAMES = {"token_embd.weight": EMBED, "output_norm.weight": NORM, "output.weight": LM_HEAD}
_PARTS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_IN_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_TURNED = re.compile(r"self_attn\.([qk])_proj\.")


@dataclass(frozen=True, slots=True)
class _Info:
    """Where a tensor is: its shape, its type's number, and its first byte counted from the file's."""

    shape: tuple[int, ...]
    kind: int
    start: int


class GgufSource(StoredTensors):
    """Tensors of a file, dequantised to float32 one at a time.

    The rows of queries and keys, which GGUF stores with turned pairs side by side, are put back as the hub has them.
    """

    def __init__(self, path: Path, config: NetworkConfig, device: torch.device | str) -> None:
        """Read the header.

        Raises:
            InvalidInput: package gguf is missing, or the file is none of GGUF version 2 or 3, or is cut short.
        """
        if find_spec("gguf") is None:
            raise InvalidInput(f"model: {NEEDS_GGUF}")
        self.path, self.label = path, str(path)
        self._config, self._device = config, torch.device(device)
        try:
            self._infos = {_hub_name(name): info for name, info in _infos(path).items()}
        except (OSError, ValueError, struct.error, IndexError, RecursionError) as error:
            raise InvalidInput(f"model: {path} cannot be read as a GGUF file ({error})") from None
        self.kinds = ", ".join(sorted({_kind(info.kind) for info in self._infos.values()}))
        self.quantized = any(_kind(info.kind) not in ("F32", "F16", "BF16") for info in self._infos.values())

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """See the base class; a name that the hub's models do not have stays as it is."""
        return {name: info.shape for name, info in self._infos.items()}

    def faults(self) -> Mapping[str, str]:
        """See the base class."""
        size = self.path.stat().st_size
        found = {}
        for name, info in self._infos.items():
            count = _bytes(info)
            if count is None:
                found[name] = f"is {_kind(info.kind)}, which package gguf does not read"
            elif info.start + count > size:
                found[name] = f"ends past the file's {size} bytes: it is cut short"
        return found

    def get(self, name: str) -> torch.Tensor:
        """See the base class."""
        import numpy as np
        from gguf.quants import dequantize

        info = self._infos[name]
        count = _bytes(info)
        if count is None:
            raise InvalidInput(f"model: {name} of {self.path} {self.faults()[name]}")
        data = np.fromfile(self.path, np.uint8, count, offset=info.start).reshape(*info.shape[:-1], -1)
        tensor = torch.from_numpy(np.ascontiguousarray(dequantize(data, _type(info.kind)), np.float32))
        tensor = self.finite(tensor.view(info.shape).to(self._device), name)
        turned = _TURNED.search(name)
        if turned is None:
            return tensor
        return hub_rows(tensor, self._config.num_heads if turned[1] == "q" else self._config.num_kv_heads)


def hub_rows(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of queries or keys in the hub's order: `[N, ...]`, N / heads rows to a head.

    GGUF has a turned pair's rows side by side, the hub half a head apart: a head's rows a0 b0 a1 b1 become a0 a1 b0 b1.
    """
    pairs = rows.unflatten(0, (heads, -1, 2))
    ordered: torch.Tensor = pairs.transpose(1, 2).flatten(0, 2).contiguous()
    return ordered


def _hub_name(name: str) -> str:
    match = _IN_LAYER.fullmatch(name)
    if match is None or match[2] not in _PARTS:
        return _NAMES.get(name, name)
    return f"model.layers.{match[1]}.{_PARTS[match[2]]}.{match[3]}"


def _infos(path: Path) -> dict[str, _Info]:
    """What the header says of every tensor. Sizes are stored innermost first, and turned about here."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[:4] != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        version, tensors, count = struct.unpack_from("<IQQ", data, 4)
        if version not in (2, 3):
            raise ValueError(f"its version is {version}, 2 and 3 are allowed")
        offset, alignment = 24, 32
        for _ in range(count):
            key, offset = _string(data, offset)
            (kind,) = struct.unpack_from("<I", data, offset)
            value, offset = _value(data, offset + 4, kind)
            if key == "general.alignment" and isinstance(value, int) and value > 0:
                alignment = value
        stored = []
        for _ in range(tensors):
            name, offset = _string(data, offset)
            (dims,) = struct.unpack_from("<I", data, offset)
            sizes = struct.unpack_from(f"<{dims}Q", data, offset + 4)
            kind, place = struct.unpack_from("<IQ", data, offset + 4 + 8 * dims)
            offset += 16 + 8 * dims
            stored.append((name, tuple(reversed(sizes)), kind, place))
    first = -(-offset // alignment) * alignment
    return {name: _Info(shape, kind, first + place) for name, shape, kind, place in stored}


def _type(kind: int) -> Any:
    from gguf.constants import GGMLQuantizationType

    return GGMLQuantizationType(kind)


def _kind(kind: int) -> str:
    try:
        return str(_type(kind).name)
    except ValueError:
        return f"type {kind}"


def _bytes(info: _Info) -> int | None:
    """Bytes that a tensor takes in the file; None where package gguf cannot dequantise its type."""
    from gguf.constants import GGML_QUANT_SIZES
    from gguf.quants import _type_traits

    try:
        kind = _type(info.kind)
    except ValueError:
        return None
    if kind.name not in ("F32", "F16") and kind not in _type_traits:
        return None
    block, size = GGML_QUANT_SIZES[kind]
    return prod(info.shape) // block * size if info.shape and info.shape[-1] % block == 0 else None
