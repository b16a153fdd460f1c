"""How long one run of a whole step may take, roughly, before anything is known. No torch here."""

from __future__ import annotations

from workbench.arithmetic import expert_bytes
from workbench.models.network.shapes import NetworkConfig
from workbench.spec import RunSpec

LAYER_S = {"cpu": 1e-3, "cuda": 1.5e-3}
"""Seconds that the host takes to launch the operations of one layer."""


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

    def seconds(rows: int, cached: int) -> float:
        kept = cached * config.kv_bytes_per_token(2, spec.modes.mla_decode)
        read = read_bytes(spec, config, rows) + kept
        operations = 2.0 * (active * rows + config.rank_vocab * config.hidden_size * batch)
        return operations / operations_rate + read / read_rate + LAYER_S[kind] * config.num_layers

    return seconds(batch * point.input_len, 0), seconds(batch, batch * point.max_len)
