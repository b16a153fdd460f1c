"""What a `Record` holds of a whole step alone: names of metrics, its check, its graphs, its profile. No torch here."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from workbench.parts import Frozen

STEP_METRICS = {
    "prefill": "us",
    "decode": "us",
    "total": "us",
    "prefill_throughput": "tokens/s",
    "decode_throughput": "tokens/s",
    "total_throughput": "tokens/s",
    "perplexity": "",
}
"""Metrics of a step -> their unit: latencies of the prefill, of one decode step and of the whole; tokens a second, of
the whole batch (prompt tokens; new tokens; both); perplexity of a text, where one was asked for."""


class StepCheck(Frozen):
    """How a whole step compares with its float32 oracle: the logits, and layer by layer on the same inputs.

    Attributes:
        logits_relative_l2: `|y - x| / |x|` over all positions compared; None where a value was not finite.
        top1_agreement: share of positions where both have the same most likely token, 0 to 1.
        kl: mean Kullback-Leibler divergence from the oracle's distribution, in nats.
        first_bad_layer: the first layer whose error is above its budget, counted from 0; None where there is none.
        worst_layer, worst_error: the layer with the largest `relative_l2`, and that.
        budget: the largest `relative_l2` that a layer is allowed.
        layers_checked, positions: layers and rows of logits compared.
        routing_flips: tokens of all MoE layers whose set of experts differs from the oracle's on the same input.
        layer_errors: `relative_l2` of every layer from 0 on; None where a value was not finite. May be left empty.
    """

    logits_relative_l2: float | None
    top1_agreement: float = Field(ge=0, le=1)
    kl: float | None
    first_bad_layer: int | None = None
    worst_layer: int
    worst_error: float | None
    budget: float
    layers_checked: int
    positions: int
    routing_flips: int = 0
    layer_errors: tuple[float | None, ...] = ()


class CaptureRow(Frozen):
    """What the graph of one batch size cost.

    Attributes:
        size: sequences.
        capture_s: seconds of warming up and capturing.
        held_bytes: device memory that was reserved for it on top of the larger sizes.
        kernels: kernels inside the graph; None where they were not counted.
    """

    size: int = Field(ge=1)
    capture_s: float = Field(ge=0)
    held_bytes: int = Field(ge=0)
    kernels: int | None = Field(default=None, ge=0)


class ProfileRow(Frozen):
    """Time of one kind of kernel in one part of one layer of a step.

    Attributes:
        phase: `prefill`, or `decode` (one step of it).
        layer: counted from 0; None outside the layers (embedding, last norm, lm_head).
        part: of the model: `embed`, `norm`, `attention`, `rope`, `gate`, `moe`, `mlp`, `lm_head`, ...
        kind: what the kernels do.
        time_us: microseconds of all of them in one pass. `count`: how many there are.
        floor_bytes: bytes that this part must move at least, given in one row of each part and layer; None elsewhere.
    """

    phase: Literal["prefill", "decode"]
    layer: int | None = Field(default=None, ge=0)
    part: str
    kind: Literal["gemm", "moe", "attention", "norm", "elementwise", "memory", "other"]
    time_us: float = Field(ge=0)
    count: int = Field(default=1, ge=0)
    floor_bytes: int | None = Field(default=None, ge=0)
