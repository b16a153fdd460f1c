"""How long points may take: rough rates first, corrected by what has been measured. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from workbench.arithmetic import expert_bytes
from workbench.devices import DeviceInfo
from workbench.models.network.shapes import NetworkConfig
from workbench.models.shapes import ModelShape, model_shape
from workbench.modes import Cache, Compile, Graph, Quant, Subject
from workbench.spec import DEFAULTS, SIZE_FIELD, RunSpec
from workbench.step_support import step_network
from workbench.sweeps.step_estimate import capture_seconds, compile_seconds, run_seconds

# Rough seconds and rates, to size a sweep before anything is known; one measured point corrects them.
COMPILE_S = {
    "cpu": {Compile.DEFAULT: 6.0, Compile.REDUCE_OVERHEAD: 8.0},
    "cuda": {Compile.DEFAULT: 6.0, Compile.REDUCE_OVERHEAD: 8.0},
}
AUTOTUNE_S = 20.0
CAPTURE_S = 0.3
START_S = 6.0  # the worker: torch's import, the device's context
POINT_S = {"cpu": 0.15, "cuda": 0.3}  # warm-up and check of the smallest point
LOAD_RATE = {"cpu": 60e6, "cuda": 2e9}  # weights a second, made or read
OPS_RATE = {"cpu": 30e9, "cuda": 50e12}
# Against fp32. Quantised formats are unpacked expert by expert before they are multiplied.
SLOW_ON_CPU = dict.fromkeys(Quant, 5.0) | {Quant.FP32: 1.0, Quant.BF16: 4.0, Quant.FP16: 4.0}
READ_RATE = {"cpu": 8e9, "cuda": 1.5e12}
CHECKED_RUNS = 6.0  # runs of the layer for warm-up and the check, the float64 oracle's rows among them
CHECKED_STEPS = 4.0  # a step's warm-up, and its layers upcast one by one
PRIOR_S = 3.0  # how much measured time outweighs the rough rates


def built(spec: RunSpec) -> ModelShape | NetworkConfig:
    """The shape of what `spec` builds. Raises `InvalidInput` where nothing can be built."""
    return step_network(spec) if spec.subject is Subject.STEP else model_shape(spec)


def _shape(spec: RunSpec) -> ModelShape | NetworkConfig | None:
    try:
        return built(spec)
    except ValueError:
        return None


def _seconds(spec: RunSpec, shape: ModelShape | NetworkConfig, device: DeviceInfo) -> float:
    """Rough seconds of everything that is run at one point."""
    if isinstance(shape, ModelShape):
        return (spec.samples + CHECKED_RUNS) * sample_seconds(spec, shape, device)
    slow = SLOW_ON_CPU[spec.modes.quant] if device.type == "cpu" else 1.0
    rates = {"operations_rate": OPS_RATE[device.type] / slow, "read_rate": READ_RATE[device.type]}
    prefill, decode = run_seconds(spec, shape, device.type, **rates)
    steps = spec.step_point.output_len - 1
    return spec.samples * prefill + max(spec.samples, steps) * decode * bool(steps) + CHECKED_STEPS * (prefill + decode)


def sample_seconds(spec: RunSpec, shape: ModelShape, device: DeviceInfo) -> float:
    """Rough seconds of one call of the layer."""
    kind = device.type
    tokens = spec.num_tokens
    operations = 6.0 * tokens * shape.top_k * shape.hidden_size * shape.intermediate_size
    modes = spec.modes
    each = expert_bytes(
        modes.quant,
        shape.hidden_size,
        shape.intermediate_size,
        group_size=modes.group_size,
        zero_points=modes.zero_points,
    )
    read = min(shape.num_experts, tokens * shape.top_k) * each
    slow = SLOW_ON_CPU[modes.quant] if kind == "cpu" else 1.0
    return operations * slow / OPS_RATE[kind] + read / READ_RATE[kind] + 50e-6


def subject_of(spec: RunSpec) -> tuple[object, ...]:
    """What a built layer or network depends on."""
    modes = spec.modes
    how = (modes.quant, modes.group_size, modes.zero_points, modes.activation_scale, modes.fusion)
    return (spec.subject, spec.model, spec.experts, spec.top_k, spec.num_layers, spec.tp_size, spec.seed, how)


def modes_of(spec: RunSpec) -> RunSpec:
    """The spec with its number of tokens (of a step: its batch) set aside: equal for points of one set of modes."""
    name = SIZE_FIELD[spec.subject]
    return spec.model_copy(update={"point": spec.point.model_copy(update={name: DEFAULTS[spec.subject][name]})})


def compile_key(spec: RunSpec) -> object:
    """Points with an equal key share compiled code: all token counts with `dynamic`, else each its own."""
    return modes_of(spec) if spec.modes.dynamic else spec


def estimate(specs: Sequence[RunSpec], device: DeviceInfo) -> list[float]:
    """Rough seconds of each point, in this order: a subject is built and code compiled where it is first met."""
    seconds: list[float] = []
    shapes: dict[tuple[object, ...], ModelShape | NetworkConfig | None] = {}
    subject: tuple[object, ...] | None = None
    compiled: set[object] = set()
    for spec in specs:
        known = (spec.subject, spec.model, spec.experts, spec.top_k, spec.num_layers, spec.tp_size)
        if known not in shapes:
            shapes[known] = _shape(spec)
        shape = shapes[known]
        total = POINT_S[device.type] + (0.0 if seconds else START_S)
        if shape is not None:
            total += _seconds(spec, shape, device)
            if subject != subject_of(spec):
                weights = shape.parameters if isinstance(shape, ModelShape) else shape.parameters()
                total += weights / LOAD_RATE[device.type]
        subject = subject_of(spec)
        mode_s = COMPILE_S[device.type].get(spec.modes.compile, AUTOTUNE_S)
        if spec.modes.compile is not Compile.NONE:
            key = compile_key(spec)
            if key not in compiled or spec.cache is Cache.COLD:
                total += (
                    compile_seconds(spec, shape, device.type, mode_s) if isinstance(shape, NetworkConfig) else mode_s
                )
            compiled.add(key)
        if isinstance(shape, NetworkConfig):
            total += capture_seconds(spec, shape)
        else:
            total += CAPTURE_S if spec.modes.graph is Graph.FULL else 0.0
        seconds.append(total)
    return seconds


@dataclass(slots=True)
class Clock:
    """Seconds left of a sweep: rough estimates, scaled by how measured points compared with theirs."""

    estimates: list[float]
    done_estimated: float = 0.0
    done_measured: float = 0.0
    _left: float = field(init=False)

    def __post_init__(self) -> None:
        self._left = sum(self.estimates)

    def observe(self, index: int, seconds: float) -> None:
        """Point `index` took `seconds`."""
        self.done_estimated += self.estimates[index]
        self.done_measured += seconds
        self.skip(index)

    def skip(self, index: int) -> None:
        """Point `index` will not be run."""
        self._left = max(0.0, self._left - self.estimates[index])
        self.estimates[index] = 0.0

    @property
    def remaining_s(self) -> float:
        """Seconds that the points not yet run may take."""
        return self._left * (self.done_measured + PRIOR_S) / (self.done_estimated + PRIOR_S)
