"""The network that a worker keeps from one step to the next."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from workbench.devices import DeviceInfo
from workbench.models.network.attention import Attention
from workbench.models.network.load import Loaded, load_network
from workbench.models.network.mla import LatentAttention
from workbench.models.network.moe import MoE
from workbench.models.network.network import Network
from workbench.spec import RunSpec


def network_key(spec: RunSpec) -> Hashable:
    """What a network's weights depend on; its backends are changed in place."""
    modes = spec.modes
    stored = (modes.quant, modes.group_size, modes.zero_points)
    return (
        *(spec.model, spec.experts, spec.top_k, spec.num_layers, spec.tp_size, spec.seed, *stored),
        *(modes.mla_prefill, modes.mla_decode, modes.fusion),
    )


class NetworkSlot:
    """At most one network. A network is dropped before another is loaded: both at once may not fit."""

    def __init__(self) -> None:
        self._held: tuple[Hashable, Loaded] | None = None

    def find(
        self, spec: RunSpec, device: DeviceInfo, progress: Callable[[str], None], drop: Callable[[], None]
    ) -> Loaded:
        """The network of `spec`, with its backends in force.

        Args:
            spec: of a step.
            device: where it is to be.
            progress: told what is done.
            drop: gives back whatever else is held, called before anything is loaded.

        Raises:
            InvalidInput: what `load_network` refuses.
        """
        key = network_key(spec)
        if self._held is None or self._held[0] != key:
            self._held = None
            drop()
            self._held = (key, load_network(spec, device, progress))
        loaded = self._held[1]
        use_backends(loaded.network, spec)
        return loaded

    def drop(self) -> None:
        """Forget it."""
        self._held = None


def use_backends(network: Network, spec: RunSpec) -> None:
    """Run attention and experts by the spec's backends from now on."""
    modes = spec.modes
    for module in network.modules():
        if isinstance(module, (Attention, LatentAttention)):
            module.impl = modes.attention_backend
        elif isinstance(module, MoE):
            module.backend, module.split_k, module.reduction = modes.moe_backend, modes.split_k, modes.reduction.value
