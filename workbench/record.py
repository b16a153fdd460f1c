"""`Record`: what one run gave. Nothing is stored as a number that was not measured. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from enum import StrEnum
from statistics import quantiles
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from workbench.errors import InvalidInput
from workbench.spec import Frozen, RunSpec
from workbench.step_record import STEP_METRICS as STEP_METRICS
from workbench.step_record import CaptureRow as CaptureRow
from workbench.step_record import ProfileRow as ProfileRow
from workbench.step_record import StepCheck as StepCheck

RECORD_VERSION = 1
Scalar = str | int | float | bool | None


class Status(StrEnum):
    """How a run ended. Metrics exist only with `ok` and with `unchecked` (imported from tools that check nothing)."""

    OK = "ok"
    UNCHECKED = "unchecked"
    INCORRECT = "incorrect"
    IMPLAUSIBLE = "implausible"
    UNSUPPORTED = "unsupported"
    SKIPPED = "skipped"
    COMPILE_ERROR = "compile_error"
    CAPTURE_ERROR = "capture_error"
    OUT_OF_MEMORY = "out_of_memory"
    RUNTIME_ERROR = "runtime_error"
    CRASHED = "crashed"
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"

    @property
    def measured(self) -> bool:
        """Whether a record of this status carries metrics."""
        return self in (Status.OK, Status.UNCHECKED)

    @property
    def final(self) -> bool:
        """Whether a resumed sweep leaves the point alone: it ran to an answer that another try would repeat."""
        return self not in (Status.CANCELLED, Status.CRASHED, Status.TIMED_OUT, Status.SKIPPED)


class Metric(Frozen):
    """One measured series. `p99` is given only from 100 samples up."""

    unit: str
    n: int = Field(ge=1)
    median: float
    p10: float
    p90: float
    p99: float | None = None
    samples: tuple[float, ...] = ()

    @classmethod
    def from_samples(cls, samples: Sequence[float], unit: str) -> Self:
        """Summarise at least one finite sample; percentiles interpolate linearly between order statistics."""
        if not samples:
            raise InvalidInput("samples: at least one is needed")
        cuts = quantiles(samples, n=100, method="inclusive") if len(samples) > 1 else [samples[0]] * 99
        return cls(
            unit=unit,
            n=len(samples),
            median=cuts[49],
            p10=cuts[9],
            p90=cuts[89],
            p99=cuts[98] if len(samples) >= 100 else None,
            samples=tuple(float(s) for s in samples),
        )


class Difference(Frozen):
    """How far `y` is from `x`, scale-aware; None where a value was not finite.

    Attributes:
        relative_l2: `|y - x| / |x|`.
        max_over_rms: largest absolute error over the root mean square of `x`.
        dissimilarity: `1 - 2<x,y> / (<x,x> + <y,y>)`.
    """

    relative_l2: float | None
    max_over_rms: float | None
    dissimilarity: float | None


class Correctness(Frozen):
    """The three-part answer to "is it right", each part against its own budget.

    Attributes:
        total: against the float64 oracle on the unquantised weights.
        kernel: against the float64 oracle on the dequantised weights; this decides `passed` together with `mode`.
        mode: compiled or graph-replayed against the eager run of the same callable; None where the run is eager.
        bitwise: whether a replay equalled eager bit for bit; None where no graph is used.
        kernel_budget, mode_budget: the largest `relative_l2` allowed.
        ratio: the larger of error over budget; above 1 is wrong. None where a value was not finite.
        routing_flips: tokens whose set of experts differs from the float64 router's; None where routing is given.
        rows_checked, rows: rows compared with the oracle, of all rows (all rows are checked for unwritten values).
        step: of a whole step alone; there `total` and `kernel` are about its logits.
        passed: the verdict. `reason`: why not, in one sentence.
    """

    total: Difference
    kernel: Difference
    mode: Difference | None = None
    bitwise: bool | None = None
    kernel_budget: float
    mode_budget: float | None = None
    ratio: float | None
    routing_flips: int | None = None
    rows_checked: int
    rows: int
    step: StepCheck | None = None
    passed: bool
    reason: str = ""


class Startup(Frozen):
    """Seconds before the first answer, apart: reading or making weights, compiling, capturing."""

    load_s: float | None = None
    compile_s: float | None = None
    capture_s: float | None = None
    compile_cache: Literal["cold", "warm", "none"] = "none"


class Memory(Frozen):
    """Device bytes: at rest with weights loaded, at peak while running, held by graphs, by weights, by the KV cache.

    On a CPU: resident bytes.
    """

    at_rest_bytes: int | None = None
    peak_bytes: int | None = None
    graph_bytes: int | None = None
    weight_bytes: int | None = None
    kv_cache_bytes: int | None = None


class Work(Frozen):
    """What a sample must do at least, and how close the run came, per sample from the experts it touched.

    Attributes:
        bytes, operations: medians over samples.
        distinct_experts: median number of experts touched.
        floor_us: median of the larger of bytes over the measured read rate and operations over the measured rate.
        floor_share: median of floor over latency, 1 is at the roof; None where roofs are unknown.
        bound: which of the two is larger.
        at_roof: faster than the measured roof, yet not than the datasheet's.
    """

    bytes: int
    operations: int
    distinct_experts: float
    floor_us: float | None = None
    floor_share: float | None = None
    bound: Literal["memory", "compute"] | None = None
    at_roof: bool = False


class Environment(Frozen):
    """Where a run happened. Two runs are comparable when `fingerprint` is equal."""

    device_type: Literal["cpu", "cuda"]
    device_name: str
    device_uuid: str | None = None
    capability: str | None = None
    memory_bytes: int | None = None
    driver: str | None = None
    clocks_mhz: dict[str, int] = Field(default_factory=dict)
    temperature_c: int | None = None
    python: str = ""
    torch: str = ""
    triton: str = ""
    workbench: str = ""
    commit: str | None = None
    host_os: str = ""
    cores: int | None = None
    roofs: dict[str, float] = Field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        """Device kind and library versions: what must match for a resumed sweep to keep a point."""
        return "|".join(
            (self.device_type, self.device_name, self.torch, self.triton, self.workbench, self.commit or "")
        )


class Record(Frozen):
    """The result of one `RunSpec`.

    `resolved` holds what was in force where that can differ from what was asked (device, backend, kernel config and its
    source, captured size, data kind). `metrics` of a layer hold `latency`; those of a step the names of `STEP_METRICS`.
    `captures` say what the graph of each batch size of a step cost, the largest first; `profile` says where a step's
    time goes, where that was asked for. `notes` are sentences to show beside the result.
    `extra` keeps fields of imported files that have no place here. Every string may come from a file and must be
    escaped before it becomes HTML.
    """

    version: Literal[1] = 1
    spec: RunSpec
    status: Status
    reason: str = ""
    detail: str = ""
    resolved: dict[str, Scalar] = Field(default_factory=dict)
    metrics: dict[str, Metric] = Field(default_factory=dict)
    startup: Startup = Startup()
    memory: Memory = Memory()
    work: Work | None = None
    correctness: Correctness | None = None
    captures: tuple[CaptureRow, ...] = ()
    profile: tuple[ProfileRow, ...] = ()
    environment: Environment
    command: str = ""
    created: str = ""
    anchor: bool = False
    source: str = "workbench"
    notes: tuple[str, ...] = ()
    extra: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _speed_only_where_checked(self) -> Self:
        if self.metrics and not self.status.measured:
            raise InvalidInput(f"metrics: must be empty where status is {self.status}")
        if self.status is Status.OK and not self.metrics:
            raise InvalidInput("metrics: must not be empty where status is ok")
        if not self.status.measured and not self.reason:
            raise InvalidInput(f"reason: must be given where status is {self.status}")
        return self

    @property
    def key(self) -> str:
        """The spec's key."""
        return self.spec.key

    @property
    def latency_us(self) -> float | None:
        """Median latency in microseconds: of a layer, or of one decode step (of the prefill where none is run).

        None where nothing was measured.
        """
        metric = self.latency
        return metric.median if metric else None

    @property
    def latency(self) -> Metric | None:
        """The series that `latency_us` is the median of."""
        return next((self.metrics[name] for name in ("latency", "decode", "prefill") if name in self.metrics), None)

    def median(self, name: str) -> float | None:
        """Median of the metric `name`; None where it was not measured."""
        metric = self.metrics.get(name)
        return metric.median if metric else None


def now() -> str:
    """The time, UTC, ISO 8601, to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")
