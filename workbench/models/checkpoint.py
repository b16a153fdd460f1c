"""A dense checkpoint's middle MLP and the hidden states that real text sends into it; a sparse one's correction bias.

Only local files are read, never the network and never pickle.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from workbench.devices import package_version
from workbench.errors import InvalidInput
from workbench.models.cache import Captured, read_cache, write_cache
from workbench.models.locate import ModelFiles
from workbench.models.shapes import PRESETS

WINDOW = 1024
MAX_ROWS = 4096
TEXT = "pydoc_data.topics"
_BIAS = re.compile(r"\blayers\.(\d+)\.(?:.*\.)?e_score_correction_bias$")


class TrainedBias(NamedTuple):
    """A gate's correction bias as it was trained.

    Attributes:
        values: float32 `[E]` on the CPU.
        layer: whose gate it is.
    """

    values: torch.Tensor
    layer: int


def trained_bias(files: ModelFiles) -> TrainedBias | None:
    """The correction bias of the middle one of the layers that have one; None where `gate_weights` hold none.

    Raises:
        InvalidInput: a file cannot be read, or the bias is not one finite number per expert.
    """
    found: dict[int, tuple[Path, str]] = {}
    try:
        for path in files.gate_weights:
            with safe_open(str(path), framework="pt") as file:
                found |= {int(match[1]): (path, key) for key in file.keys() if (match := _BIAS.search(key))}  # noqa: SIM118
        if not found:
            return None
        layer = sorted(found)[len(found) // 2]
        path, key = found[layer]
        with safe_open(str(path), framework="pt") as file:
            values = file.get_tensor(key).to(torch.float32)
    except (OSError, SafetensorError) as error:
        raise InvalidInput(f"model: {path} cannot be read as a safetensors file ({_short(error)})") from error
    if values.shape != (files.config.num_experts,) or not bool(torch.isfinite(values).all()):
        raise InvalidInput(
            f"model: {key} in {path} must be {files.config.num_experts} finite numbers, one per expert; "
            f"it is {list(values.shape)}"
        )
    return TrainedBias(values, layer)


class _Reached(Exception):
    """Ends a forward pass at the MLP whose input is wanted."""


def topics_text() -> str:
    """The standard library's help topics, joined in the order of their names: English and code, with every Python."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def captured_layer(model: str, files: ModelFiles, rows: int) -> tuple[Captured | None, tuple[str, ...]]:
    """The MLP and at least `rows` hidden states (at most `MAX_ROWS`, in whole windows) of a dense model, and notes.

    Read from the cache where that holds enough of the same files and text; else captured, and kept there. Where the
    machine has no file of a preset, what the cache holds is used as it is.

    Returns:
        None where the weights are nowhere on this machine; the notes then say so.

    Raises:
        InvalidInput: the checkpoint cannot be read, or its MLP is of another kind; the sentence says why.
    """
    config = files.config
    identity = model if model in PRESETS else files.identity
    cached = read_cache(identity) if model in PRESETS or files.weights else None
    if cached is not None and not cached.fits(config.hidden_size, config.channels):
        cached = None
    if not files.weights:
        if cached is not None:
            return cached, ()
        return None, (
            f"No weights of {config.name} on this machine: weights and inputs are random, in the same shape.",
        )
    text = topics_text()
    fingerprint = f"{files.fingerprint}|{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    wanted = min(-(-rows // WINDOW) * WINDOW, MAX_ROWS)
    if cached is not None and cached.fingerprint == fingerprint and cached.rows >= wanted:
        return cached, ()
    missing = [
        name for name in ("transformers", *(("gguf", "accelerate") if files.gguf else ())) if find_spec(name) is None
    ]
    if missing:
        need = f"reading it needs {' and '.join(missing)}"
        if model not in PRESETS:
            raise InvalidInput(f"model: {model} cannot be read here, {need}; a config.json is allowed")
        if cached is not None:
            return cached, (f"The checkpoint of {model} cannot be read, {need}: an older cut of it is used.",)
        return None, (
            f"The checkpoint of {model} cannot be read, {need}: weights and inputs are random, in the same shape.",
        )
    captured = capture(files, text, wanted, fingerprint)
    if not captured.fits(config.hidden_size, config.channels):
        raise InvalidInput(
            f"model: the MLP of {config.name} is not the {config.hidden_size} x {config.channels} "
            "that its configuration says"
        )
    problem = write_cache(identity, captured)
    return captured, (f"Not cached: {problem}.",) if problem else ()


