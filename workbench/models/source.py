"""What a layer computes on, wherever it comes from.

Shapes: T tokens, E experts, K experts per token, D model, F ffn of one expert on one rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace

import torch
from moe_kernels import ExpertWeights, Routing
from moe_kernels.formats import FP8_MAX, SMALLEST_AMAX

from workbench.errors import InvalidInput
from workbench.models.routing import synthetic_ids, synthetic_weights, windows
from workbench.models.shapes import ModelShape, router_reason
from workbench.modes import ActivationScale, Quant, RoutingKind
from workbench.record import Scalar

# Rows of hidden states that fix a static activation scale: each goes through every expert.
CALIBRATION_ROWS = 128


class LayerSource(ABC):
    """What a layer computes on: weights, hidden states and routings, made or read when asked for.

    Attributes:
        shape: of one rank's layer.
        device: where tensors are given.
        seed: of everything that is random.
        notes: sentences to show beside a result.
    """

    def __init__(self, shape: ModelShape, device: torch.device, seed: int, notes: tuple[str, ...]) -> None:
        self.shape = shape
        self.device = device
        self.seed = seed
        share = f"One rank of {shape.tp_size}: its share of every expert, without the sum over ranks."
        self.notes = (*shape.notes, *((share,) if shape.tp_size > 1 else ()), *notes)

    @property
    @abstractmethod
    def resolved(self) -> dict[str, Scalar]:
        """What the weights, inputs and router are: keys `weights`, `inputs`, `router`."""

    @abstractmethod
    def expert(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Expert `index`, unquantised: float32 `w1` `[2F, D]` (gate rows, then up) and `w2` `[D, F]` on the device."""

    @abstractmethod
    def hidden_states(self, num_tokens: int) -> torch.Tensor:
        """Float32 `[T, D]` on the device; fewer rows are the first of more."""

    @abstractmethod
    def router_logits(self, x_TD: torch.Tensor) -> torch.Tensor | None:
        """The gate's float32 logits `[T, E]` on the device of `x_TD`; None where there is no gate."""

    def route(self, logits_TE: torch.Tensor) -> Routing:
        """What the gate makes of `router_logits`, on their device; only layers that have a gate have this.

        Raises:
            NotImplementedError: there is no gate.
        """
        raise NotImplementedError("this layer has no gate")

    @abstractmethod
    def dense_output(self, x_TD: torch.Tensor) -> torch.Tensor | None:
        """The uncut MLP's float32 output `[T, D]` (this rank's share of it); None where the layer is not a cut one."""

    @abstractmethod
    def _own_routing(self, num_tokens: int, count: int) -> Routing:
        """The model's routing, on the CPU, of a pool of rows that begins with `hidden_states(num_tokens)`."""

    def routings(self, kind: RoutingKind, num_tokens: int, count: int, zipf_exponent: float = 1.2) -> list[Routing]:
        """`count` seeded routings of `num_tokens` tokens, made on the CPU so that every device gets the same.

        For `model` the first belongs to `hidden_states(num_tokens)`, the others to further windows of the same text
        or inputs. For the other kinds weights are seeded, positive, with sum 1 per token; experts cut from a dense
        MLP always have weight 1.

        Raises:
            InvalidInput: `model` where the model's own gate cannot be run.
        """
        if kind is RoutingKind.MODEL:
            reason = router_reason(self.shape)
            if reason:
                raise InvalidInput(f"routing: {reason}")
            made = windows(self._own_routing(num_tokens, count), num_tokens, count)
        else:
            shape = self.shape
            chosen = synthetic_ids(kind, num_tokens, shape.num_experts, shape.top_k, count, zipf_exponent, self.seed)
            made = [Routing(self._weights(ids, index), ids) for index, ids in enumerate(chosen)]
        return [Routing(r.topk_weights.to(self.device), r.topk_ids.to(self.device)) for r in made]

    def _weights(self, ids_TK: torch.Tensor, index: int) -> torch.Tensor:
        tokens, top_k = ids_TK.shape
        return synthetic_weights(tokens, top_k, index, self.seed)

    def build_weights(
        self,
        quant: Quant,
        *,
        group_size: int = 128,
        zero_points: bool = False,
        activation_scale: ActivationScale = ActivationScale.DYNAMIC,
    ) -> ExpertWeights:
        """All experts as `quant` on the device, filled one by one: the peak is the result and one float32 expert.

        Args:
            quant: the format.
            group_size, zero_points: of int4; left unread by the others.
            activation_scale: `static`, of fp8_tensor alone: the scales are fixed by `calibrate`.
        """
        experts = (self.expert(index) for index in range(self.shape.num_experts))
        count = self.shape.num_experts
        weights = ExpertWeights.from_experts(
            experts, count, quant.value, group_size=group_size, zero_points=zero_points
        )
        if activation_scale is ActivationScale.STATIC:
            x_scale, h_scale = self.calibrate(weights)
            weights = replace(weights, x_scale=x_scale, h_scale=h_scale)
        return weights

    def calibrate(self, weights: ExpertWeights) -> tuple[torch.Tensor, torch.Tensor]:
        """Fixed scales of the inputs and of the intermediate: float32 `[1]` each.

        The largest magnitude over the first `CALIBRATION_ROWS` hidden states, and over what every expert's dequantised
        gate and up make of them, each over the format's largest value.
        """
        x_RD = self.hidden_states(CALIBRATION_ROWS).to(weights.dtype).to(torch.float32)
        largest_h = torch.zeros((), device=x_RD.device)
        for index in range(weights.num_experts):
            gate_RF, up_RF = (x_RD @ weights.dequantize_expert(index)[0].T).chunk(2, dim=-1)
            largest_h = torch.maximum(largest_h, (torch.nn.functional.silu(gate_RF) * up_RF).abs().amax())
        x_scale, h_scale = (
            (largest.clamp_min(SMALLEST_AMAX) / FP8_MAX).reshape(1) for largest in (x_RD.abs().amax(), largest_h)
        )
        return x_scale, h_scale

    def _check(self, index: int) -> None:
        if not 0 <= index < self.shape.num_experts:
            raise IndexError(f"expert must be from 0 to {self.shape.num_experts - 1}, not {index}")
