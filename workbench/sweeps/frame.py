"""Records as one flat table, built column by column."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from workbench.modes import Subject
from workbench.record import Correctness, Metric, Record, StepCheck, Work
from workbench.spec import FIELDS, OPTIONAL, STEP_FIELDS, WHOLE, RunSpec
from workbench.sweeps.store import no_collection

if TYPE_CHECKING:
    import pandas as pd

NAN = math.nan
TO_US = {"us": 1.0, "ms": 1e3, "s": 1e6, "ns": 1e-3}


def _number(value: float | None) -> float:
    return NAN if value is None else float(value)


def _metric(record: Record, read: Callable[[Metric], float | None], name: str = "") -> float:
    metric = record.metrics.get(name) if name else record.latency
    return NAN if metric is None else _number(read(metric)) * TO_US.get(metric.unit, NAN)


def _plain(record: Record, name: str) -> float:
    """Median of a metric that is no time."""
    return _number(record.median(name))


def _step(record: Record, read: Callable[[StepCheck], float | None]) -> float:
    check = record.correctness.step if record.correctness else None
    return NAN if check is None else _number(read(check))


def _correct(record: Record, read: Callable[[Correctness], float | None]) -> float:
    return NAN if record.correctness is None else _number(read(record.correctness))


def _resolved(record: Record, name: str) -> float:
    value = record.resolved.get(name)
    return float(value) if isinstance(value, int | float) else NAN


def _said(record: Record, name: str) -> str:
    value = record.resolved.get(name)
    return "" if value is None else str(value)


def _kernels(record: Record) -> float:
    """Kernels inside the graph that ran; where that is not known, none are told."""
    size = record.resolved.get("captured_size")
    return NAN if size is None else _number(next((c.kernels for c in record.captures if c.size == size), None))


def _work(record: Record, read: Callable[[Work], float | None]) -> float:
    return NAN if record.work is None else _number(read(record.work))


def _edge(name: str, end: str) -> Callable[[Record], float]:
    return lambda record: _metric(record, lambda metric: getattr(metric, end), name)


# Column -> value of one record. Numbers that are missing are NaN, never 0. `latency_us` of a step is that of one decode
# step (of the prefill, where none is run); `size` is what figures have along x.
COLUMNS: dict[str, Callable[[Record], Any]] = {
    "status": lambda r: str(r.status),
    "reason": lambda r: r.reason,
    "latency_us": lambda r: _metric(r, lambda m: m.median),
    "p10_us": lambda r: _metric(r, lambda m: m.p10),
    "p90_us": lambda r: _metric(r, lambda m: m.p90),
    "p99_us": lambda r: _metric(r, lambda m: m.p99),
    "size": lambda r: r.spec.size,
    "prefill_us": lambda r: _metric(r, lambda m: m.median, "prefill"),
    "decode_us": lambda r: _metric(r, lambda m: m.median, "decode"),
    "total_us": lambda r: _metric(r, lambda m: m.median, "total"),
    **{f"{name}_{end}_us": _edge(name, end) for name in ("prefill", "decode", "total") for end in ("p10", "p90")},
    "prefill_throughput": lambda r: _plain(r, "prefill_throughput"),
    "decode_throughput": lambda r: _plain(r, "decode_throughput"),
    "total_throughput": lambda r: _plain(r, "total_throughput"),
    "perplexity": lambda r: _plain(r, "perplexity"),
    "wall_us": lambda r: _metric(r, lambda m: m.median, "wall"),
    "wall_p10_us": lambda r: _metric(r, lambda m: m.p10, "wall"),
    "wall_p90_us": lambda r: _metric(r, lambda m: m.p90, "wall"),
    "total_error": lambda r: _correct(r, lambda c: c.total.relative_l2),
    "kernel_error": lambda r: _correct(r, lambda c: c.kernel.relative_l2),
    "kernel_budget": lambda r: _correct(r, lambda c: c.kernel_budget),
    "mode_error": lambda r: _correct(r, lambda c: c.mode.relative_l2 if c.mode else None),
    "mode_budget": lambda r: _correct(r, lambda c: c.mode_budget),
    "error_ratio": lambda r: _correct(r, lambda c: c.ratio),
    "logits_error": lambda r: _step(r, lambda s: s.logits_relative_l2),
    "top1_agreement": lambda r: _step(r, lambda s: s.top1_agreement),
    "kl": lambda r: _step(r, lambda s: s.kl),
    "first_bad_layer": lambda r: _step(r, lambda s: s.first_bad_layer),
    "worst_layer": lambda r: _step(r, lambda s: s.worst_layer),
    "worst_layer_error": lambda r: _step(r, lambda s: s.worst_error),
    "layer_budget": lambda r: _step(r, lambda s: s.budget),
    "step_routing_flips": lambda r: _step(r, lambda s: s.routing_flips),
    "trained_mlp_error": lambda r: _resolved(r, "trained_mlp_error"),
    "sparsity_error": lambda r: _resolved(r, "sparsity_error"),
    "distinct_outputs": lambda r: _resolved(r, "distinct_outputs"),
    "arithmetic": lambda r: _said(r, "arithmetic"),
    "split_k_in_force": lambda r: _said(r, "split_k"),
    "kernel_config_source": lambda r: _said(r, "kernel_config_source"),
    "fusion_in_force": lambda r: _said(r, "fusion"),
    "compile_in_force": lambda r: _said(r, "compile"),
    "graph_in_force": lambda r: _said(r, "graph"),
    "capture_error_mode": lambda r: _said(r, "capture_error_mode"),
    "captured_size": lambda r: _resolved(r, "captured_size"),
    "captures": lambda r: len(r.captures),
    "graph_kernels": _kernels,
    "graphs_compiled": lambda r: _resolved(r, "graphs_compiled"),
    "graph_breaks": lambda r: _resolved(r, "graph_breaks"),
    "recompiles": lambda r: _resolved(r, "recompiles"),
    "kernels_compiled": lambda r: _resolved(r, "kernels_compiled"),
    "load_s": lambda r: _number(r.startup.load_s),
    "compile_s": lambda r: _number(r.startup.compile_s),
    "compile_cache": lambda r: r.startup.compile_cache,
    "capture_s": lambda r: _number(r.startup.capture_s),
    "weight_bytes": lambda r: _number(r.memory.weight_bytes),
    "at_rest_bytes": lambda r: _number(r.memory.at_rest_bytes),
    "peak_bytes": lambda r: _number(r.memory.peak_bytes),
    "kv_cache_bytes": lambda r: _number(r.memory.kv_cache_bytes),
    "graph_bytes": lambda r: _number(r.memory.graph_bytes),
    "memory_bytes": lambda r: _number(r.environment.memory_bytes),
    "floor_us": lambda r: _work(r, lambda w: w.floor_us),
    "floor_share": lambda r: _work(r, lambda w: w.floor_share),
    "distinct_experts": lambda r: _work(r, lambda w: w.distinct_experts),
    "at_roof": lambda r: bool(r.work and r.work.at_roof),
    "device_name": lambda r: r.environment.device_name,
    "fingerprint": lambda r: r.environment.fingerprint,
    "source": lambda r: r.source,
    "created": lambda r: r.created,
    "anchor": lambda r: r.anchor,
    "key": lambda r: r.key,
}


def _field(name: str) -> Callable[[RunSpec], Any]:
    """Reads a field; None where the subject does not have it."""
    part = FIELDS[name]
    if part == "point":
        return lambda spec: getattr(spec.point, name, None)
    read: Callable[[RunSpec], Any] = attrgetter(f"{part}.{name}" if part else name)
    if name in STEP_FIELDS:
        return lambda spec: read(spec) if spec.subject is Subject.STEP else None
    return read


@no_collection()
def build_frame(records: Sequence[Record]) -> pd.DataFrame:
    """One row a record: every short field of its spec, then `COLUMNS`. Lengths in us and s, sizes in bytes.

    A field that the subject does not have is missing.
    """
    import pandas as pd

    specs = [record.spec for record in records]
    columns: dict[str, Any] = {}
    for name in FIELDS:
        read = _field(name)
        values = [read(spec) for spec in specs]
        if name in WHOLE:
            columns[name] = pd.array(values, dtype="Int64" if name in OPTIONAL or None in values else "int64")
        elif name in STEP_FIELDS or (values and isinstance(values[0], str)):
            columns[name] = pd.array([None if value is None else str(value) for value in values], dtype="str")
        else:
            columns[name] = values
    for name, get in COLUMNS.items():
        columns[name] = [get(record) for record in records]
    return pd.DataFrame(columns)
