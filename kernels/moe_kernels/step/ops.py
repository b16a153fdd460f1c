"""torch.library schemas, fakes and dispatch of a step's kernels.

The ops are opaque to the compiler: what they launch depends on the row count at run time. Caches and buffers that they
write are declared. They are for inference; no gradient is defined.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from moe_kernels.experts.rules import TRITON_INSTALLED, TRITON_INTERPRETED
from moe_kernels.step import reference as plain

_LIBRARY = torch.library.Library("moe_kernels", "FRAGMENT")
_SCHEMAS = {
    "rms_norm": "(Tensor x, Tensor weight, float eps, bool pdl) -> Tensor",
    "add_rms_norm": "(Tensor x, Tensor delta, Tensor? also, Tensor weight, float eps, bool pdl) -> (Tensor, Tensor)",
    "silu_mul": "(Tensor gate_up, bool pdl) -> Tensor",
    "turn_and_write": "(Tensor qkv, Tensor cos, Tensor sin, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slots, "
    "int heads, int kv_heads, Tensor? q_norm, Tensor? k_norm, float eps, bool pdl) -> Tensor",
    "latent_turn_and_write": "(Tensor q, Tensor down, Tensor cos, Tensor sin, Tensor kv_norm, "
    "Tensor(a!) latent_cache, Tensor(b!) q_out, Tensor slots, int nope_dim, float eps, bool pdl) -> Tensor",
    "head_products": "(Tensor a, Tensor w, Tensor(a!) out, bool pdl) -> ()",
    "router_logits": "(Tensor x, Tensor weight, bool pdl) -> Tensor",
}


def _launched(name: str, pick: Callable[[Any], Any] = lambda result: result) -> Callable[..., Any]:
    def run(first: torch.Tensor, *rest: Any) -> Any:
        from moe_kernels.step import launch

        other = first.is_cuda and first.device.index != torch.cuda.current_device()
        with torch.cuda.device(first.device) if other else nullcontext():
            return pick(getattr(launch, name)(first, *rest))

    return run


_norm = _launched("launch_norm", lambda both: both[1])
_TRITON: dict[str, Callable[..., Any]] = {
    "rms_norm": lambda x, weight, eps, pdl: _norm(x, None, None, weight, eps, pdl),
    "add_rms_norm": _launched("launch_norm"),
    "silu_mul": _launched("launch_silu_mul"),
    "turn_and_write": _launched("launch_turn"),
    "latent_turn_and_write": _launched("launch_latent_turn"),
    "head_products": _launched("launch_head_products"),
    "router_logits": _launched("launch_router"),
}
_PLAIN: dict[str, Callable[..., Any]] = {
    "rms_norm": lambda x, weight, eps, _pdl: plain.rms_norm_reference(x, weight, eps),
    "add_rms_norm": lambda *a: plain.add_rms_norm_reference(*a[:-1]),
    "silu_mul": lambda x, _pdl: plain.silu_mul_reference(x),
    "turn_and_write": lambda *a: plain.turn_and_write_reference(*a[:-1]),
    "latent_turn_and_write": lambda *a: plain.latent_turn_and_write_reference(*a[:-1]),
    "head_products": lambda a, w, out, _pdl: (out.copy_(plain.head_products_reference(a, w)), None)[1],
    "router_logits": lambda x, weight, _pdl: plain.router_logits_reference(x, weight),
}
_FAKES: dict[str, Callable[..., Any]] = {
    "rms_norm": lambda x, *_: x.new_empty(x.shape),
    "add_rms_norm": lambda x, *_: (x.new_empty(x.shape), x.new_empty(x.shape)),
    "silu_mul": lambda x, *_: x.new_empty(x.shape[0], x.shape[1] // 2),
    "turn_and_write": lambda qkv, _cos, _sin, k_cache, _v, _slots, heads, kv_heads, *_: qkv.new_empty(
        qkv.shape[0], heads + kv_heads, k_cache.shape[3]
    ),
    "latent_turn_and_write": lambda _q, down, _cos, _sin, _norm, _cache, q_out, *_: down.new_empty(
        q_out.shape[0], q_out.shape[2]
    ),
    "head_products": lambda *_: None,
    "router_logits": lambda x, weight, *_: x.new_empty(x.shape[0], weight.shape[0], dtype=torch.float32),
}

for _name, _schema in _SCHEMAS.items():
    _LIBRARY.define(_name + _schema)
    # Triton is optional: the specification runs on every device.
    _LIBRARY.impl(_name, _TRITON[_name] if TRITON_INTERPRETED else _PLAIN[_name], "CPU")
    _LIBRARY.impl(_name, _TRITON[_name] if TRITON_INSTALLED else _PLAIN[_name], "CUDA")
    torch.library.register_fake(f"moe_kernels::{_name}", _FAKES[_name], lib=_LIBRARY)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, pdl: bool) -> torch.Tensor:
    """Call the registered op."""
    result: torch.Tensor = torch.ops.moe_kernels.rms_norm(x, weight, eps, pdl)
    return result


def add_rms_norm(
    x: torch.Tensor, delta: torch.Tensor, also: torch.Tensor | None, weight: torch.Tensor, eps: float, pdl: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call the registered op."""
    result: tuple[torch.Tensor, torch.Tensor] = torch.ops.moe_kernels.add_rms_norm(x, delta, also, weight, eps, pdl)
    return result


def silu_mul(gate_up: torch.Tensor, pdl: bool) -> torch.Tensor:
    """Call the registered op."""
    result: torch.Tensor = torch.ops.moe_kernels.silu_mul(gate_up, pdl)
    return result


def turn_and_write(*arguments: Any) -> torch.Tensor:
    """Call the registered op with the arguments of its schema."""
    result: torch.Tensor = torch.ops.moe_kernels.turn_and_write(*arguments)
    return result


def latent_turn_and_write(*arguments: Any) -> torch.Tensor:
    """Call the registered op with the arguments of its schema."""
    result: torch.Tensor = torch.ops.moe_kernels.latent_turn_and_write(*arguments)
    return result


def head_products(a: torch.Tensor, w: torch.Tensor, out: torch.Tensor, pdl: bool) -> None:
    """Call the registered op, which writes ``out``."""
    torch.ops.moe_kernels.head_products(a, w, out, pdl)


def router_logits(x: torch.Tensor, weight: torch.Tensor, pdl: bool) -> torch.Tensor:
    """Call the registered op."""
    result: torch.Tensor = torch.ops.moe_kernels.router_logits(x, weight, pdl)
    return result
