"""The kernels of a step in plain PyTorch: the specification.

Where a value is rounded to the dtype of the arguments, the comment says so; all else is float32.

Shapes: S rows, D model, F channels, E experts, H query heads, G key and value heads, C head size; of latent attention N
and R parts of a head without and with position, C latent, L = C + R; I inputs and J outputs of a head.
"""

from __future__ import annotations

import torch

Turn = tuple[torch.Tensor, torch.Tensor]


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``round(x / sqrt(mean(x^2) + eps) * weight)`` over the last dimension."""
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)


def add_rms_norm_reference(
    x_SD: torch.Tensor, delta_SD: torch.Tensor, also_SD: torch.Tensor | None, weight_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum, norm of the sum as it is rounded)."""
    if also_SD is not None:
        delta_SD = delta_SD + also_SD  # rounded
    sum_SD = x_SD + delta_SD  # rounded
    return sum_SD, rms_norm_reference(sum_SD, weight_D, eps)


def silu_mul_reference(gate_up_SF2: torch.Tensor) -> torch.Tensor:
    """``round(round(silu(gate)) * up)``."""
    gate_SF, up_SF = gate_up_SF2.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate_SF) * up_SF


def turned_reference(x_SHR: torch.Tensor, turn: Turn) -> torch.Tensor:
    """``round(x * cos + other half * sin)``, the products rounded to float32 before their sum."""
    cos_S1R, sin_S1R = turn
    other_SHR = x_SHR.roll(x_SHR.shape[-1] // 2, -1)
    return (x_SHR * cos_S1R + other_SHR * sin_S1R).to(x_SHR.dtype)


def write_reference(cache: torch.Tensor, rows_S: torch.Tensor, slots_S: torch.Tensor) -> None:
    """``cache [pages, page_size, ...]`` at ``page * page_size + offset``, with any strides."""
    page_size = cache.shape[1]
    slots_S = slots_S.to(torch.int64)
    cache.index_put_((slots_S // page_size, slots_S % page_size), rows_S)


def turn_and_write_reference(
    qkv_SN: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots_S: torch.Tensor,
    heads: int,
    kv_heads: int,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """Turned queries, then turned keys: ``[S, H + G, C]``; with norms, these are rounded before the turn."""
    both, kept = heads + kv_heads, k_cache.shape[-1]
    qkv = qkv_SN.unflatten(-1, (both + kv_heads, kept))
    before = qkv[:, :both]
    if q_norm is not None and k_norm is not None:
        normed_q, normed_k = before.split([heads, kv_heads], dim=1)
        before = torch.cat((rms_norm_reference(normed_q, q_norm, eps), rms_norm_reference(normed_k, k_norm, eps)), 1)
    out = turned_reference(before, (cos, sin))
    write_reference(k_cache, out[:, heads:], slots_S)
    write_reference(v_cache, qkv[:, both:], slots_S)
    return out


def latent_turn_and_write_reference(
    q_SM: torch.Tensor,
    down_SK: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv_norm: torch.Tensor,
    latent_cache: torch.Tensor,
    q_out_SHL: torch.Tensor,
    slots_S: torch.Tensor,
    nope_dim: int,
    eps: float,
) -> torch.Tensor:
    """Latent (normed, rounded) and shared key (turned, rounded): ``[S, L]``; writes both and the queries' turned part.

    ``down_SK`` ends with the latent and the shared key.
    """
    rank, heads = kv_norm.shape[0], q_out_SHL.shape[1]
    rope_dim = q_out_SHL.shape[2] - rank
    latent_SC, k_rope_SR = down_SK[:, -(rank + rope_dim) :].split([rank, rope_dim], dim=-1)
    q_rope_SHR = q_SM.unflatten(-1, (heads, nope_dim + rope_dim))[..., nope_dim:]
    both = turned_reference(torch.cat((q_rope_SHR, k_rope_SR[:, None]), 1), (cos, sin))
    q_out_SHL[..., rank:].copy_(both[:, :heads])
    latent_SL = torch.cat((rms_norm_reference(latent_SC, kv_norm, eps), both[:, heads]), -1)
    write_reference(latent_cache, latent_SL, slots_S)
    return latent_SL


def head_products_reference(a_SHI: torch.Tensor, w_HIJ: torch.Tensor) -> torch.Tensor:
    """``[S, H, J]``: sums in float32, rounded once."""
    product = torch.bmm(a_SHI.to(torch.float32).transpose(0, 1), w_HIJ.to(torch.float32))
    return product.transpose(0, 1).to(a_SHI.dtype)


def router_logits_reference(x_SD: torch.Tensor, weight_ED: torch.Tensor) -> torch.Tensor:
    """float32 ``[S, E]`` of operands that are upcast, with nothing rounded on the way."""
    return torch.nn.functional.linear(x_SD.to(torch.float32), weight_ED.to(torch.float32))
