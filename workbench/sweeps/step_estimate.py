"""How long one run of a whole step may take, roughly, before anything is known. No torch here."""

from __future__ import annotations

from workbench.arithmetic import expert_bytes
from workbench.models.network.shapes import NetworkConfig
from workbench.modes import Compile, Fusion, Graph
from workbench.spec import RunSpec
from workbench.step_support import compiled_part

LAYER_S = {"cpu": 1e-3, "cuda": 1.5e-3}
"""Seconds that the host takes to launch the operations of one layer."""
FUSED, REPLAYED, COMPILED = 0.5, 0.1, 0.7
"""What is left of those where small kernels are fused, the step is a graph, and where it is compiled."""
COMPILE_LAYER_S = {"cpu": 1.5, "cuda": 1.0}
"""Seconds of compiling one layer for one batch size."""
CAPTURE_S, CAPTURE_LAYER_S = 0.3, 0.03
"""Seconds of warming up and capturing one batch size: in any case, and for each layer."""


def active_parameters(config: NetworkConfig) -> int:
    """Weights of one rank's layers that a token passes: all but the experts that it does not choose."""
    vocabulary = config.rank_vocab * config.hidden_size
    layers = config.parameters() - vocabulary * (1 if config.tie_embeddings else 2)
    moe = config.moe
    if moe is None:
        return layers
    expert = 3 * config.hidden_size * moe.intermediate_size // config.tp_size
    return layers - config.moe_layers * (moe.num_experts - moe.top_k) * expert


def read_bytes(spec: RunSpec, config: NetworkConfig, tokens: int) -> float:
    """Bytes of weights that a pass of `tokens` rows reads: every expert that some row may choose."""
    modes, moe = spec.modes, config.moe
    each = expert_bytes(modes.quant, 1024, 1024, group_size=modes.group_size, zero_points=modes.zero_points) / (
        3 * 1024 * 1024
    )
    if moe is None:
        return config.parameters() * each
    expert = 3 * config.hidden_size * moe.intermediate_size // config.tp_size
    touched = min(moe.num_experts, tokens * moe.top_k)
    return (config.parameters() - config.moe_layers * (moe.num_experts - touched) * expert) * each


def run_seconds(
    spec: RunSpec, config: NetworkConfig, kind: str, *, operations_rate: float, read_rate: float
) -> tuple[float, float]:
    """Rough seconds of the prefill, and of one decode step."""
    point = spec.step_point
    batch = point.batch_size
    active = active_parameters(config)

    def seconds(rows: int, cached: int, launch: float) -> float:
        kept = cached * config.kv_bytes_per_token(2, spec.modes.mla_decode)
        read = read_bytes(spec, config, rows) + kept
        operations = 2.0 * (active * rows + config.rank_vocab * config.hidden_size * batch)
        return operations / operations_rate + read / read_rate + launch * config.num_layers

    modes = spec.modes
    launch = LAYER_S[kind] * (FUSED if modes.fusion is Fusion.ON else 1.0)
    again = launch * (COMPILED if compiled_part(spec, moe=False) else 1.0)
    if replayed(spec):
        again = LAYER_S[kind] * REPLAYED
    return seconds(batch * point.input_len, 0, launch), seconds(batch, batch * point.max_len, again)


def replayed(spec: RunSpec) -> bool:
    """Whether decode steps of this batch are replayed from a graph."""
    most = spec.modes.max_capture_batch
    return spec.modes.graph is Graph.FULL and (most is None or spec.step_point.batch_size <= most)


def captured_sizes(largest: int) -> int:
    """About how many batch sizes are captured up to `largest`: 1, 2, 4, then every 8."""
    return min(largest, 3 + -(-largest // 8)) if largest > 2 else largest


def compile_seconds(spec: RunSpec, config: NetworkConfig, kind: str, mode_s: float) -> float:
    """Rough seconds of compiling the batch sizes that run compiled; `mode_s` is what the mode takes of a layer."""
    modes = spec.modes
    if modes.compile is Compile.NONE:
        return 0.0
    largest = modes.max_capture_batch if modes.graph is Graph.FULL else None
    if largest is None:
        sizes = 1 if compiled_part(spec, moe=False) else 0
    else:
        sizes = captured_sizes(min(largest, modes.max_compile_batch or largest))
    return sizes * (mode_s + COMPILE_LAYER_S[kind] * config.num_layers)


def capture_seconds(spec: RunSpec, config: NetworkConfig) -> float:
    """Rough seconds of capturing every batch size."""
    if spec.modes.graph is not Graph.FULL:
        return 0.0
    most = spec.modes.max_capture_batch
    return (1 if most is None else captured_sizes(most)) * (CAPTURE_S + CAPTURE_LAYER_S * config.num_layers)
