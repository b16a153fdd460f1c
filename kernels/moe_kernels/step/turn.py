"""Public rotary position with the write to paged caches; ``impl`` and ``pdl`` as in ``moe_kernels.step.api``.

A turn is (cos, sin), float32 ``[S, 1, R]`` each, the sine with the sign that its half takes: dimension i turns with
dimension i + R / 2. A slot is ``page * page_size + offset``, int64 or int32; no slot may come twice, and all must be
within the cache (the Triton kernels write nothing for a row whose slot is not). Rows that are written to caches are the
very rows that are returned.

Shapes: S rows, H query heads, G key and value heads, C head size; of latent attention N and R parts of a head without
and with position, C latent, L = C + R.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from moe_kernels.step import ops
from moe_kernels.step.checks import check_cache, check_like, check_rows, check_slots, check_turn
from moe_kernels.step.reference import Turn, latent_turn_and_write_reference, turn_and_write_reference
from moe_kernels.step.rules import resolve_step_impl


class Turned(NamedTuple):
    """Queries, keys and values of the rows.

    Attributes:
        q_SHC, k_SGC: turned; views of one tensor ``[S, H + G, C]``.
        v_SGC: a view of what was given.
    """

    q_SHC: torch.Tensor  # noqa: N815
    k_SGC: torch.Tensor  # noqa: N815
    v_SGC: torch.Tensor  # noqa: N815


class LatentTurned(NamedTuple):
    """Queries and latents of the rows.

    Attributes:
        q_nope_SHN: the queries' part without position, a view of what was given.
        q_SHL: new and contiguous: the turned part in its last R columns; the others are undefined, for
            ``absorb_queries`` to fill.
        latent_SL: ``[S, L]``, new and contiguous: the normed latent, then the turned shared key.
    """

    q_nope_SHN: torch.Tensor  # noqa: N815
    q_SHL: torch.Tensor  # noqa: N815
    latent_SL: torch.Tensor  # noqa: N815


def turn_and_write(
    qkv_SN: torch.Tensor,
    turn: Turn,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots_S: torch.Tensor,
    *,
    heads: int,
    kv_heads: int,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    impl: str | None = None,
    pdl: bool = False,
) -> Turned:
    """Norm queries and keys where asked, turn them, and keep keys and values.

    With norms, ``x = round(norm * (x * rsqrt(mean(x^2) + eps)))`` for every head; then
    ``x = round(x * cos + half(x) * sin)``. Without norms the result is bit for bit that of plain code.

    Args:
        qkv_SN: ``[S, (H + 2 G) C]``: queries, keys, values.
        turn: of the whole head, R = C.
        k_cache, v_cache: ``[pages, page_size, G, C]`` in the dtype of the rows, any strides; written.
        slots_S: ``[S]``.
        heads, kv_heads: H and G, at least 1.
        q_norm, k_norm: ``[C]``, both or none.
        eps: of the norms.
    """
    check_rows("qkv_SN", qkv_SN)
    if heads < 1 or kv_heads < 1:
        raise ValueError(f"heads and kv_heads must be at least 1; got {heads} and {kv_heads}.")
    rows, total = qkv_SN.shape[0], heads + 2 * kv_heads
    if qkv_SN.shape[1] % total:
        raise ValueError(f"qkv_SN must be [S, a multiple of {total} heads]; got {list(qkv_SN.shape)}.")
    size = qkv_SN.shape[1] // total
    check_turn(turn, rows, size, qkv_SN)
    check_slots(slots_S, rows, qkv_SN)
    check_cache("k_cache", k_cache, (kv_heads, size), qkv_SN)
    check_cache("v_cache", v_cache, (kv_heads, size), qkv_SN)
    if k_cache.shape[:2] != v_cache.shape[:2]:
        raise ValueError(
            f"k_cache and v_cache must have the same pages; got {list(k_cache.shape)} and {list(v_cache.shape)}."
        )
    if (q_norm is None) != (k_norm is None):
        raise ValueError("q_norm and k_norm must be given together.")
    for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
        if norm is not None:
            check_like(name, norm, (size,), "qkv_SN", qkv_SN)
    arguments = (qkv_SN, *turn, k_cache, v_cache, slots_S, heads, kv_heads, q_norm, k_norm, eps)
    if resolve_step_impl(impl, qkv_SN.device.type) == "triton":
        both = ops.turn_and_write(*arguments, pdl)
    else:
        both = turn_and_write_reference(*arguments)
    v_SGC = qkv_SN.unflatten(-1, (total, size))[:, heads + kv_heads :]
    return Turned(both[:, :heads], both[:, heads:], v_SGC)


def latent_turn_and_write(
    down_SN: torch.Tensor,
    turn: Turn,
    latent_cache: torch.Tensor,
    slots_S: torch.Tensor,
    *,
    heads: int,
    nope_dim: int,
    kv_norm: torch.Tensor,
    eps: float,
    q_SM: torch.Tensor | None = None,
    impl: str | None = None,
    pdl: bool = False,
) -> LatentTurned:
    """Norm the latent, turn the shared key and the queries' part with position, and keep latent and key.

    ``latent = round(kv_norm * (c * rsqrt(mean(c^2) + eps)))``; ``x = round(x * cos + half(x) * sin)``. What is turned
    is bit for bit that of plain code, the norm is within one rounding of it.

    Args:
        down_SN: ``[S, N]``: what may stand first (whole queries ``[H (N + R)]``, or their low rank), the latent
            ``[C]``, the shared key ``[R]``.
        turn: of R.
        latent_cache: ``[pages, page_size, L]`` in the dtype of the rows, any strides; written.
        slots_S: ``[S]``.
        heads: H, at least 1.
        nope_dim: part of a query's head without position.
        kv_norm: ``[C]``, of the latent.
        eps: of the norm.
        q_SM: ``[S, H (N + R)]``, queries that come from elsewhere; None: they stand first in ``down_SN``.
    """
    check_rows("down_SN", down_SN)
    if heads < 1 or nope_dim < 0:
        raise ValueError(f"heads must be at least 1 and nope_dim at least 0; got {heads} and {nope_dim}.")
    rows = down_SN.shape[0]
    rope_dim = check_turn(turn, rows, None, down_SN)
    if kv_norm.dim() != 1 or kv_norm.shape[0] == 0:
        raise ValueError(f"kv_norm must be [C], the latent's size; got {list(kv_norm.shape)}.")
    rank = kv_norm.shape[0]
    check_like("kv_norm", kv_norm, (rank,), "down_SN", down_SN)
    width, queries = rank + rope_dim, heads * (nope_dim + rope_dim)
    if q_SM is not None:
        check_like("q_SM", q_SM, (rows, queries), "down_SN", down_SN)
        if down_SN.shape[1] < width:
            raise ValueError(f"down_SN must be [S, at least {width}]; got {list(down_SN.shape)}.")
    else:
        check_rows("down_SN", down_SN, queries + width)
        q_SM = down_SN[:, :queries]
    check_slots(slots_S, rows, down_SN)
    check_cache("latent_cache", latent_cache, (width,), down_SN)
    q_SHL = down_SN.new_empty(rows, heads, width)
    arguments = (q_SM, down_SN, *turn, kv_norm, latent_cache, q_SHL, slots_S, nope_dim, eps)
    if resolve_step_impl(impl, down_SN.device.type) == "triton":
        latent_SL = ops.latent_turn_and_write(*arguments, pdl)
    else:
        latent_SL = latent_turn_and_write_reference(*arguments)
    return LatentTurned(q_SM.unflatten(-1, (heads, nope_dim + rope_dim))[..., :nope_dim], q_SHL, latent_SL)
