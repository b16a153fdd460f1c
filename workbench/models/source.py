"""What a layer computes on, wherever it comes from.

Shapes: T tokens, E experts, K experts per token, D model, F ffn of one expert on one rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from moe_kernels import ExpertWeights, Routing
from moe_kernels.types import TORCH_DTYPE
from moe_kernels.types import Quant as KernelQuant

from workbench.errors import InvalidInput
from workbench.models.routing import synthetic_ids, synthetic_weights, windows
from workbench.models.shapes import ModelShape, router_reason
from workbench.modes import Quant, RoutingKind
from workbench.record import Scalar


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

    def build_weights(self, quant: Quant) -> ExpertWeights:
        """All experts as `quant` on the device, filled one by one: the peak is the result and one float32 expert."""
        scheme = KernelQuant(quant.value)
        shape, dtype = self.shape, TORCH_DTYPE[scheme]
        experts, hidden, channels = shape.num_experts, shape.hidden_size, shape.intermediate_size
        w1_E2FD = torch.empty(experts, 2 * channels, hidden, dtype=dtype, device=self.device)
        w2_EDF = torch.empty(experts, hidden, channels, dtype=dtype, device=self.device)
        for index in range(experts):
            w1, w2 = self.expert(index)
            w1_E2FD[index].copy_(w1)
            w2_EDF[index].copy_(w2)
        return ExpertWeights.from_dense(w1_E2FD, w2_EDF, scheme.value)

    def _check(self, index: int) -> None:
        if not 0 <= index < self.shape.num_experts:
            raise IndexError(f"expert must be from 0 to {self.shape.num_experts - 1}, not {index}")
