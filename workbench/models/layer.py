"""From a spec to the layer it names."""

from __future__ import annotations

import torch

from workbench.devices import DeviceInfo
from workbench.models.cache import Captured
from workbench.models.checkpoint import MAX_ROWS, captured_layer, trained_bias
from workbench.models.dense_cut import DenseCut
from workbench.models.locate import ModelFiles, find_files
from workbench.models.random_layer import RandomLayer
from workbench.models.seeding import normal, normal_rows
from workbench.models.shapes import rank_shape
from workbench.models.source import LayerSource
from workbench.spec import RunSpec

__all__ = ["DenseCut", "LayerSource", "RandomLayer", "load_layer_source"]


# Rows of text captured at the least: reading a checkpoint takes far longer than a few windows more of it.
FIRST_ROWS = 2048


def load_layer_source(spec: RunSpec, device: DeviceInfo) -> LayerSource:
    """The layer that `spec` names, on `device`.

    A dense checkpoint is cut into experts. A Mixture-of-Experts configuration, and a dense model whose weights are
    not on this machine, get seeded random weights and inputs; `notes` and `resolved` say so. A correction bias of the
    gate is read from the safetensors beside the configuration where they hold one.

    Raises:
        InvalidInput: the model, `experts`, `top_k` or `tp_size` cannot be used; the sentence says why.
    """
    files = find_files(spec.model)
    shape = rank_shape(files.config, experts=spec.experts, top_k=spec.top_k, tp_size=spec.tp_size)
    place = torch.device(device.torch_device)
    if not shape.dense_source:
        return RandomLayer(shape, place, spec.seed, trained_bias(files))
    captured, notes = captured_layer(spec.model, files, max(spec.num_tokens, FIRST_ROWS))
    if captured is None:
        return DenseCut(shape, place, spec.seed, _random_mlp(files, spec.seed), random=True, notes=notes)

    def more(rows: int) -> Captured:
        again, _ = captured_layer(spec.model, files, rows)
        return again if again is not None else captured

    return DenseCut(shape, place, spec.seed, captured, random=False, more=more if files.weights else None, notes=notes)


def _random_mlp(files: ModelFiles, seed: int) -> Captured:
    """A dense MLP and inputs of a model's shape from a seed."""
    config = files.config
    hidden, channels = config.hidden_size, config.channels
    return Captured(
        gate=normal((channels, hidden), hidden**-0.5, seed, "gate_proj"),
        up=normal((channels, hidden), hidden**-0.5, seed, "up_proj"),
        down=normal((hidden, channels), channels**-0.5, seed, "down_proj"),
        hidden=normal_rows(MAX_ROWS, hidden, seed, "hidden"),
        layer=config.num_layers // 2,
        fingerprint="random",
    )
