"""The few numbers of a GGUF file's header that give a layer's shape. No torch here.

Package `gguf` reads the header too, but takes seconds over the vocabulary's strings, which this skips; a shape is asked
for at every toggle. Weights and tokenizer are read by `transformers` (see `checkpoint.py`).
"""

from __future__ import annotations

import mmap
import struct
from functools import lru_cache
from pathlib import Path

from workbench.errors import InvalidInput
from workbench.models.shapes import LayerConfig

_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
Value = int | float | bool | str | None


def read_gguf(path: Path, name: str) -> LayerConfig:
    """The dense MLP that a GGUF file holds.

    Raises:
        InvalidInput: not a GGUF file of version 2 or 3, cut short, or a Mixture-of-Experts checkpoint.
    """
    try:
        stat = path.stat()
        fields = _fields(path, stat.st_size, stat.st_mtime_ns)
    except (OSError, ValueError, struct.error, IndexError, RecursionError) as error:
        raise InvalidInput(f"model: {path} cannot be read as a GGUF file ({error})") from None
    family = fields.get("general.architecture")
    experts = fields.get(f"{family}.expert_count")
    if isinstance(experts, int) and experts > 1:
        raise InvalidInput(
            f"model: {path} is a Mixture-of-Experts checkpoint ({experts} experts), whose weights are not read; "
            "the model's config.json is allowed and gives its shape with random weights"
        )
    sizes = {}
    for key in ("embedding_length", "feed_forward_length", "block_count"):
        value = fields.get(f"{family}.{key}")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InvalidInput(
                f"model: {path} has no single {family}.{key} in its header; a dense Llama-like checkpoint is allowed"
            )
        sizes[key] = value
    return LayerConfig(
        name=name,
        hidden_size=sizes["embedding_length"],
        channels=sizes["feed_forward_length"],
        num_experts=None,
        top_k=None,
        renormalize=False,
        num_layers=sizes["block_count"],
        source=f"GGUF file {path.name}, its dense MLP cut into experts",
    )


@lru_cache(maxsize=8)
def _fields(path: Path, size: int, mtime_ns: int) -> dict[str, Value]:
    """Scalars and strings of the header by key; arrays are skipped (None). `size` and `mtime_ns` key the cache."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[:4] != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        version, _tensors, count = struct.unpack_from("<IQQ", data, 4)
        if version not in (2, 3):
            raise ValueError(f"its version is {version}, 2 and 3 are allowed")
        fields: dict[str, Value] = {}
        offset = 24
        for _ in range(count):
            key, offset = _string(data, offset)
            (kind,) = struct.unpack_from("<I", data, offset)
            fields[key], offset = _value(data, offset + 4, kind)
        return fields


def _value(data: mmap.mmap, offset: int, kind: int) -> tuple[Value, int]:
    if kind == _STRING:
        return _string(data, offset)
    if kind == _ARRAY:
        item, count = struct.unpack_from("<IQ", data, offset)
        offset += 12
        if item in _FORMATS:
            return None, offset + count * struct.calcsize("<" + _FORMATS[item])
        for _ in range(count):
            if item == _STRING:
                offset += 8 + struct.unpack_from("<Q", data, offset)[0]
            else:
                _, offset = _value(data, offset, item)
        return None, offset
    if kind not in _FORMATS:
        raise ValueError(f"unknown value type {kind}")
    (value,) = struct.unpack_from("<" + _FORMATS[kind], data, offset)
    return value, offset + struct.calcsize("<" + _FORMATS[kind])


def _string(data: mmap.mmap, offset: int) -> tuple[str, int]:
    (length,) = struct.unpack_from("<Q", data, offset)
    if length > len(data):
        raise ValueError("a string runs past its end")
    end = offset + 8 + length
    return data[offset + 8 : end].decode("utf-8", "replace"), end
