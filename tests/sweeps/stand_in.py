"""A stand-in engine and random specs and records, for the tests of sweeps, reports and the command line."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Event
from typing import Any

from hypothesis import strategies as st

from workbench.modes import (
    BACKENDS,
    GROUP_SIZES,
    L2,
    ActivationScale,
    Cache,
    Compile,
    Graph,
    Quant,
    Reduction,
    RoutingKind,
)
from workbench.record import (
    Correctness,
    Difference,
    Environment,
    Memory,
    Metric,
    Record,
    Startup,
    Status,
    Work,
    now,
)
from workbench.spec import RunSpec
from workbench.support import Reason

HERE = Environment(device_type="cpu", device_name="Stand-in 9000", torch="2.13.0", python="3.11", cores=2)
THERE = HERE.model_copy(update={"torch": "2.12.0"})
NASTY = '<script>alert("x")</script> | `b` **c** [d](javascript:e) @someone &amp; \u202e</td>'


def ok_record(spec: RunSpec, latency: float, environment: Environment = HERE, **more: Any) -> Record:
    """A record of a point that was measured: 11 samples within 1 % of `latency` (us)."""
    samples = [latency * (1 + (i - 5) / 500) for i in range(11)]
    small = Difference(relative_l2=1e-3, max_over_rms=1e-2, dissimilarity=1e-6)
    return Record(
        spec=spec,
        status=Status.OK,
        metrics={"latency": Metric.from_samples(samples, "us")},
        startup=Startup(load_s=0.1, compile_s=None if spec.modes.compile == "none" else 4.25),
        memory=Memory(weight_bytes=1 << 20),
        work=Work(bytes=1 << 20, operations=1 << 22, distinct_experts=2.0, floor_us=latency / 3, floor_share=1 / 3),
        correctness=Correctness(
            total=small, kernel=small, kernel_budget=4e-3, ratio=0.25, rows_checked=4, rows=4, passed=True
        ),
        environment=environment,
        command=spec.command,
        created=now(),
        **more,
    )


def failed_record(spec: RunSpec, status: Status, reason: str = "it broke", environment: Environment = HERE) -> Record:
    """A record of a point that gave nothing."""
    return Record(spec=spec, status=status, reason=reason, environment=environment, created=now())


def cost(spec: RunSpec) -> float:
    """Microseconds that depend on the modes and tokens alone."""
    factor = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.5}.get(spec.modes.quant, 1.0)
    return (10.0 + spec.point.num_tokens) * factor / (1.0 if spec.modes.moe_backend == "reference" else 1.5)


class StandIn:
    """An engine without a device. `answer(spec)` may give a record, raise, or give None for the usual latency."""

    def __init__(
        self,
        answer: Callable[[RunSpec], Record | None] = lambda spec: None,
        delay_s: float = 0.0,
        environment: Environment = HERE,
    ) -> None:
        self.answer, self.delay_s, self._environment = answer, delay_s, environment
        self.ran: list[RunSpec] = []
        self.stopped = self.closed = 0

    @property
    def environment(self) -> Environment:
        return self._environment

    def run(
        self, spec: RunSpec, *, progress: Callable[[str, str], None] | None = None, stop: Event | None = None
    ) -> Record:
        self.ran.append(spec)
        if progress:
            progress("measuring", "timing")
        time.sleep(self.delay_s)
        if stop is not None and stop.is_set():
            return failed_record(spec, Status.CANCELLED, "stopped", self._environment)
        return self.answer(spec) or ok_record(spec, cost(spec), self._environment)

    def request_stop(self) -> None:
        self.stopped += 1

    def close(self) -> None:
        self.closed += 1


def no_graphs(spec: RunSpec, device: object) -> list[Reason]:
    """Stands for `find_reasons`: only graphs cannot run."""
    return [Reason("graph", "graph full needs a GPU.")] if spec.modes.graph == Graph.FULL else []


names = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), min_size=1, max_size=12).filter(
    lambda text: text == text.strip()
)
finite = st.floats(allow_nan=False, allow_infinity=False)
seconds = st.floats(min_value=1e-3, max_value=86_400)
FIELD_VALUES: dict[str, st.SearchStrategy[Any]] = {
    "model": st.one_of(st.just("smollm2-135m"), names),
    "experts": st.one_of(st.none(), st.integers(1, 64)),
    "top_k": st.one_of(st.none(), st.integers(1, 8)),
    "tp_size": st.integers(1, 8),
    "seed": st.integers(0, 2**31 - 1),
    "quant": st.sampled_from([str(v) for v in Quant]),
    "group_size": st.sampled_from(GROUP_SIZES),
    "zero_points": st.booleans(),
    "activation_scale": st.sampled_from([str(v) for v in ActivationScale]),
    "split_k": st.one_of(st.none(), st.integers(1, 64)),
    "reduction": st.sampled_from([str(v) for v in Reduction]),
    "routing": st.sampled_from([str(v) for v in RoutingKind]),
    "zipf_exponent": st.floats(min_value=0.01, max_value=10),
    "moe_backend": st.one_of(st.sampled_from(BACKENDS), names),
    "compile": st.sampled_from([str(v) for v in Compile]),
    "dynamic": st.booleans(),
    "graph": st.sampled_from([str(v) for v in Graph]),
    "cache": st.sampled_from([str(v) for v in Cache]),
    "l2": st.sampled_from([str(v) for v in L2]),
    "samples": st.integers(1, 100_000),
    "num_tokens": st.integers(1, 2**20),
}
specs = st.fixed_dictionaries(
    {}, optional={**FIELD_VALUES, "device": st.sampled_from(["auto", "cpu", "cuda", "cuda:3"]), "timeout_s": seconds}
).map(RunSpec.from_flat)


@st.composite
def axes(draw: st.DrawFn) -> dict[str, list[Any]]:
    """Valid axes, in any order."""
    chosen = draw(st.lists(st.sampled_from(sorted(FIELD_VALUES)), unique=True, max_size=4))
    found = {}
    for name in chosen:
        values = draw(st.lists(FIELD_VALUES[name], min_size=1, max_size=3, unique=True))
        found[name] = sorted(values) if name == "num_tokens" else values
    return found


differences = st.builds(
    Difference, relative_l2=st.none() | finite, max_over_rms=st.none() | finite, dissimilarity=st.none() | finite
)
metrics = st.builds(Metric.from_samples, st.lists(st.floats(1e-3, 1e9), min_size=1, max_size=5), st.just("us"))


@st.composite
def records(draw: st.DrawFn) -> Record:
    """Records of every status, with numbers at full precision and any text in their strings."""
    status = draw(st.sampled_from(Status))
    texts = st.text(st.characters(codec="utf-8"), max_size=20)
    return Record(
        spec=draw(specs),
        status=status,
        reason=draw(texts.filter(bool)) if not status.measured else draw(texts),
        metrics={"latency": draw(metrics)} if status.measured else {},
        resolved=draw(
            st.dictionaries(texts, st.one_of(st.none(), st.booleans(), st.integers(), finite, texts), max_size=2)
        ),
        correctness=draw(
            st.none()
            | st.builds(
                Correctness,
                total=differences,
                kernel=differences,
                mode=st.none() | differences,
                kernel_budget=finite,
                ratio=st.none() | finite,
                rows_checked=st.integers(0, 9),
                rows=st.integers(0, 9),
                passed=st.booleans(),
            )
        ),
        startup=Startup(load_s=draw(st.none() | finite)),
        environment=draw(st.sampled_from([HERE, THERE])),
        created=draw(texts),
        anchor=draw(st.booleans()),
        notes=tuple(draw(st.lists(texts, max_size=2))),
    )
