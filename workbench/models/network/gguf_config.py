"""A GGUF file's header as a network's numbers. No torch here."""

from __future__ import annotations

import mmap
import struct
from functools import lru_cache
from pathlib import Path

from workbench.errors import InvalidInput
from workbench.models.gguf_header import Value, _string, _value
from workbench.models.network.parse import parse_network
from workbench.models.network.shapes import NetworkConfig

_KEYS = {
    "vocab_size": "vocab_size",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}


def read_gguf_network(path: Path, name: str) -> NetworkConfig:
    """The dense Llama-like network that a GGUF file holds.

    Raises:
        InvalidInput: not a GGUF file of version 2 or 3, cut short, of another architecture, or with what is not read.
    """
    try:
        stat = path.stat()
        fields, tensors = _header(path, stat.st_size, stat.st_mtime_ns)
    except (OSError, ValueError, struct.error, IndexError, RecursionError) as error:
        raise InvalidInput(f"model: {path} cannot be read as a GGUF file ({error})") from None
    family = fields.get("general.architecture")
    if family != "llama":
        raise InvalidInput(f"model: {path} is of architecture {family}; of GGUF files llama alone is supported")
    if fields.get("llama.expert_count"):
        raise InvalidInput(f"model: {path} has experts; of GGUF files dense ones alone are supported")
    scaling = fields.get("llama.rope.scaling.type")
    if scaling not in (None, "none") or "rope_freqs.weight" in tensors:
        raise InvalidInput(f"model: {path} scales its rotary embedding, which is not read from GGUF files")
    data = {key: fields[f"llama.{stored}"] for stored, key in _KEYS.items() if f"llama.{stored}" in fields}
    turned = fields.get("llama.rope.dimension_count")
    parsed = parse_network(
        {"model_type": "llama", "tie_word_embeddings": "output.weight" not in tensors, **data},
        name,
        f"GGUF file {path.name}",
    )
    if turned not in (None, parsed.head_dim):
        raise InvalidInput(
            f"model: {path} turns {turned} of the {parsed.head_dim} dimensions of a head; all of them are allowed"
        )
    return parsed


@lru_cache(maxsize=8)
def _header(path: Path, size: int, mtime_ns: int) -> tuple[dict[str, Value], frozenset[str]]:
    """Scalars and strings by key (arrays are None), and the tensors' names. `size` and `mtime_ns` key the cache."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[:4] != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        version, tensors, count = struct.unpack_from("<IQQ", data, 4)
        if version not in (2, 3):
            raise ValueError(f"its version is {version}, 2 and 3 are allowed")
        fields: dict[str, Value] = {}
        offset = 24
        for _ in range(count):
            key, offset = _string(data, offset)
            (kind,) = struct.unpack_from("<I", data, offset)
            fields[key], offset = _value(data, offset + 4, kind)
        names = set()
        for _ in range(tensors):
            name, offset = _string(data, offset)
            names.add(name)
            (dims,) = struct.unpack_from("<I", data, offset)
            offset += 4 + 8 * dims + 4 + 8  # dimensions, type, place in the file
        return fields, frozenset(names)
