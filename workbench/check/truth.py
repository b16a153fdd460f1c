"""What the layer should give on one problem, kept so that other modes of the same problem need not work it out again.

Shapes: T tokens, D model, R rows looked at.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

import torch
from moe_kernels import ExpertWeights, Routing
from moe_kernels.formats import FORMATS, format_for

from workbench.check.activations import roundings, with_fixed_scales
from workbench.check.budget import kernel_budget
from workbench.check.difference import difference
from workbench.check.oracle import checked_rows, dequantized, oracle, plain_layer
from workbench.models.source import LayerSource

KEPT = 32
# float32 of the cut experts' sum against float32 of the whole MLP.
CUT_LIMIT = 1e-4


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Problem:
    """Inputs as the layer meets them.

    Attributes:
        x: `[T, D]` in the compute dtype.
        x_float32: the same before it was rounded.
        routing: `[T, K]`.
    """

    x: torch.Tensor
    x_float32: torch.Tensor
    routing: Routing

    def rows(self, rows_R: torch.Tensor) -> Problem:
        """Only these rows."""
        at = rows_R.to(self.x.device)
        routing = Routing(self.routing.topk_weights[at], self.routing.topk_ids[at])
        return Problem(x=self.x[at], x_float32=self.x_float32[at], routing=routing)


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Truth:
    """What is right for some rows of a problem; tensors are float64 `[R, D]` on the CPU.

    Attributes:
        rows: int64 `[R]`.
        total: from the unquantised weights and inputs.
        kernel: from the dequantised weights, with the inputs as the layer meets them and both they and the intermediate
            quantised as the scheme does.
        dense: the uncut MLP's own output; None where there is none.
        budget: largest relative L2 error against `kernel`.
        cut_error: `total` against `dense`; None where there is no `dense`.
        complete: whether every expert is chosen, so that `total` must be `dense`.
    """

    rows: torch.Tensor
    total: torch.Tensor
    kernel: torch.Tensor
    dense: torch.Tensor | None
    budget: float
    cut_error: float | None
    complete: bool


def find_truth(source: LayerSource, weights: ExpertWeights, problem: Problem, seed: int, backend: str = "") -> Truth:
    """Work out what is right, and the budget from the error of plain eager code on the same rows.

    That code computes in the compute dtype on the dequantised weights and on activations quantised by the scheme,
    as `backend` has it.
    """
    rows_R = checked_rows(problem.x.shape[0], seed)
    part = problem.rows(rows_R)
    weights = with_fixed_scales(weights, problem.x, problem.routing)
    total = oracle(part.x_float32, part.routing, source.expert, weights.num_experts)
    problem_of = (part.x, part.routing, dequantized(weights), weights.num_experts, roundings(weights, backend))
    kernel, eager = oracle(*problem_of), plain_layer(*problem_of, part.x.dtype)
    dense = source.dense_output(part.x_float32)
    return Truth(
        rows=rows_R,
        total=total.cpu(),
        kernel=kernel.cpu(),
        dense=None if dense is None else dense.double().cpu(),
        budget=kernel_budget(
            difference(eager, kernel).relative_l2,
            part.x.dtype,
            max(weights.hidden_size, weights.intermediate_size),
        ),
        cut_error=None if dense is None else difference(total, dense).relative_l2,
        complete=dense is not None and source.shape.top_k == source.shape.num_experts,
    )


class TruthCache:
    """The last few truths, by what they depend on."""

    def __init__(self, size: int = KEPT) -> None:
        self._size = size
        self._kept: OrderedDict[Hashable, Truth] = OrderedDict()

    def find(
        self,
        key: Hashable,
        source: LayerSource,
        weights: ExpertWeights,
        problem: Problem,
        seed: int,
        backend: str = "",
    ) -> Truth:
        """The truth for `key`, worked out when it is not kept; apart for a `backend` with activations of its own."""
        if format_for(weights.quant, backend) is not FORMATS[weights.quant]:
            key = (key, backend)
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        truth = find_truth(source, weights, problem, seed, backend)
        self._kept[key] = truth
        while len(self._kept) > self._size:
            self._kept.popitem(last=False)
        return truth
