"""A made-up step for `FakeEngine`: every number that a real record has, the same for the same spec."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from workbench.models.network.memory import spec_memory
from workbench.models.network.shapes import NetworkConfig
from workbench.modes import Compile, Graph
from workbench.record import (
    STEP_METRICS,
    CaptureRow,
    Correctness,
    Difference,
    Memory,
    Metric,
    ProfileRow,
    Scalar,
    Startup,
    StepCheck,
)
from workbench.spec import RunSpec
from workbench.step_support import cache_batch, compiled_part, step_network

LOGITS_ERROR, LAYER_ERROR, LAYER_BUDGET = 2e-3, 1e-3, 4e-3
PERPLEXITY = 12.5
CAPTURE_S, GRAPH_BYTES, COMPILE_S = 0.5, 2**20, 2.0
Phase = Literal["prefill", "decode"]
Kind = Literal["gemm", "moe", "attention", "norm", "elementwise", "memory", "other"]
Share = tuple[str, Kind, float, float]
# Part of a layer, what its kernels do, the share of the layer's time that it takes, and of the layer's bytes.
_LAYER: tuple[Share, ...] = (
    ("norm", "norm", 0.04, 0.0),
    ("attention", "gemm", 0.2, 0.25),
    ("attention", "attention", 0.12, 0.0),
    ("rope", "other", 0.04, 0.0),
)
_DENSE: tuple[Share, ...] = (("mlp", "gemm", 0.5, 0.75), ("mlp", "elementwise", 0.1, 0.0))
_SPARSE: tuple[Share, ...] = (("gate", "gemm", 0.1, 0.0), ("moe", "moe", 0.5, 0.75))
# Of a whole pass, outside its layers.
_OUTSIDE: tuple[Share, ...] = (
    ("embed", "memory", 0.02, 0.0),
    ("norm", "norm", 0.01, 0.0),
    ("lm_head", "gemm", 0.07, 1.0),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class MadeUpStep:
    """The parts of a record that a step alone has."""

    metrics: dict[str, Metric]
    memory: Memory
    correctness: Correctness
    resolved: dict[str, Scalar]
    startup: Startup
    captures: tuple[CaptureRow, ...]
    profile: tuple[ProfileRow, ...]


def made_up_step(spec: RunSpec, decode_us: float) -> MadeUpStep:
    """Numbers that agree with each other, from the median of one decode step: a prefill takes 4 of it and a bit more.

    Raises:
        InvalidInput: the spec describes no network.
    """
    config, point = step_network(spec), spec.step_point
    steps = point.output_len - 1
    prefill_us = decode_us * (4 + point.input_len / 1024)
    total_us = prefill_us + steps * decode_us
    tokens = point.batch_size * 1e6
    medians = {"prefill": prefill_us, "total": total_us}
    medians |= {"prefill_throughput": tokens * point.input_len / prefill_us}
    medians |= {"total_throughput": tokens * point.max_len / total_us}
    if steps:
        medians |= {"decode": decode_us, "decode_throughput": tokens / decode_us}
    metrics = {
        name: _series(medians[name], STEP_METRICS[name], spec.samples) for name in STEP_METRICS if name in medians
    }
    if point.perplexity_tokens is not None:
        metrics["perplexity"] = Metric.from_samples([PERPLEXITY], STEP_METRICS["perplexity"])
    need = spec_memory(config, spec.modes, point)
    profile = _profile(config, "prefill", prefill_us, need.weight_bytes)
    profile += _profile(config, "decode", decode_us, need.weight_bytes) if steps else ()
    captures = _captures(spec, config)
    room = point.model_copy(update={"batch_size": cache_batch(spec)})
    return MadeUpStep(
        metrics=metrics,
        memory=Memory(
            weight_bytes=need.weight_bytes,
            kv_cache_bytes=spec_memory(config, spec.modes, room).kv_cache_bytes,
            graph_bytes=sum(one.held_bytes for one in captures) if captures else None,
        ),
        correctness=_check(spec, config),
        resolved=_resolved(spec, captures),
        startup=Startup(
            load_s=0.0,
            compile_s=COMPILE_S if compiled_part(spec, moe=False) else None,
            capture_s=sum(one.capture_s for one in captures) if captures else None,
            compile_cache="warm" if compiled_part(spec, moe=False) else "none",
        ),
        captures=captures,
        profile=profile,
    )


def _captures(spec: RunSpec, config: NetworkConfig) -> tuple[CaptureRow, ...]:
    """The largest size holds the most; the others find room in its pool."""
    if spec.modes.graph is not Graph.FULL:
        return ()
    most = spec.modes.max_capture_batch
    sizes = [spec.step_point.batch_size]
    if most is not None:
        sizes = sorted({n for n in (1, 2, 4, *range(8, most + 1, 8)) if n <= most} | {most}, reverse=True)
    kernels = 12 * config.num_layers + 4
    return tuple(
        CaptureRow(
            size=size,
            capture_s=CAPTURE_S,
            held_bytes=GRAPH_BYTES * (config.num_layers if at == 0 else 1),
            kernels=kernels,
        )
        for at, size in enumerate(sizes)
    )


def _resolved(spec: RunSpec, captures: tuple[CaptureRow, ...]) -> dict[str, Scalar]:
    """What was in force, by the keys of a real record."""
    modes = spec.modes
    compiled = compiled_part(spec, moe=False)
    size = min((one.size for one in captures if one.size >= spec.step_point.batch_size), default=None)
    found: dict[str, Scalar] = {
        "attention_backend": modes.attention_backend,
        "fusion": str(modes.fusion),
        "compile": str(modes.compile if compiled else Compile.NONE),
        "graph": "eager" if size is None else "full",
    }
    if captures:
        found |= {"captured_size": size, "capture_error_mode": "thread_local"}
    if compiled:
        found |= {"compile_scope": str(modes.compile_scope), "graphs_compiled": 1, "graph_breaks": 0}
        found |= {"recompiles": 0, "kernels_compiled": 0}
    return found


def _series(median: float, unit: str, count: int) -> Metric:
    """A spread of 2 %, symmetric, so that the median is the one asked for."""
    last = max(1, count - 1)
    samples = [median * (1 + 0.02 * (index / last - 0.5)) for index in range(count)]
    return Metric.from_samples(samples if count > 1 else [median], unit)


def _check(spec: RunSpec, config: NetworkConfig) -> Correctness:
    point = spec.step_point
    errors = tuple(LAYER_ERROR * (1 + layer % 3 / 10) for layer in range(config.num_layers))
    worst = max(range(config.num_layers), key=lambda layer: errors[layer])
    logits = Difference(relative_l2=LOGITS_ERROR, max_over_rms=LOGITS_ERROR * 5, dissimilarity=LOGITS_ERROR**2)
    step = StepCheck(
        logits_relative_l2=LOGITS_ERROR,
        top1_agreement=1.0,
        kl=LOGITS_ERROR**2,
        worst_layer=worst,
        worst_error=errors[worst],
        budget=LAYER_BUDGET,
        layers_checked=config.num_layers,
        positions=point.batch_size * min(2, point.output_len),
        layer_errors=errors,
    )
    changed = spec.modes.graph is Graph.FULL or compiled_part(spec, moe=False)
    return Correctness(
        total=logits,
        kernel=logits,
        mode=logits if changed else None,
        mode_budget=LAYER_BUDGET if changed else None,
        bitwise=True if spec.modes.graph is Graph.FULL else None,
        kernel_budget=LAYER_BUDGET,
        ratio=errors[worst] / LAYER_BUDGET,
        routing_flips=0 if config.moe is not None else None,
        rows_checked=step.positions,
        rows=step.positions,
        step=step,
        passed=True,
    )


def _profile(config: NetworkConfig, phase: Phase, total_us: float, weight_bytes: int) -> tuple[ProfileRow, ...]:
    """Rows whose times sum to `total_us`; the bytes of the weights lie in MLPs, in attention and in lm_head."""
    layer_us = total_us * (1 - sum(share for _, _, share, _ in _OUTSIDE)) / config.num_layers
    floor = weight_bytes // (config.num_layers + 1)
    places: list[tuple[int | None, float, tuple[Share, ...]]] = [
        (layer, layer_us, _LAYER + (_SPARSE if config.is_moe_layer(layer) else _DENSE))
        for layer in range(config.num_layers)
    ]
    return tuple(
        ProfileRow(
            phase=phase,
            layer=layer,
            part=part,
            kind=kind,
            time_us=us * share,
            floor_bytes=int(floor * moved) if moved else None,
        )
        for layer, us, shares in [*places, (None, total_us, _OUTSIDE)]
        for part, kind, share, moved in shares
    )
