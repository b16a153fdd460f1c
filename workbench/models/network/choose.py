"""The network that a step runs: its files, layers and rank, and its dense MLPs cut into experts. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, replace

from workbench.errors import InvalidInput, choices
from workbench.models.network.config import cut_network
from workbench.models.network.files import NetworkFiles, find_network
from workbench.models.network.shapes import MoEConfig, NetworkConfig
from workbench.models.shapes import Gate
from workbench.spec import RunSpec

# A gate of zeros: sigmoid(0) = 0.5 is scaled by 2, so that every expert counts 1 exactly, whatever their number.
CUT_GATE, CUT_SCALING = Gate(scoring="sigmoid"), 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """What a spec names.

    Attributes:
        files: where the weights are, and the numbers of the whole model.
        config: of the network that is run: one rank, the layers kept, MLPs cut.
        dense: the same with its MLPs whole, which is what the files hold; `config` itself where nothing is cut.
    """

    files: NetworkFiles
    config: NetworkConfig
    dense: NetworkConfig


def choose_network(spec: RunSpec) -> Chosen:
    """The network of a spec's `model`, `num_layers`, `tp_size`, `experts` and `top_k`.

    Raises:
        InvalidInput: the model is unknown or not supported, `num_layers` is more than it has, `tp_size` or `experts`
            does not divide, or `top_k` is another than the network's own.
    """
    files = find_network(spec.model)
    dense = cut_network(files.config, num_layers=spec.num_layers, tp_size=spec.tp_size)
    if spec.experts is not None and dense.moe is None:
        # The ranks' share of an expert is checked too, so the whole MLP is cut first.
        cut = cut_network(
            cut_mlps(files.config, spec.experts, spec.top_k), num_layers=spec.num_layers, tp_size=spec.tp_size
        )
        return Chosen(files=files, config=cut, dense=dense)
    moe = dense.moe
    if moe is None and spec.top_k is not None:
        raise InvalidInput(f"top_k: {dense.name} has no experts; it must be left out, or experts given too")
    if moe is not None and spec.experts not in (None, moe.num_experts):
        raise InvalidInput(
            f"experts: {dense.name} has {moe.num_experts}, not {spec.experts}; only a dense MLP can be cut into others"
        )
    if moe is not None and spec.top_k not in (None, moe.top_k):
        raise InvalidInput(f"top_k: a step of {dense.name} takes the model's own, {moe.top_k}, not {spec.top_k}")
    return Chosen(files=files, config=dense, dense=dense)


def cut_mlps(config: NetworkConfig, experts: int, top_k: int | None = None) -> NetworkConfig:
    """A dense network with every MLP cut into `experts`, all of them chosen with weight 1: the same function.

    Expert e has channels `e * F` to `(e + 1) * F - 1`. Its gate is a matrix of zeros, whose cost is a gate's.

    Raises:
        InvalidInput: `experts` does not divide the channels, or `top_k` is fewer: a dense network has no router that
            could choose, and an oracle would have to compute every expert first.
    """
    channels = config.intermediate_size
    if channels % experts:
        fitting = [n for n in range(1, channels + 1) if channels % n == 0]
        near = [n for n in fitting if n < experts][-1:] + [n for n in fitting if n > experts][:1]
        raise InvalidInput(
            f"experts: must divide the {channels} channels of the MLP of {config.name}, not {experts}; the nearest "
            f"that do are {choices(near)}"
        )
    if top_k not in (None, experts):
        raise InvalidInput(
            f"top_k: the network of {config.name} is dense and has no router that could choose {top_k} of {experts} "
            f"experts; only {experts} is allowed"
        )
    moe = MoEConfig(
        num_experts=experts,
        top_k=experts,
        intermediate_size=channels // experts,
        renormalize=False,
        routed_scaling_factor=CUT_SCALING,
        gate=CUT_GATE,
    )
    note = f"Every MLP is cut into {experts} experts, all of which are chosen with weight 1."
    return replace(config, moe=moe, notes=(*config.notes, note))
