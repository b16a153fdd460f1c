"""The table that every report shows, as plain text; markup is made, and strings escaped, where it is written out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from workbench.modes import Subject
from workbench.plots.select import of_steps, subjects
from workbench.plots.style import UNSAID, told
from workbench.record import Record, Status
from workbench.report.compare import default_baseline, speedups
from workbench.spec import FIELDS
from workbench.sweeps.results import Results
from workbench.sweeps.spec import AXES
from workbench.units import microseconds

FROM_IDLE = "from idle"
IDLE_WORDS = "median time from an idle device, host launches included"
DECODE, PREFILL = "decode step", "prefill"
SHARED = (
    "model",
    "experts",
    "top_k",
    "num_layers",
    "tp_size",
    "quant",
    "group_size",
    "zero_points",
    "activation_scale",
    "routing",
    "moe_backend",
    "split_k",
    "reduction",
    "attention_backend",
    "mla_prefill",
    "mla_decode",
    "fusion",
    "compile",
    "compile_scope",
    "max_compile_batch",
    "graph",
    "max_capture_batch",
    "input_len",
    "output_len",
    "page_size",
    "perplexity_tokens",
    "l2",
    "samples",
)


@dataclass(frozen=True, slots=True)
class Table:
    """Plain text: a header, rows, which columns hold numbers, what all rows share, and the baseline of speed-ups."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: frozenset[int]
    shared: dict[str, str]
    baseline: dict[str, Any]


def text_of(value: object) -> str:
    """A cell: empty for a missing value, whole numbers without a point."""
    if value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value)):
        return ""
    return str(value)


def varying(frame: pd.DataFrame) -> list[str]:
    """Fields with more than one value among the rows, in the order of the axes."""
    order = [*AXES, *(name for name in FIELDS if name not in AXES)]
    names = [name for name in order if frame[name].nunique(dropna=False) > 1]
    return [*(["device_name"] if frame["device_name"].nunique() > 1 else []), *names]


def results_table(results: Results, baseline: Mapping[str, Any] | None = None) -> Table:
    """One row a point that was measured or failed (not the unsupported ones; `failures` lists why).

    Args:
        results: anchor repeats are left out.
        baseline: mode axes and their values; default the plainest set of modes measured.

    Speed-ups are those of the latency, which of a step is that of one decode step. Where a record has a time from an
    idle device, the column `FROM_IDLE` holds it; steps have columns of their own.
    """
    frame = results.frame()
    frame = frame[~frame["anchor"].astype(bool)]
    base = dict(baseline) if baseline is not None else default_baseline(frame)
    frame = frame.assign(speedup=pd.Series(speedups(frame, base), index=frame.index, dtype=object))
    shown = frame[frame["status"] != Status.UNSUPPORTED.value]
    steps, mixed = of_steps(shown), len(subjects(shown)) > 1
    axes = varying(shown) if len(shown) > 1 else ["batch_size" if steps else "num_tokens"]
    shared = {name: text_of(frame[name].iloc[0]) for name in SHARED if _shared(frame, name, axes)}
    columns: dict[str, list[str]] = {name: [text_of(value) for value in shown[name]] for name in axes}
    columns[DECODE if steps else "latency"] = [microseconds(value) for value in shown["latency_us"]]
    columns["p10 to p90"] = [
        f"{microseconds(low)} to {microseconds(high)}" if not math.isnan(low) else ""
        for low, high in zip(shown["p10_us"], shown["p90_us"], strict=True)
    ]
    if steps or mixed:
        columns |= _step_columns(shown)
    if shown["wall_us"].notna().any():
        columns[FROM_IDLE] = [microseconds(value) for value in shown["wall_us"]]
    if base:
        columns["speed-up"] = ["" if value is None else str(value) for value in shown["speedup"]]
    columns["error/budget"] = ["" if math.isnan(value) else f"{value:.2g}" for value in shown["error_ratio"]]
    columns["total error"] = ["" if math.isnan(value) else f"{value:.1e}" for value in shown["total_error"]]
    if shown["distinct_outputs"].notna().any():
        columns["distinct outputs"] = [
            "" if math.isnan(value) else f"{value:.0f}" for value in shown["distinct_outputs"]
        ]
    for name, title in (("trained_mlp_error", "against trained MLP"), ("sparsity_error", "sparsity error")):
        if shown[name].notna().any():
            columns[title] = ["" if math.isnan(value) else f"{value:.1e}" for value in shown[name]]
    if shown["compile_s"].notna().any():
        columns["compile time"] = ["" if math.isnan(value) else f"{value:.1f} s" for value in shown["compile_s"]]
    columns["status"] = [
        f"{status} (at the roof)" if roof else str(status)
        for status, roof in zip(shown["status"], shown["at_roof"], strict=True)
    ]
    texts = {"status", *(name for name in axes if not pd.api.types.is_numeric_dtype(shown[name]))}
    return Table(
        header=tuple(columns),
        rows=tuple(zip(*columns.values(), strict=True)),
        numbers=frozenset(at for at, name in enumerate(columns) if name not in texts),
        shared={name: value for name, value in shared.items() if value},
        baseline=base,
    )


