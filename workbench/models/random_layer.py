"""A layer of any shape with seeded random weights, gate and inputs; a gate's correction bias may be a checkpoint's.

Shapes: T tokens, E experts, K experts per token, D model, F ffn of one expert on one rank.
"""

from __future__ import annotations

import torch
from moe_kernels import Routing

from workbench.models.checkpoint import TrainedBias
from workbench.models.routing import gated
from workbench.models.seeding import normal, normal_rows
from workbench.models.shapes import ModelShape, router_reason
from workbench.models.source import LayerSource
from workbench.record import Scalar

_POOL_ROWS = 4096
# Sigmoids of this gate's logits deviate by 0.2: a bias of half that changes many choices and rules none.
_BIAS_DEVIATION = 0.1


class RandomLayer(LayerSource):
    """A layer of given shape with seeded random weights, gate and inputs.

    Weights are normal with deviation `1 / sqrt(fan_in)`, so that outputs keep the size of inputs. Each expert has its
    own seed and is made on the device when asked for: a layer's float32 copy is never held. CUDA's numbers differ
    from the CPU's for the same seed.
    """

    def __init__(
        self, shape: ModelShape, device: torch.device, seed: int, trained_bias: TrainedBias | None = None
    ) -> None:
        notes: tuple[str, ...] = (f"Weights and inputs are random, seed {seed}.",)
        if trained_bias is not None:
            notes += (f"The gate's correction bias is the checkpoint's, of layer {trained_bias.layer}.",)
        super().__init__(shape, device, seed, notes)
        self._gate_ED: torch.Tensor | None = None
        self._trained_bias = trained_bias

    @property
    def resolved(self) -> dict[str, Scalar]:
        """See the base class."""
        router = f"random gate, seed {self.seed}"
        if router_reason(self.shape):
            router = "none"
        elif self._trained_bias is not None:
            router += f"; correction bias of layer {self._trained_bias.layer}"
        elif self.shape.gate.correction_bias:
            router = f"random gate and correction bias, seed {self.seed}"
        return {"weights": f"random, seed {self.seed}", "inputs": f"random, seed {self.seed}", "router": router}

    def expert(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See the base class."""
        self._check(index)
        hidden, channels = self.shape.hidden_size, self.shape.intermediate_size
        w1 = normal((2 * channels, hidden), hidden**-0.5, self.seed, "w1", index, device=self.device)
        w2 = normal((hidden, channels), channels**-0.5, self.seed, "w2", index, device=self.device)
        return w1, w2

    def hidden_states(self, num_tokens: int) -> torch.Tensor:
        """See the base class; normal with deviation 1."""
        return normal_rows(num_tokens, self.shape.hidden_size, self.seed, "hidden").to(self.device)

    def router_logits(self, x_TD: torch.Tensor) -> torch.Tensor | None:
        """See the base class; None where the model's gate is of a kind that cannot be run."""
        if router_reason(self.shape):
            return None
        if self._gate_ED is None:  # made on the CPU, so that every device routes the same
            size = (self.shape.num_experts, self.shape.hidden_size)
            self._gate_ED = normal(size, self.shape.hidden_size**-0.5, self.seed, "gate")
        return x_TD.to(torch.float32) @ self._gate_ED.to(x_TD.device).T

    def correction_bias(self) -> torch.Tensor | None:
        """The bias of the gate's choice, float32 `[E]` on the CPU: trained, else seeded; None where it has none."""
        if not self.shape.gate.correction_bias:
            return None
        if self._trained_bias is not None:
            return self._trained_bias.values
        return normal((self.shape.num_experts,), _BIAS_DEVIATION, self.seed, "correction bias")

    def route(self, logits_TE: torch.Tensor) -> Routing:
        """What the gate makes of its logits, on their device. The gate must be one that can be run."""
        return gated(self.shape, logits_TE, self.correction_bias())

    def dense_output(self, x_TD: torch.Tensor) -> torch.Tensor | None:
        """None: these experts were never one MLP."""
        return None

    def _own_routing(self, num_tokens: int, count: int) -> Routing:
        pool = max(num_tokens, min(num_tokens * count, _POOL_ROWS))
        logits = self.router_logits(normal_rows(pool, self.shape.hidden_size, self.seed, "hidden"))
        assert logits is not None  # routings() refuses a gate that cannot be run
        return self.route(logits)
