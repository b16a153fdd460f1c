"""Experts cut from a dense MLP, trained or random.

Shapes: T tokens, E experts, K experts per token, D model, F ffn of one expert on one rank.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from moe_kernels import Routing
from torch.nn.functional import silu

from workbench.models.cache import Captured
from workbench.models.checkpoint import MAX_ROWS, TEXT, WINDOW
from workbench.models.shapes import ModelShape
from workbench.models.source import LayerSource
from workbench.record import Scalar


class DenseCut(LayerSource):
    """Experts cut from a dense gated MLP: expert e has channels `[e * F, (e + 1) * F)`; a rank keeps its first part.

    With all experts chosen at weight 1 their sum is the MLP's own output. With fewer, the oracle router chooses, for
    each token, the experts whose true outputs have the largest norm `||f_e(x)||`, and weighs each 1: the sum of the
    chosen outputs, not renormalised, is the closest that keeping whole outputs gives when they are near orthogonal.
    An oracle, because it computes every expert first.
    """

    def __init__(
        self,
        shape: ModelShape,
        device: torch.device,
        seed: int,
        captured: Captured,
        *,
        random: bool,
        more: Callable[[int], Captured] | None = None,
        notes: tuple[str, ...] = (),
    ) -> None:
        if shape.top_k < shape.num_experts:
            notes += ("Fewer experts than all are chosen: a sparse approximation of the dense MLP.",)
        super().__init__(shape, device, seed, notes)
        self._captured = captured
        self._random = random
        self._more = more
        self._norms_RE = torch.empty(0, shape.num_experts)

    @property
    def resolved(self) -> dict[str, Scalar]:
        """See the base class."""
        layer, name = self._captured.layer, self.shape.name
        every = self.shape.top_k == self.shape.num_experts
        router = "all experts, weight 1" if every else "oracle router"
        if self._random:
            return {"weights": f"random, seed {self.seed}", "inputs": f"random, seed {self.seed}", "router": router}
        rows = MAX_ROWS if self._more is not None else self._captured.rows
        inputs = f"text of {TEXT} before the MLP of layer {layer}, at most {rows} rows, then again"
        return {"weights": f"{name} layer {layer} MLP", "inputs": inputs, "router": router}

    def _channels(self, index: int) -> slice:
        width = self.shape.intermediate_size
        start = index * width * self.shape.tp_size
        return slice(start, start + width)

    def expert(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See the base class."""
        self._check(index)
        mine, own = self._captured, self._channels(index)
        w1 = torch.cat((mine.gate[own], mine.up[own])).to(self.device)
        return w1, mine.down[:, own].to(self.device, copy=True).contiguous()

    def hidden_states(self, num_tokens: int) -> torch.Tensor:
        """See the base class; beyond the captured rows (at most 4096) the text begins again."""
        self._reach(num_tokens)
        rows = torch.arange(num_tokens) % self._captured.rows
        return self._captured.hidden[rows].to(self.device)

    def _reach(self, num_tokens: int) -> None:
        """Capture further rows when more are asked for than there are."""
        if self._more is not None and num_tokens > self._captured.rows and self._captured.rows < MAX_ROWS:
            self._captured = self._more(num_tokens)
            self._more = None if num_tokens > self._captured.rows else self._more

    def router_logits(self, x_TD: torch.Tensor) -> torch.Tensor | None:
        """None: the oracle router looks at outputs, not at logits."""
        return None

    def dense_output(self, x_TD: torch.Tensor) -> torch.Tensor | None:
        """See the base class; computed in float32 by whole matrices, apart from the experts."""
        channels = torch.cat(
            [torch.arange(c.start, c.stop) for c in map(self._channels, range(self.shape.num_experts))]
        )
        mine, x = self._captured, x_TD.to(torch.float32)
        gate, up, down = (t.to(x.device) for t in (mine.gate[channels], mine.up[channels], mine.down[:, channels]))
        return (silu(x @ gate.T) * (x @ up.T)) @ down.T

    def _weights(self, ids_TK: torch.Tensor, index: int) -> torch.Tensor:
        return torch.ones(ids_TK.shape, dtype=torch.float32)

    def _own_routing(self, num_tokens: int, count: int) -> Routing:
        self._reach(num_tokens)
        # Whole windows of what is asked for, not of what happens to be captured: the same spec gives the same routings.
        rows, top_k = min(-(-num_tokens // WINDOW) * WINDOW, self._captured.rows), self.shape.top_k
        if top_k == self.shape.num_experts:
            ids = torch.arange(top_k, dtype=torch.int32).repeat(rows, 1)
        else:
            if len(self._norms_RE) < rows:
                self._norms_RE = self.oracle_norms(self._captured.hidden[:rows])
            ids = self._norms_RE[:rows].topk(top_k).indices.to(torch.int32)
        if rows < num_tokens:  # where the text begins again, its routing does
            ids = ids[torch.arange(num_tokens) % rows]
        return Routing(torch.ones(ids.shape, dtype=torch.float32), ids)

    def oracle_norms(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Norm of every whole expert's output (of all ranks together) for each token: float32 `[T, E]` on the CPU."""
        mine, x = self._captured, x_TD.to("cpu", torch.float32)
        width = self.shape.intermediate_size * self.shape.tp_size
        norms = []
        for start in range(0, self.shape.num_experts * width, width):
            own = slice(start, start + width)
            inner = silu(x @ mine.gate[own].T) * (x @ mine.up[own].T)
            norms.append((inner @ mine.down[:, own].T).norm(dim=-1))
        return torch.stack(norms, dim=-1)
