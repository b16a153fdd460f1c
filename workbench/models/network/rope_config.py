"""How a model's rotary embedding is scaled, as its configuration says. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import log
from typing import Any

from workbench.errors import InvalidInput, choices

KINDS = ("none", "linear", "llama3", "yarn")
_NAMES = {"default": "none"}


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """A rotary position embedding.

    Attributes:
        theta: base of the wavelengths.
        kind: `none`, `linear`, `llama3` or `yarn`: how frequencies are stretched to a longer context.
        factor: by how much; 1 for none.
        original_max_position: context before it was stretched (llama3, yarn).
        low_freq_factor, high_freq_factor: of llama3: wavelengths longer than `original_max_position / low_freq_factor`
            are stretched, those shorter than `original_max_position / high_freq_factor` are kept.
        beta_fast, beta_slow: of yarn: turns within the original context above which a frequency is kept, and below
            which it is stretched.
        truncate: of yarn: whether the bounds between are rounded to whole dimensions.
        magnitude: multiplies cosine and sine.
        score_magnitude: multiplies the softmax's scale (DeepSeek's `mscale_all_dim`, squared).
        interleaved: pairs are neighbours (x0, x1), (x2, x3), ... in the checkpoint, rather than (x0, x_half), ...
    """

    theta: float = 10000.0
    kind: str = "none"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    magnitude: float = 1.0
    score_magnitude: float = 1.0
    interleaved: bool = False


def parse_rope(
    data: Mapping[str, Any], name: str, max_position: int, theta: float, *, latent: bool, interleaved: bool
) -> RopeConfig:
    """Read `rope_theta` and `rope_scaling`, or the newer `rope_parameters`, of a configuration.

    Args:
        data: the parsed config.json.
        name: of the model, for messages.
        max_position: the model's context.
        theta: the family's own base, taken where the configuration says none.
        latent: whether the model is DeepSeek's, whose `mscale_all_dim` scales the softmax too.
        interleaved: whether pairs are neighbours.

    Raises:
        InvalidInput: a kind that is not known, a value that is missing or amiss.
    """
    scaling = data.get("rope_parameters") or data.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise InvalidInput(f"model: rope_scaling in the configuration of {name} must be an object, not {scaling!r}")
    named = str(scaling.get("rope_type") or scaling.get("type") or "default")
    kind = _NAMES.get(named, named)
    if kind not in KINDS:
        raise InvalidInput(
            f"model: rope_scaling of {name} is of type {named}, which is not supported; "
            f"{choices(('default', *KINDS[1:]))} is"
        )
    if scaling.get("partial_rotary_factor", data.get("partial_rotary_factor")) not in (None, 1, 1.0):
        raise InvalidInput(f"model: partial_rotary_factor in the configuration of {name} must be 1")
    theta = _number({"rope_theta": data.get("rope_theta"), **scaling}, "rope_theta", name, theta)
    if kind == "none":
        return RopeConfig(theta=theta, interleaved=interleaved)
    original = int(
        _number(scaling, "original_max_position_embeddings", name, max_position if kind != "llama3" else None)
    )
    ratio = max_position / original if kind == "yarn" else None
    factor = _number(scaling, "factor", name, ratio)
    if kind == "linear":
        return RopeConfig(theta=theta, kind=kind, factor=factor, interleaved=interleaved)
    if kind == "llama3":
        low = _number(scaling, "low_freq_factor", name, None)
        high = _number(scaling, "high_freq_factor", name, None)
        if high <= low:
            raise InvalidInput(
                f"model: high_freq_factor in the configuration of {name} must be above its "
                f"low_freq_factor {low}, not {high}"
            )
        return RopeConfig(
            theta=theta,
            kind=kind,
            factor=factor,
            original_max_position=original,
            low_freq_factor=low,
            high_freq_factor=high,
            interleaved=interleaved,
        )
    all_dim = _number(scaling, "mscale_all_dim", name, 0.0, least=0.0)
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=factor,
        original_max_position=original,
        beta_fast=_number(scaling, "beta_fast", name, 32.0),
        beta_slow=_number(scaling, "beta_slow", name, 1.0),
        truncate=bool(scaling.get("truncate", True)),
        magnitude=_magnitude(scaling, name, factor, all_dim),
        score_magnitude=yarn_magnitude(factor, all_dim) ** 2 if latent and all_dim else 1.0,
        interleaved=interleaved,
    )


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """YaRN's correction for a context `factor` times as long: `0.1 * weight * ln(factor) + 1`."""
    return 1.0 if factor <= 1 else 0.1 * weight * log(factor) + 1.0


def _magnitude(scaling: Mapping[str, Any], name: str, factor: float, all_dim: float) -> float:
    if scaling.get("attention_factor") is not None:
        return _number(scaling, "attention_factor", name, None)
    own = _number(scaling, "mscale", name, 0.0, least=0.0)
    if own and all_dim:
        return yarn_magnitude(factor, own) / yarn_magnitude(factor, all_dim)
    return yarn_magnitude(factor)


def _number(
    data: Mapping[str, Any], key: str, name: str, default: float | None, *, least: float | None = None
) -> float:
    value = data.get(key)
    if value is None and default is not None:
        return float(default)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is None or not number or not (value > 0 if least is None else value >= least) or value == float("inf"):
        raise InvalidInput(
            f"model: {key} in the configuration of {name} must be a number "
            f"{'above 0' if least is None else f'of at least {least:g}'}, not {value!r}"
        )
    return float(value)
