"""A dense checkpoint's MLPs as experts.

Shapes: D model, F channels of an expert, E experts.
"""

from __future__ import annotations

import re

import torch

from workbench.models.network.names import expert_names, moe_prefix
from workbench.models.network.shapes import NetworkConfig
from workbench.models.network.tensors import TensorSource

_DENSE = re.compile(r"model\.layers\.(\d+)\.mlp\.(gate|up|down)_proj\.weight")
_PARTS = ("gate", "up", "down")


class CutTensors(TensorSource):
    """The tensors of a dense source, with experts and a gate of zeros in place of its MLPs.

    Expert e has rows `e * F` to `(e + 1) * F - 1` of gate and up, and those columns of down. The MLP that was read last
    is held.
    """

    def __init__(self, source: TensorSource, config: NetworkConfig) -> None:
        """Cut what `source` gives as `config` says, which `cut_mlps` made."""
        assert config.moe is not None
        self._source, self._hidden = source, config.hidden_size
        self._count = config.moe.num_experts
        self.quantized, self.sharded = source.quantized, source.sharded
        self._cut: dict[str, tuple[str, int, int]] = {}
        self._gates = {f"{moe_prefix(config, layer)}gate.weight" for layer in range(config.num_layers)}
        for layer in range(config.num_layers):
            for expert in range(self._count):
                for part, name in zip(_PARTS, expert_names(config, layer, expert), strict=True):
                    whole = f"{moe_prefix(config, layer)}{part}_proj.weight"
                    self._cut[name] = (whole, expert, 1 if part == "down" else 0)
        self._held: dict[str, torch.Tensor] = {}

    def names(self) -> frozenset[str]:
        """See the base class."""
        kept = {name for name in self._source.names() if not _DENSE.fullmatch(name)}
        return frozenset(kept | self._gates | set(self._cut))

    def get(self, name: str) -> torch.Tensor:
        """See the base class."""
        if name in self._gates:
            return torch.zeros(self._count, self._hidden)
        if name not in self._cut:
            return self._source.get(name)
        whole, expert, dim = self._cut[name]
        if whole not in self._held:
            if len(self._held) == len(_PARTS):
                self._held.clear()
            self._held[whole] = self._source.get(whole)
        tensor = self._held[whole]
        width = tensor.shape[dim] // self._count
        return tensor.narrow(dim, expert * width, width)
