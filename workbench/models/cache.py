"""Where a checkpoint's MLP and hidden states are kept between runs: safetensors files, written whole or not at all."""

from __future__ import annotations

import hashlib
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from platformdirs import user_cache_path
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

FORMAT = "moe-workbench checkpoint cut 1"
_NAMES = ("gate", "up", "down", "hidden")


@dataclass(frozen=True, kw_only=True, eq=False)
class Captured:
    """A dense layer's MLP and the hidden states that reach it, float32 on the CPU.

    Attributes:
        gate, up: `[channels, D]`.
        down: `[D, channels]`.
        hidden: `[rows, D]`.
        layer: index of the layer.
        fingerprint: of the files and the text that these came from.
    """

    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    hidden: torch.Tensor
    layer: int
    fingerprint: str

    @property
    def rows(self) -> int:
        """Captured rows of hidden states."""
        return self.hidden.shape[0]

    def fits(self, hidden_size: int, channels: int) -> bool:
        """Whether every tensor has the shape that the model's configuration asks for."""
        return (
            self.gate.shape == self.up.shape == (channels, hidden_size)
            and self.down.shape == (hidden_size, channels)
            and self.hidden.dim() == 2
            and self.hidden.shape[1] == hidden_size
            and self.rows > 0
            and all(getattr(self, name).dtype == torch.float32 for name in _NAMES)
        )


def cache_folder() -> Path:
    """`$MOE_WORKBENCH_CACHE`, else the user's cache folder (`~/.cache/moe-workbench` on Linux)."""
    own = os.environ.get("MOE_WORKBENCH_CACHE")
    return Path(own).expanduser() if own else user_cache_path("moe-workbench", appauthor=False)


def cache_file(identity: str) -> Path:
    """The file for a model: its readable name and a hash of the whole."""
    readable = re.sub(r"[^A-Za-z0-9.-]+", "-", identity)[-40:].strip("-.")
    return cache_folder() / f"{readable}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}.safetensors"


def read_cache(identity: str) -> Captured | None:
    """What is kept for a model; None where there is nothing, or nothing whole: another format, a bad digest."""
    try:
        with safe_open(str(cache_file(identity)), framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT or set(file.keys()) != set(_NAMES):
                return None
            tensors = {name: file.get_tensor(name) for name in _NAMES}
        layer = int(metadata.get("layer", ""))
    except (OSError, SafetensorError, ValueError):
        return None
    if metadata.get("digest") != _digest(tensors):
        return None
    return Captured(**tensors, layer=layer, fingerprint=metadata.get("fingerprint", ""))


def write_cache(identity: str, captured: Captured) -> str | None:
    """Keep `captured`. Returns None, or why it could not be kept: the run goes on without."""
    path = cache_file(identity)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    tensors = {name: getattr(captured, name).contiguous() for name in _NAMES}
    metadata = {
        "format": FORMAT,
        "layer": str(captured.layer),
        "fingerprint": captured.fingerprint,
        "digest": _digest(tensors),
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, str(part), metadata=metadata)
        os.replace(part, path)
    except (OSError, SafetensorError) as error:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        return f"the checkpoint's tensors could not be kept in {path.parent} ({error})"
    return None


def _digest(tensors: dict[str, torch.Tensor]) -> str:
    """Hash of the tensors' bytes: the format itself holds none, and a flipped bit would pass for a weight."""
    digest = hashlib.sha256()
    for name in _NAMES:
        digest.update(tensors[name].contiguous().numpy().data)
    return digest.hexdigest()
