"""Which network a model's name stands for, how many of its layers are kept, and over how many ranks. No torch here."""

from __future__ import annotations

from dataclasses import replace

from workbench.errors import InvalidInput, choices
from workbench.models.network.files import find_network
from workbench.models.network.parse import parse_network
from workbench.models.network.presets import NETWORKS
from workbench.models.network.rope_config import RopeConfig
from workbench.models.network.shapes import ARCHITECTURES, MLA_FORMS, MLAConfig, MoEConfig, NetworkConfig

__all__ = [
    "ARCHITECTURES",
    "MLA_FORMS",
    "NETWORKS",
    "MLAConfig",
    "MoEConfig",
    "NetworkConfig",
    "RopeConfig",
    "cut_network",
    "network_config",
    "parse_network",
]


def network_config(model: str, *, num_layers: int | None = None, tp_size: int = 1) -> NetworkConfig:
    """The network that `model` names: a preset, `config.json`, checkpoint or Hugging Face id in the local cache.

    Args:
        model: its name or path.
        num_layers: layers kept from the start, counted in sparse layers where the model starts dense; None for all.
        tp_size: ranks that share the model, one of which is run.

    Raises:
        InvalidInput: the model is unknown or not supported, `num_layers` is more than it has, or `tp_size` does not
            divide what is shared.
    """
    config = NETWORKS[model] if model in NETWORKS else find_network(model).config
    return cut_network(config, num_layers=num_layers, tp_size=tp_size)


def cut_network(config: NetworkConfig, *, num_layers: int | None = None, tp_size: int = 1) -> NetworkConfig:
    """Keep the first layers and one rank of `tp_size`; arguments and errors are those of `network_config`."""
    kept = config.num_layers if num_layers is None else _layers(config, num_layers)
    if tp_size > 1:
        _check_ranks(config, tp_size)
    elif tp_size < 1:
        raise InvalidInput(f"tp_size: must be at least 1, not {tp_size}")
    notes = config.notes
    if kept < config.num_layers:
        notes += (f"The first {kept} of {config.num_layers} layers are run.",)
    if tp_size > 1:
        notes += (f"One rank of {tp_size}: its share of heads, channels and vocabulary, without sums over ranks.",)
    return replace(config, num_layers=kept, tp_size=tp_size, notes=notes)


def _layers(config: NetworkConfig, wanted: int) -> int:
    """Layers to keep for `wanted` counted ones: 2 sparse ones of DeepSeek-V3, which starts with 3 dense, are 5."""
    if config.moe is None or config.is_moe_layer(0):
        ends, kind = list(range(1, config.num_layers + 1)), "layers"
    else:
        ends, kind = [i + 1 for i in range(config.num_layers) if config.is_moe_layer(i)], "sparse layers"
    if not 1 <= wanted <= len(ends):
        raise InvalidInput(f"num_layers: must be from 1 to {len(ends)}, the {kind} of {config.name}, not {wanted}")
    return ends[wanted - 1]


def _check_ranks(config: NetworkConfig, ranks: int) -> None:
    """Refuse a number of ranks that would cut a head, or leave ranks of unlike shapes."""
    shared = {
        "vocabulary": config.vocab_size,
        "heads": config.num_heads,
        "channels of an MLP": config.intermediate_size,
    }
    if config.moe is not None:
        shared["channels of an expert"] = config.moe.intermediate_size
        if config.moe.shared_intermediate_size:
            shared["channels of the shared experts"] = config.moe.shared_intermediate_size
    if config.moe_layers < config.num_layers:
        shared["channels of an MLP"] = config.intermediate_size
    kv = config.num_kv_heads

    def misfits(count: int) -> list[str]:
        found = [f"{value} ({what})" for what, value in shared.items() if value % count]
        return found + ([f"{kv} (key and value heads)"] if kv % count and count % kv else [])

    if misfits(ranks):
        fitting = [count for count in range(1, config.num_heads + 1) if not misfits(count)]
        raise InvalidInput(
            f"tp_size: must divide {choices(misfits(ranks)).replace(' or ', ' and ')} of {config.name}, not {ranks}; "
            f"allowed are {choices(fitting)}"
        )
