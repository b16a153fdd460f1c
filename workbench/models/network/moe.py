"""The sparse layer: gate, routed experts and the shared ones.

Shapes: S rows, D model, E experts, K experts a token, R rows of one expert, F channels of an expert on one rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from moe_kernels import ExpertWeights, Routing, fused_experts, prepare_routing
from moe_kernels.step.router import router_logits
from torch import nn

from workbench.models.network.mlp import MLP
from workbench.models.routing import gated
from workbench.models.shapes import ModelShape


class Gate(nn.Module):
    """Chooses experts: logits `w . x` in float32 whatever the network computes in, then the model's own rule.

    Attributes:
        shape: of the layer, whose rule it is.
        weight: float32 `[E, D]`.
        bias: float32 `[E]`, added to the scores that choose; None for none.
        fused: whether logits are made in one kernel, with no float32 copy of the rows.
        part: of the network, for profiles.
    """

    part = "gate"
    fused = False

    def __init__(self, shape: ModelShape, weight_ED: torch.Tensor, bias_E: torch.Tensor | None) -> None:
        super().__init__()
        self.shape = shape
        self.weight, self.bias = weight_ED, bias_E

    def forward(self, x_SD: torch.Tensor) -> Routing:
        """The routing of every row."""
        if self.fused:
            return gated(self.shape, router_logits(x_SD, self.weight), self.bias)
        return gated(self.shape, nn.functional.linear(x_SD.to(torch.float32), self.weight), self.bias)

    def tensors(self) -> list[torch.Tensor]:
        """What it holds."""
        return [self.weight, *([] if self.bias is None else [self.bias])]


class MoE(nn.Module):
    """One rank's share of every expert.

    Attributes:
        gate: chooses experts.
        experts: the routed ones, and after them shared ones where these are run in the same kernels.
        shared: those that every token passes, as one MLP; None for none, or where they are among `experts`.
        shared_gate: float32 `[1, D]`, whose sigmoid weighs the shared ones (Qwen2); None for weight 1.
        backend: `impl` of `fused_experts`.
        split_k, reduction: as `fused_experts` takes them.
        exact: compute in float32 from dequantised experts, of which one is held at a time.
        fused: whether the sum with shared experts is left to the norm after it.
        forced: a routing to use in place of the gate's; None for the gate's.
        keep_routing: whether `last_routing` is kept.
        last_routing: of the last call.
        apart: the op that stands for it in compiled code, called with `number`; None for none (`kept_apart`).
        number: its own, for that op; None until it has one.
        part: of the network, for profiles.
    """

    part = "moe"
    fused = False

    def __init__(
        self,
        gate: Gate,
        experts: ExpertWeights,
        *,
        shared: MLP | None = None,
        shared_gate: torch.Tensor | None = None,
        backend: str | None = None,
        split_k: int | None = None,
        reduction: str = "deterministic",
        exact: bool = False,
    ) -> None:
        super().__init__()
        self.gate, self.experts = gate, experts
        self.shared, self.shared_gate = shared, shared_gate
        self.backend, self.split_k, self.reduction = backend, split_k, reduction
        self.exact = exact
        self.forced: Routing | None = None
        self.keep_routing = False
        self.last_routing: Routing | None = None
        self.apart: Callable[[torch.Tensor, int], torch.Tensor] | None = None
        self.number: int | None = None

    def forward(self, x_SD: torch.Tensor) -> Any:
        """Return `[S, D]`, a rank's share of the sum; where fused, `(routed, shared)` if their sum is left to make."""
        if self.apart is not None and self.number is not None:
            return self.apart(x_SD, self.number)
        return self.run(x_SD)

    def run(self, x_SD: torch.Tensor) -> Any:
        """See `forward`."""
        routing = self.gate(x_SD) if self.forced is None else self.forced
        if self.keep_routing:
            self.last_routing = routing
        if self.exact:
            whole = prepare_routing(routing, self.experts.num_routed, self.experts.num_shared)
            out_SD: torch.Tensor = exact_experts(x_SD, self.experts, whole)
        else:
            out_SD = fused_experts(
                x_SD, self.experts, routing, split_k=self.split_k, reduction=self.reduction, impl=self.backend
            )
        if self.shared is None:
            return out_SD
        shared_SD: torch.Tensor = self.shared(x_SD)
        if self.shared_gate is None and self.fused and not self.exact:
            return out_SD, shared_SD
        if self.shared_gate is None:
            return out_SD + shared_SD  # both rounded to the compute dtype before, their sum once more
        weight_S1: torch.Tensor = nn.functional.linear(x_SD.to(torch.float32), self.shared_gate).sigmoid()
        return (out_SD + weight_S1 * shared_SD).to(x_SD.dtype)  # in float32, the weight's dtype, rounded once

    def upcast(self) -> MoE:
        """The same in float32; it holds the same weights, and `forced` goes with it."""
        made = MoE(
            self.gate,
            self.experts,
            shared=None if self.shared is None else self.shared.upcast(),
            shared_gate=self.shared_gate,
            exact=True,
        )
        made.forced = self.forced
        return made

    def tensors(self) -> list[torch.Tensor]:
        """What it holds beside its parts."""
        return [*self.experts.tensors().values(), *([] if self.shared_gate is None else [self.shared_gate])]


def exact_experts(x_SD: torch.Tensor, experts: ExpertWeights, routing: Routing) -> torch.Tensor:
    """The routed experts in float32, `[S, D]`, one dequantised expert at a time.

    An id outside `0 .. E-1` adds nothing. Which experts are hit is read by the host.
    """
    out_SD = torch.zeros(x_SD.shape, dtype=torch.float32, device=x_SD.device)
    for expert in routing.topk_ids.unique().tolist():
        if not 0 <= expert < experts.num_experts:
            continue
        row_R, slot_R = torch.where(routing.topk_ids == expert)
        w1_2FD, w2_DF = experts.dequantize_expert(expert)
        gate_RF, up_RF = (x_SD[row_R].to(torch.float32) @ w1_2FD.T).chunk(2, dim=-1)
        y_RD = (nn.functional.silu(gate_RF) * up_RF) @ w2_DF.T
        out_SD.index_add_(0, row_R, y_RD * routing.topk_weights[row_R, slot_R, None])
    return out_SD
