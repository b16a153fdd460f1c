"""The vocabulary: every axis a run can vary, in the field's own words. No torch here."""

from __future__ import annotations

from enum import StrEnum
from typing import TypeVar

from moe_kernels.formats import GROUP_SIZES as GROUP_SIZES
from moe_kernels.names import Quant as Quant  # the format of weights and arithmetic

from workbench.errors import InvalidInput, choices

E = TypeVar("E", bound=StrEnum)


class Subject(StrEnum):
    """What is timed: one MoE layer, or a whole model's prefill and the decode steps after it."""

    MOE_LAYER = "moe_layer"
    STEP = "step"


class Compile(StrEnum):
    """`torch.compile` mode; the last two record CUDA graphs of inductor's own."""

    NONE = "none"
    DEFAULT = "default"
    MAX_AUTOTUNE_NO_CUDAGRAPHS = "max-autotune-no-cudagraphs"
    REDUCE_OVERHEAD = "reduce-overhead"
    MAX_AUTOTUNE = "max-autotune"

    @property
    def owns_graphs(self) -> bool:
        """Whether inductor records CUDA graphs itself in this mode."""
        return self in (Compile.REDUCE_OVERHEAD, Compile.MAX_AUTOTUNE)


class Graph(StrEnum):
    """CUDA graph around the layer, or around each decode step."""

    DISABLED = "disabled"
    FULL = "full"


class ActivationScale(StrEnum):
    """Where the scale of fp8_tensor's activations comes from: worked out at each call, or fixed beforehand."""

    DYNAMIC = "dynamic"
    STATIC = "static"


class Reduction(StrEnum):
    """How the parts of a split K loop are added up: in a fixed order, or as they come, by atomics."""

    DETERMINISTIC = "deterministic"
    ATOMIC = "atomic"


class Mla(StrEnum):
    """How multi-head latent attention is computed.

    `absorbed`: queries go into the latent space, which all heads share; `expanded`: keys and values are made a head.
    """

    ABSORBED = "absorbed"
    EXPANDED = "expanded"


class Fusion(StrEnum):
    """Whether a step's small kernels are fused.

    `on`: those between products are one kernel where they can be (norm with residual, heads turned and kept), and
    shared experts run inside the MoE kernel; `off`: each is its own.
    """

    OFF = "off"
    ON = "on"


class CompileScope(StrEnum):
    """How much of a decode step `torch.compile` sees: `all` of it, or everything but its MoE layers."""

    ALL = "all"
    SKIP_MOE = "skip_moe"


class RoutingKind(StrEnum):
    """Which experts the tokens choose.

    `model`: the model's own router (an oracle router where a dense MLP was cut into experts); `balanced`: every expert
    equally often; `uniform`: independent uniform choices without repeats; `zipf`: skewed by `zipf_exponent`;
    `single_expert`: every token chooses the same `top_k` experts.
    """

    MODEL = "model"
    BALANCED = "balanced"
    UNIFORM = "uniform"
    ZIPF = "zipf"
    SINGLE_EXPERT = "single_expert"


class L2(StrEnum):
    """State of the last-level cache before each sample."""

    COLD = "cold"
    HOT = "hot"


class Cache(StrEnum):
    """State of the compile and kernel caches before the first call: `cold` starts from an empty folder."""

    WARM = "warm"
    COLD = "cold"


BUILTIN_BACKENDS = ("reference", "torch_grouped_mm", "triton", "triton_fp4")
PEER_BACKENDS = ("deep_gemm",)
BACKENDS = (*BUILTIN_BACKENDS, *PEER_BACKENDS)
"""Backends known by name: our own, and those of others that `workbench.peers` brings in where they are installed."""

ATTENTION_BACKENDS = ("reference", "sdpa", "triton")
"""Attention backends of our own; others come in by `moe_kernels.attention.register_attention_backend`."""


def resolve(kind: type[E], value: object, field: str) -> E:
    """Return `value` as a member of `kind`.

    Raises:
        InvalidInput: names `field` and lists the values it allows.
    """
    try:
        return kind(str(value))
    except ValueError:
        raise InvalidInput(f"{field}: must be {choices(kind)}, not {value!r}") from None
