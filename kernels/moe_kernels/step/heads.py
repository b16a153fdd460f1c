"""Public products with a matrix of every head; ``impl`` and ``pdl`` as in ``moe_kernels.step.api``.

Shapes: S rows, H heads, N part of a head without position, C latent, V value of a head.
"""

from __future__ import annotations

import torch

from moe_kernels.step import ops
from moe_kernels.step.checks import check_like
from moe_kernels.step.reference import head_products_reference
from moe_kernels.step.rules import resolve_step_impl
from moe_kernels.types import DTYPE_NAME


def absorb_queries(
    q_nope_SHN: torch.Tensor,
    w_uk_HNC: torch.Tensor,
    q_SHC_out: torch.Tensor,
    *,
    impl: str | None = None,
    pdl: bool = False,
) -> None:
    """Bring queries to the latent: ``out[s, h] = round(q[s, h] . w_uk[h])``, sums in float32.

    Args:
        q_nope_SHN: ``[S, H, N]``.
        w_uk_HNC: ``[H, N, C]``.
        q_SHC_out: ``[S, H, C]``, written; ``q_SHL[..., :C]`` of ``latent_turn_and_write``, for one.

    All in one dtype and of any strides.
    """
    rows, heads = _check(q_nope_SHN, "q_nope_SHN", w_uk_HNC, "w_uk_HNC", 1)
    check_like("q_SHC_out", q_SHC_out, (rows, heads, w_uk_HNC.shape[2]), "q_nope_SHN", q_nope_SHN)
    if resolve_step_impl(impl, q_nope_SHN.device.type) == "triton":
        ops.head_products(q_nope_SHN, w_uk_HNC, q_SHC_out, pdl)
    else:
        q_SHC_out.copy_(head_products_reference(q_nope_SHN, w_uk_HNC))


def expand_values(
    mixed_SHC: torch.Tensor, w_uv_HVC: torch.Tensor, *, impl: str | None = None, pdl: bool = False
) -> torch.Tensor:
    """Make values of mixed latents: ``out[s, h] = round(w_uv[h] . mixed[s, h])``, sums in float32.

    Args:
        mixed_SHC: ``[S, H, C]``.
        w_uv_HVC: ``[H, V, C]``.

    Both in one dtype and of any strides.

    Returns:
        ``[S, H, V]``, contiguous.
    """
    rows, heads = _check(mixed_SHC, "mixed_SHC", w_uv_HVC, "w_uv_HVC", 2)
    w_HCV = w_uv_HVC.transpose(1, 2)
    if resolve_step_impl(impl, mixed_SHC.device.type) == "triton":
        out_SHV = mixed_SHC.new_empty(rows, heads, w_uv_HVC.shape[1])
        ops.head_products(mixed_SHC, w_HCV, out_SHV, pdl)
        return out_SHV
    return head_products_reference(mixed_SHC, w_HCV).contiguous()


def _check(a: torch.Tensor, a_name: str, w: torch.Tensor, w_name: str, inputs_at: int) -> tuple[int, int]:
    if a.dim() != 3 or 0 in a.shape[1:] or a.dtype not in DTYPE_NAME:
        allowed = ", ".join(DTYPE_NAME.values())
        raise ValueError(f"{a_name} must be [S, H, size] of {allowed}; got {a.dtype} {list(a.shape)}.")
    rows, heads, size = a.shape
    if w.dim() != 3 or w.shape[0] != heads or w.shape[inputs_at] != size or 0 in w.shape:
        wanted = f"[{heads}, {size}, C]" if inputs_at == 1 else f"[{heads}, V, {size}]"
        raise ValueError(f"{w_name} must be {wanted}; got {list(w.shape)}.")
    check_like(w_name, w, tuple(w.shape), a_name, a)
    return rows, heads
