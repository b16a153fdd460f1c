"""What was in force at a point, and what it had to do, where that differs from what its spec says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_kernels import Routing

from workbench.arithmetic import describe
from workbench.check.truth import Problem
from workbench.devices import DeviceInfo
from workbench.measure.floor import SampleWork, sample_work
from workbench.models.layer import LayerSource
from workbench.modes import BACKENDS, ActivationScale, RoutingKind
from workbench.spec import RunSpec


def arithmetic(spec: RunSpec, device: DeviceInfo) -> dict[str, str]:
    """The arithmetic of a quantised format, under its name; what a backend of a user's own does is not known."""
    modes = spec.modes
    if modes.moe_backend not in BACKENDS:
        return {}
    words = describe(
        modes.quant,
        group_size=modes.group_size,
        zero_points=modes.zero_points,
        static=modes.activation_scale is ActivationScale.STATIC,
        device_type=device.type,
        capability=device.capability,
        emulated=modes.moe_backend == "reference",
        backend=modes.moe_backend,
    )
    return {"arithmetic": words} if words else {}


def split_in_force(asked: int | None, config: Mapping[str, Any]) -> int | str:
    """`split_k` as asked, or as the kernel's configuration has it: one number where both products agree, else both."""
    if asked is not None:
        return asked
    up, down = (int(config.get(part, config).get("SPLIT_K", 1)) for part in ("up", "down"))
    return up if up == down else f"up {up}, down {down}"


def routing_flips(source: LayerSource, problem: Problem, spec: RunSpec) -> dict[str, int] | None:
    """Tokens whose set of experts changes when the gate reads the rounded inputs; None where routing is given."""
    if spec.modes.routing is not RoutingKind.MODEL:
        return None
    exact, rounded = source.router_logits(problem.x_float32), source.router_logits(problem.x)
    if exact is None or rounded is None:
        return None
    sets = [source.route(logits).topk_ids.sort(dim=-1).values for logits in (exact, rounded)]
    return {"routing_flips": int((sets[0] != sets[1]).any(dim=-1).sum())}


def layer_work(source: LayerSource, spec: RunSpec, routing: Routing) -> SampleWork:
    """The least that a sample with this routing must do."""
    ids = routing.topk_ids
    chosen = ids[(ids >= 0) & (ids < source.shape.num_experts)]
    return sample_work(
        source.shape,
        spec.modes.quant,
        spec.num_tokens,
        int(chosen.unique().numel()),
        int(chosen.numel()),
        group_size=spec.modes.group_size,
        zero_points=spec.modes.zero_points,
    )
