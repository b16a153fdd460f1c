"""What a worker keeps between points: the layer's source, its weights in one format, compiled code, known truths."""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable

import torch
from moe_kernels import ExpertWeights

from workbench.check.truth import TruthCache
from workbench.devices import DeviceInfo
from workbench.engines.step_session import NetworkSlot
from workbench.models.layer import LayerSource, load_layer_source
from workbench.models.network.load import Loaded
from workbench.modes import Compile
from workbench.record import Environment
from workbench.runtime.compile import compile_layer
from workbench.runtime.inputs import LayerFunction
from workbench.spec import RunSpec


class PointSession:
    """State of one worker; `poisoned` says why it can run no more, empty where it can."""

    def __init__(self, device: DeviceInfo, environment: Environment) -> None:
        self.device = device
        self.torch_device = torch.device(device.torch_device)
        self.environment = environment
        self.truths = TruthCache()
        self.poisoned = ""
        self._source: tuple[Hashable, LayerSource] | None = None
        self._weights: tuple[Hashable, ExpertWeights] | None = None
        self._compiled: tuple[Hashable, LayerFunction] | None = None
        self._network = NetworkSlot()

    def source_key(self, spec: RunSpec) -> Hashable:
        """What a layer's source depends on."""
        return (spec.model, spec.experts, spec.top_k, spec.tp_size, spec.seed)

    def source(self, spec: RunSpec) -> LayerSource:
        """The layer that `spec` names; another one takes the place of the one before."""
        key = self.source_key(spec)
        if self._source is None or self._source[0] != key:
            self.drop()
            self._source = (key, load_layer_source(spec, self.device))
        return self._source[1]

    def network(self, spec: RunSpec, progress: Callable[[str], None]) -> Loaded:
        """The network that a step's `spec` names, with its backends in force; it takes the place of a layer."""
        return self._network.find(spec, self.device, progress, self.drop)

    def weights_key(self, spec: RunSpec) -> Hashable:
        """What the weights of one source depend on."""
        modes = spec.modes
        return (modes.quant, modes.group_size, modes.zero_points, modes.activation_scale)

    def weights(self, spec: RunSpec, source: LayerSource) -> ExpertWeights:
        """The source's weights in the format asked for.

        Another format is dropped first: memory at rest is then that of this run and no other.
        """
        key, modes = self.weights_key(spec), spec.modes
        if self._weights is None or self._weights[0] != key:
            if self._weights is not None:
                self._weights = None
                self.drop_compiled()
                release_memory(self.torch_device)
            weights = source.build_weights(
                modes.quant,
                group_size=modes.group_size,
                zero_points=modes.zero_points,
                activation_scale=modes.activation_scale,
            )
            self._weights = (key, weights)
        return self._weights[1]

    def _compiled_key(self, spec: RunSpec) -> Hashable:
        modes = spec.modes
        tokens = None if modes.dynamic or modes.compile is Compile.NONE else spec.num_tokens
        how = (modes.moe_backend, modes.split_k, modes.reduction, modes.compile, modes.dynamic)
        return (self.source_key(spec), self.weights_key(spec), how, tokens)

    def has_compiled(self, spec: RunSpec) -> bool:
        """Whether `compiled` would give code that an earlier point left."""
        return self._compiled is not None and self._compiled[0] == self._compiled_key(spec)

    def compiled(self, spec: RunSpec, function: LayerFunction) -> LayerFunction:
        """`function` compiled as `spec` asks: kept while the modes stay, and the size too where it is compiled in."""
        key = self._compiled_key(spec)
        if self._compiled is None or self._compiled[0] != key:
            self.drop_compiled()
            self._compiled = (key, compile_layer(function, spec.modes.compile, dynamic=spec.modes.dynamic))
        return self._compiled[1]

    def drop_compiled(self) -> None:
        """Forget compiled code: its graphs hold weights and memory pools."""
        self._compiled = None
        torch._dynamo.reset()

    def drop(self) -> None:
        """Forget everything that holds device memory."""
        self._source = None
        self._weights = None
        self._network.drop()
        self.drop_compiled()
        release_memory(self.torch_device)


def release_memory(device: torch.device) -> None:
    """Collect garbage and give cached device memory back."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def used_bytes(device: torch.device) -> int | None:
    """Bytes in use: allocated on a GPU, resident on a CPU; None where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    return _status("VmRSS")


def reset_peak(device: torch.device) -> None:
    """Begin a new peak."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        with open("/proc/self/clear_refs", "w", encoding="utf-8") as file:
            file.write("5")
    except OSError:  # some containers forbid it: the peak is then that of the whole process
        return


def peak_bytes(device: torch.device) -> int | None:
    """Most bytes in use since `reset_peak`."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return _status("VmHWM")


def _status(name: str) -> int | None:
    try:
        with open("/proc/self/status", encoding="utf-8") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name + ":"))
    except (OSError, StopIteration, ValueError):
        return None