def _step_columns(frame: pd.DataFrame) -> dict[str, list[str]]:
    """What a step has beside its decode steps; empty cells for layers."""

    def column(name: str, form: str) -> list[str]:
        return ["" if math.isnan(value) else format(value, form) for value in frame[name]]

    found = {PREFILL: [microseconds(value) for value in frame["prefill_us"]]}
    found["decode tokens/s"] = column("decode_throughput", ",.1f")
    found["total tokens/s"] = column("total_throughput", ",.1f")
    found["capture (s)"] = column("capture_s", ".2f")
    found["graphs (MiB)"] = ["" if math.isnan(value) else f"{value / 2**20:,.1f}" for value in frame["graph_bytes"]]
    found["kernels in graph"] = column("graph_kernels", ",.0f")
    found["graph breaks"] = column("graph_breaks", ".0f")
    found["recompiles"] = column("recompiles", ".0f")
    found["same top token"] = column("top1_agreement", ".1%")
    found["KL (nats)"] = column("kl", ".1e")
    found["perplexity"] = column("perplexity", ".4g")
    found["first bad layer"] = column("first_bad_layer", ".0f")
    return {name: cells for name, cells in found.items() if any(cells)}


def _shared(frame: pd.DataFrame, name: str, axes: list[str]) -> bool:
    """Whether a field belongs into the line of what all rows share; l2 means nothing for steps."""
    if not len(frame) or name in axes or (name == "l2" and of_steps(frame)):
        return False
    return told(name, frame[name].iloc[0])


def name_of(record: Record) -> str:
    """A point in words: model, modes, tokens or batch."""
    modes, spec = record.spec.modes, record.spec
    layer = spec.subject is Subject.MOE_LAYER
    more = [f"{name} {text_of(value)}" for name, value in modes if name in UNSAID and told(name, value)]
    more += [] if layer else [f"attention {modes.attention_backend}"]
    words = [spec.model, str(modes.quant), modes.moe_backend, *more, f"compile {modes.compile}", f"graph {modes.graph}"]
    return ", ".join([*words, *([str(modes.routing)] if layer else []), spec.size_label])


def heading(results: Results) -> str:
    """What was run, as a title."""
    found = {record.spec.subject for record in results.points}
    if found == {Subject.STEP}:
        return "Whole-model step sweep"
    return "Sweep of MoE layers and whole-model steps" if Subject.STEP in found else "MoE layer sweep"


def failures(results: Results) -> list[tuple[str, str, list[str]]]:
    """Status, reason and the points it stopped, of all that was not measured; failures before what cannot run."""
    groups: dict[tuple[str, str], list[str]] = {}
    for record in results.points:
        if not record.status.measured:
            groups.setdefault((str(record.status), record.reason), []).append(name_of(record))
    quiet = (Status.UNSUPPORTED.value, Status.SKIPPED.value)
    return [(s, why, names) for (s, why), names in sorted(groups.items(), key=lambda item: item[0][0] in quiet)]


def environments(results: Results) -> list[str]:
    """One line for each place in which the records were made."""
    lines = []
    for environment in {r.environment.fingerprint: r.environment for r in results.records}.values():
        parts = [environment.device_name]
        parts += [f"{environment.cores} cores"] if environment.device_type == "cpu" and environment.cores else []
        parts += [f"driver {environment.driver}"] if environment.driver else []
        for name in ("torch", "triton", "python", "workbench"):
            version = getattr(environment, name)
            parts += [f"{name} {version}"] if version else []
        parts += [environment.host_os] if environment.host_os else []
        parts += [f"commit {environment.commit[:12]}"] if environment.commit else []
        lines.append(", ".join(parts))
    return lines
