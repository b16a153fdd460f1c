"""Mixture-of-Experts kernels: routing, alignment, quantisation, fused experts, attention, each with a plain reference.

Importing the package loads neither torch nor triton; each name is loaded from its module when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_kernels.align.api import Alignment as Alignment
    from moe_kernels.align.api import moe_align as moe_align
    from moe_kernels.attention.api import PagedPrefix as PagedPrefix
    from moe_kernels.attention.api import decode_attention as decode_attention
    from moe_kernels.attention.api import mla_decode_attention as mla_decode_attention
    from moe_kernels.attention.api import prefill_attention as prefill_attention
    from moe_kernels.attention.registry import register_attention_backend as register_attention_backend
    from moe_kernels.experts.api import fused_experts as fused_experts
    from moe_kernels.experts.api import resolve_impl as resolve_impl
    from moe_kernels.experts.config import ResolvedConfig as ResolvedConfig
    from moe_kernels.experts.config import resolve_config as resolve_config
    from moe_kernels.experts.support import supports_impl as supports_impl
    from moe_kernels.experts.weights import ExpertWeights as ExpertWeights
    from moe_kernels.names import Impl as Impl
    from moe_kernels.names import Quant as Quant
    from moe_kernels.projections.api import linear as linear
    from moe_kernels.projections.api import resolve_linear_impl as resolve_linear_impl
    from moe_kernels.projections.weights import LinearWeights as LinearWeights
    from moe_kernels.quant.api import quantize_activation as quantize_activation
    from moe_kernels.registry import backends as backends
    from moe_kernels.registry import register_backend as register_backend
    from moe_kernels.registry import unregister_backend as unregister_backend
    from moe_kernels.routing.api import select_experts as select_experts
    from moe_kernels.routing.prepare import prepare_routing as prepare_routing
    from moe_kernels.types import Routing as Routing

_HOME = {
    "Alignment": "moe_kernels.align.api",
    "ExpertWeights": "moe_kernels.experts.weights",
    "Impl": "moe_kernels.names",
    "LinearWeights": "moe_kernels.projections.weights",
    "PagedPrefix": "moe_kernels.attention.api",
    "Quant": "moe_kernels.names",
    "ResolvedConfig": "moe_kernels.experts.config",
    "Routing": "moe_kernels.types",
    "backends": "moe_kernels.registry",
    "decode_attention": "moe_kernels.attention.api",
    "fused_experts": "moe_kernels.experts.api",
    "linear": "moe_kernels.projections.api",
    "mla_decode_attention": "moe_kernels.attention.api",
    "moe_align": "moe_kernels.align.api",
    "prefill_attention": "moe_kernels.attention.api",
    "prepare_routing": "moe_kernels.routing.prepare",
    "quantize_activation": "moe_kernels.quant.api",
    "register_attention_backend": "moe_kernels.attention.registry",
    "register_backend": "moe_kernels.registry",
    "resolve_config": "moe_kernels.experts.config",
    "resolve_impl": "moe_kernels.experts.api",
    "resolve_linear_impl": "moe_kernels.projections.api",
    "select_experts": "moe_kernels.routing.api",
    "supports_impl": "moe_kernels.experts.support",
    "unregister_backend": "moe_kernels.registry",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'moe_kernels' has no attribute {name!r}; it has {', '.join(__all__)}.")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