def capture(files: ModelFiles, text: str, rows: int, fingerprint: str) -> Captured:
    """Load the first half of a checkpoint and run `text` into the MLP of layer `num_layers // 2`.

    The text goes through in windows of `WINDOW` tokens (fewer where the model's context is shorter), each from
    position 0. Always on the CPU in float32, so that every device is given the same numbers.
    """
    layer = files.config.num_layers // 2
    with _quiet():
        model, tokenizer = _load(files, layer)
        ids = _tokens(tokenizer, text, rows)
    mlp = _mlp(model, layer, files.config.name)
    weights = {
        name: getattr(mlp, f"{name}_proj").weight.detach().to(torch.float32).clone() for name in ("gate", "up", "down")
    }
    window = min(WINDOW, int(getattr(model.config, "max_position_embeddings", None) or WINDOW))
    found: list[torch.Tensor] = []

    def keep(_module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        found.append(args[0].detach().to(torch.float32)[0].clone())
        raise _Reached

    handle = mlp.register_forward_pre_hook(keep)
    try:
        with torch.no_grad():
            for start in range(0, min(rows, len(ids)), window):
                try:
                    model(input_ids=torch.tensor([ids[start : start + window]]), use_cache=False)
                except _Reached:
                    continue
                raise InvalidInput(f"model: the MLP of layer {layer} of {files.config.name} is never called")
    finally:
        handle.remove()
    if not found:
        raise InvalidInput(f"model: the tokenizer of {files.config.name} gives no tokens")
    hidden = torch.cat(found)[:rows]
    if not bool(torch.isfinite(hidden).all()):
        raise InvalidInput(f"model: the hidden states of {files.config.name} are not finite")
    return Captured(**weights, hidden=hidden, layer=layer, fingerprint=fingerprint)


def _tokens(tokenizer: Any, text: str, rows: int) -> list[int]:
    """The first tokens of `text`, at least `rows` of them where it is long enough.

    Only as much text as needed is tokenised, and enough more that the cut changes none of the first `rows` tokens.
    """
    length = 16 * rows
    while True:
        ids: list[int] = tokenizer(text[:length], add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) >= rows + 64 or length >= len(text):
            return ids
        length *= 2


def _load(files: ModelFiles, layer: int) -> tuple[Any, Any]:
    """The model's first `layer + 1` layers without its head, and its tokenizer, by transformers."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    if files.gguf:
        options["gguf_file"] = files.gguf
    folder = str(files.folder)
    name = files.config.name
    try:
        config = AutoConfig.from_pretrained(folder, **options)
        config.num_hidden_layers = layer + 1
        if isinstance(getattr(config, "layer_types", None), list):
            config.layer_types = config.layer_types[: layer + 1]
        tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    except Exception as error:
        raise InvalidInput(
            f"model: {name} has no configuration and tokenizer that transformers {_version()} can read "
            f"({_short(error)})"
        ) from error
    if files.gguf is None:
        options["use_safetensors"] = True
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32, **options)
    except Exception as error:
        raise InvalidInput(f"model: {name} cannot be loaded by transformers {_version()} ({_short(error)})") from error
    return model.base_model.eval(), tokenizer


def _mlp(model: Any, layer: int, name: str) -> torch.nn.Module:
    """The gated MLP of one layer, checked to be the one that experts can be cut from."""
    mlp = getattr(getattr(model, "layers", [None] * (layer + 1))[layer], "mlp", None)
    parts = [getattr(mlp, f"{part}_proj", None) for part in ("gate", "up", "down")]
    if not isinstance(mlp, torch.nn.Module) or not all(isinstance(part, torch.nn.Linear) for part in parts):
        raise InvalidInput(
            f"model: layer {layer} of {name} has no mlp with gate_proj, up_proj and down_proj; "
            "a dense Llama-like checkpoint is allowed"
        )
    if any(getattr(part, "bias", None) is not None for part in parts):
        raise InvalidInput(
            f"model: the MLP of {name} has biases, which experts here do not have; a checkpoint without them is allowed"
        )
    activation = getattr(model.config, "hidden_act", None) or getattr(model.config, "hidden_activation", None)
    if activation not in ("silu", "swish"):
        raise InvalidInput(f"model: the MLP of {name} is activated by {activation}; experts here use silu")
    return mlp


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bars and remarks about the layers left out, and as before afterwards."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with redirect_stderr(StringIO()):  # the GGUF converter draws a bar of its own that nothing switches off
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _version() -> str:
    return package_version("transformers")


def _short(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text if len(text) <= 200 else text[:197] + '...'}"
