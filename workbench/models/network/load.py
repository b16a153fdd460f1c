"""From a spec to the network that it names, with a checkpoint's weights or random ones."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import NamedTuple

import torch

from workbench.devices import DeviceInfo
from workbench.errors import InvalidInput
from workbench.models.network.build import build_network
from workbench.models.network.check import check_tensors
from workbench.models.network.choose import Chosen, choose_network
from workbench.models.network.config import NETWORKS
from workbench.models.network.cut import CutTensors
from workbench.models.network.gguf_source import NEEDS_GGUF, GgufSource
from workbench.models.network.memory import StepMemory, free_host_bytes, spec_memory
from workbench.models.network.network import Network
from workbench.models.network.safetensors_source import SafetensorsSource
from workbench.models.network.stored import StoredTensors
from workbench.models.network.tensors import RandomTensors, TensorSource
from workbench.modes import ActivationScale, Fusion
from workbench.record import Scalar
from workbench.spec import RunSpec


class Loaded(NamedTuple):
    """A network, and what is to be said of it.

    Attributes:
        network: on its device.
        resolved: what the weights and the router are: keys `weights` and, with experts, `router`.
        notes: sentences to show beside a result.
    """

    network: Network
    resolved: dict[str, Scalar]
    notes: list[str]


class Opened(NamedTuple):
    """A source of tensors, and what is to be said of it: `weights` in few words, `notes` in sentences."""

    source: TensorSource
    weights: str
    notes: list[str]


def load_network(spec: RunSpec, device: DeviceInfo, progress: Callable[[str], None] | None = None) -> Loaded:
    """The network that a step runs, on `device`.

    A checkpoint is checked whole before any of it is read, and memory before any is allocated. A preset, and a
    config.json alone, get seeded random weights (`smollm2-135m` those of its GGUF file, where it is installed).

    Args:
        spec: of subject `step`.
        device: where it runs.
        progress: told a sentence at every layer, the first of them what memory is needed and free.

    Raises:
        InvalidInput: the model cannot be used or its checkpoint is not whole, what `choose_network` refuses, a static
            activation scale, or too little memory; one sentence says what and why.
    """
    tell = progress or (lambda _text: None)
    modes = spec.modes
    if modes.activation_scale is ActivationScale.STATIC:
        raise InvalidInput("activation_scale: static needs a run for calibration, which a step does not have")
    chosen = choose_network(spec)
    place = torch.device(device.torch_device)
    opened = open_tensors(chosen, place, spec.seed, given=spec.model)
    tell(check_memory(spec_memory(chosen.config, modes, spec.step_point), chosen.config.name, device))
    config = chosen.config
    network = build_network(
        config,
        opened.source,
        quant=modes.quant,
        group_size=modes.group_size,
        zero_points=modes.zero_points,
        moe_backend=modes.moe_backend,
        split_k=modes.split_k,
        reduction=modes.reduction,
        attention_backend=modes.attention_backend,
        mla_prefill=modes.mla_prefill,
        mla_decode=modes.mla_decode,
        fused=modes.fusion is Fusion.ON,
        device=place,
        progress=lambda done, total: tell(f"{config.name}: {done} of {total} layers"),
    )
    resolved: dict[str, Scalar] = {"weights": opened.weights}
    if config.moe is not None:
        own = "the model's gate" if isinstance(opened.source, StoredTensors) else f"random gate, seed {spec.seed}"
        resolved["router"] = own if config is chosen.dense else "all experts, weight 1"
    return Loaded(network, resolved, [*config.notes, *opened.notes])


def open_tensors(chosen: Chosen, device: torch.device, seed: int, *, given: str) -> Opened:
    """The source of a network's tensors, checked to hold what the network needs.

    Args:
        chosen: the network and its files.
        device: where tensors are given.
        seed: of random ones.
        given: the model's name as it was given.

    Raises:
        InvalidInput: as `load_network`.
    """
    files, dense = chosen.files, chosen.dense
    notes: list[str] = []
    source: TensorSource
    if files.gguf is not None and find_spec("gguf") is None:
        if given not in NETWORKS:
            raise InvalidInput(f"model: {NEEDS_GGUF}")
        notes.append(f"The checkpoint of {dense.name} is not used: {NEEDS_GGUF}.")
    elif files.folder is not None:
        if files.gguf is not None:
            stored: StoredTensors = GgufSource(files.gguf, files.config, device)
            weights = f"GGUF file {files.gguf.name} ({stored.kinds})"
        else:
            stored = SafetensorsSource(files.folder, files.config, device)
            weights = f"safetensors of {files.folder.name} ({stored.kinds})"
        check_tensors(stored, dense, files.config)
        if stored.quantized:
            notes.append("The checkpoint's own quantised weights are dequantised, then stored as asked.")
        source = stored
        return Opened(source if chosen.config is dense else CutTensors(source, chosen.config), weights, notes)
    notes.append(f"Weights are random, seed {seed}.")
    source = RandomTensors(dense, device, seed)
    if chosen.config is not dense:
        source = CutTensors(source, chosen.config)
    return Opened(source, f"random, seed {seed}", notes)


def check_memory(memory: StepMemory, name: str, device: DeviceInfo) -> str:
    """What is needed and free, in a sentence.

    Raises:
        InvalidInput: more is needed than is free.
    """
    free = free_bytes(device)
    sentence = memory.sentence(name, free, device.name)
    if free is not None and memory.total > free:
        raise InvalidInput(
            f"model: {sentence}; fewer layers (num_layers), a smaller format (quant) or batch_size is allowed"
        )
    return sentence


def free_bytes(device: DeviceInfo) -> int | None:
    """Memory of a device that this process can still have; None where it is not known."""
    if device.type != "cuda":
        return free_host_bytes()
    place = torch.device(device.torch_device)
    # What torch's allocator holds and does not use counts: it is given again.
    unused = torch.cuda.memory_reserved(place) - torch.cuda.memory_allocated(place)
    return int(torch.cuda.mem_get_info(place)[0]) + unused
