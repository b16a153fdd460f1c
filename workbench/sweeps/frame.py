"""Records as one flat table, built column by column."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from workbench.record import Correctness, Metric, Record, Work
from workbench.spec import FIELDS, OPTIONAL, RunSpec
from workbench.sweeps.store import no_collection

if TYPE_CHECKING:
    import pandas as pd

NAN = math.nan
TO_US = {"us": 1.0, "ms": 1e3, "s": 1e6, "ns": 1e-3}
WHOLE = ("experts", "top_k", "tp_size", "group_size", "split_k", "seed", "samples", "num_tokens")
MAYBE = OPTIONAL


def _number(value: float | None) -> float:
    return NAN if value is None else float(value)


def _metric(record: Record, read: Callable[[Metric], float | None], name: str = "latency") -> float:
    metric = record.metrics.get(name)
    return NAN if metric is None else _number(read(metric)) * TO_US.get(metric.unit, NAN)


def _correct(record: Record, read: Callable[[Correctness], float | None]) -> float:
    return NAN if record.correctness is None else _number(read(record.correctness))


def _resolved(record: Record, name: str) -> float:
    value = record.resolved.get(name)
    return float(value) if isinstance(value, int | float) else NAN


def _said(record: Record, name: str) -> str:
    value = record.resolved.get(name)
    return "" if value is None else str(value)


def _work(record: Record, read: Callable[[Work], float | None]) -> float:
    return NAN if record.work is None else _number(read(record.work))


# Column -> value of one record. Numbers that are missing are NaN, never 0.
COLUMNS: dict[str, Callable[[Record], Any]] = {
    "status": lambda r: str(r.status),
    "reason": lambda r: r.reason,
    "latency_us": lambda r: _metric(r, lambda m: m.median),
    "p10_us": lambda r: _metric(r, lambda m: m.p10),
    "p90_us": lambda r: _metric(r, lambda m: m.p90),
    "p99_us": lambda r: _metric(r, lambda m: m.p99),
    "wall_us": lambda r: _metric(r, lambda m: m.median, "wall"),
    "wall_p10_us": lambda r: _metric(r, lambda m: m.p10, "wall"),
    "wall_p90_us": lambda r: _metric(r, lambda m: m.p90, "wall"),
    "total_error": lambda r: _correct(r, lambda c: c.total.relative_l2),
    "kernel_error": lambda r: _correct(r, lambda c: c.kernel.relative_l2),
    "kernel_budget": lambda r: _correct(r, lambda c: c.kernel_budget),
    "mode_error": lambda r: _correct(r, lambda c: c.mode.relative_l2 if c.mode else None),
    "mode_budget": lambda r: _correct(r, lambda c: c.mode_budget),
    "error_ratio": lambda r: _correct(r, lambda c: c.ratio),
    "trained_mlp_error": lambda r: _resolved(r, "trained_mlp_error"),
    "sparsity_error": lambda r: _resolved(r, "sparsity_error"),
    "distinct_outputs": lambda r: _resolved(r, "distinct_outputs"),
    "arithmetic": lambda r: _said(r, "arithmetic"),
    "split_k_in_force": lambda r: _said(r, "split_k"),
    "kernel_config_source": lambda r: _said(r, "kernel_config_source"),
    "load_s": lambda r: _number(r.startup.load_s),
    "compile_s": lambda r: _number(r.startup.compile_s),
    "capture_s": lambda r: _number(r.startup.capture_s),
    "weight_bytes": lambda r: _number(r.memory.weight_bytes),
    "at_rest_bytes": lambda r: _number(r.memory.at_rest_bytes),
    "peak_bytes": lambda r: _number(r.memory.peak_bytes),
    "graph_bytes": lambda r: _number(r.memory.graph_bytes),
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
    part = FIELDS[name]
    return (lambda spec: getattr(getattr(spec, part), name)) if part else (lambda spec: getattr(spec, name))


@no_collection()
def build_frame(records: Sequence[Record]) -> pd.DataFrame:
    """One row a record: every short field of its spec, then `COLUMNS`. Lengths in us and s, sizes in bytes."""
    import pandas as pd

    specs = [record.spec for record in records]
    columns: dict[str, Any] = {}
    for name in FIELDS:
        read = _field(name)
        values = [read(spec) for spec in specs]
        if name in WHOLE:
            columns[name] = pd.array(values, dtype="Int64" if name in MAYBE else "int64")
        elif values and isinstance(values[0], str):
            columns[name] = pd.array([str(value) for value in values], dtype="str")
        else:
            columns[name] = values
    for name, get in COLUMNS.items():
        columns[name] = [get(record) for record in records]
    return pd.DataFrame(columns)
