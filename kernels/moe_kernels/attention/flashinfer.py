"""FlashInfer's attention, for what it has kernels for. Neither torch nor flashinfer is imported before a call.

It plans every call on the host from lengths that it reads there, so that it serves eager steps alone.

Shapes: B sequences, S new tokens, H query heads, Hkv heads of keys and values, D and Dv head sizes, L the latent's
size, P pages of a sequence at most.
"""

from __future__ import annotations

import functools
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from moe_kernels.attention.types import PagedPrefix

_HEAD_DIMS = (64, 128, 256)
_LATENT = (576, 512)
_SPLIT_HEADS = (192, 128)
_WORKSPACE = 128 * 2**20


def flashinfer_reasons(
    *,
    kind: str,
    device_type: str,
    dtype: str,
    head_dim: int,
    v_head_dim: int,
    page_size: int | None,
    compile: bool,
    graph: bool,
    **_: object,
) -> list[str]:
    """Why FlashInfer would not run an operation; arguments as for ``attention_reasons``."""
    if find_spec("flashinfer") is None:
        return ["flashinfer is not installed (pip install flashinfer-python)."]
    reasons = []
    sizes = (head_dim, v_head_dim)
    if device_type != "cuda":
        reasons.append(f"flashinfer runs on cuda, not {device_type}.")
    if dtype not in ("bf16", "fp16"):
        reasons.append(f"flashinfer attention computes in bf16 or fp16, not {dtype}.")
    if kind == "mla_decode":
        if sizes != _LATENT:
            reasons.append(f"flashinfer takes a latent of 576 columns of rank 512, not {head_dim} of {v_head_dim}.")
    elif not ((head_dim == v_head_dim and head_dim in _HEAD_DIMS) or (kind == "prefill" and sizes == _SPLIT_HEADS)):
        reasons.append(
            f"flashinfer takes head sizes 64, 128 or 256 (192 and 128 in prefill), not {head_dim} and {v_head_dim}."
        )
    if kind == "prefill" and page_size is not None:
        reasons.append("flashinfer prefill is not used with a paged prefix; use triton.")
    if compile or graph:
        where = "torch.compile" if compile else "a CUDA graph"
        reasons.append(f"flashinfer plans on the host in every call, which {where} cannot hold.")
    return reasons


def flashinfer_decode(
    q_BHD: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table_BP: torch.Tensor,
    seq_lens_B: torch.Tensor,
    *,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Return ``[B, H, Dv]``."""
    if q_BHD.shape[0] == 0:
        return q_BHD.new_empty(*q_BHD.shape[:2], v_cache.shape[3])
    bounds, pages, lens = _pages(k_cache, page_table_BP, seq_lens_B)
    page_size = k_cache.shape[1]
    wrapper = import_module("flashinfer").BatchDecodeWithPagedKVCacheWrapper(
        _workspace(q_BHD.device), "NHD", use_tensor_cores=True
    )
    wrapper.plan(
        bounds,
        pages,
        (lens - 1) % page_size + 1,
        q_BHD.shape[1],
        k_cache.shape[2],
        q_BHD.shape[2],
        page_size,
        window_left=-1 if window is None else window - 1,
        q_data_type=q_BHD.dtype,
        kv_data_type=k_cache.dtype,
        sm_scale=scale,
    )
    return _without_keys(wrapper.run(q_BHD.contiguous(), (k_cache, v_cache)), seq_lens_B)


def flashinfer_mla_decode(
    q_BHL: torch.Tensor,
    latent_cache: torch.Tensor,
    page_table_BP: torch.Tensor,
    seq_lens_B: torch.Tensor,
    *,
    kv_lora_rank: int,
    scale: float,
) -> torch.Tensor:
    """Return ``[B, H, kv_lora_rank]``."""
    import torch

    batch, heads, latent = q_BHL.shape
    if batch == 0:
        return q_BHL.new_empty(0, heads, kv_lora_rank)
    bounds, pages, lens = _pages(latent_cache, page_table_BP, seq_lens_B)
    wrapper = import_module("flashinfer.mla").BatchMLAPagedAttentionWrapper(_workspace(q_BHL.device))
    wrapper.plan(
        torch.arange(batch + 1, dtype=torch.int32, device=q_BHL.device),
        bounds,
        pages,
        lens,
        heads,
        kv_lora_rank,
        latent - kv_lora_rank,
        latent_cache.shape[1],
        False,
        scale,
        q_BHL.dtype,
        latent_cache.dtype,
    )
    q_nope, q_rope = q_BHL[..., :kv_lora_rank].contiguous(), q_BHL[..., kv_lora_rank:].contiguous()
    out = wrapper.run(q_nope, q_rope, latent_cache[..., :kv_lora_rank], latent_cache[..., kv_lora_rank:])
    return _without_keys(out, seq_lens_B)


def flashinfer_prefill(
    q_SHD: torch.Tensor,
    k_SHD: torch.Tensor,
    v_SHD: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    scale: float,
    causal: bool,
    window: int | None,
    prefix: PagedPrefix | None,
) -> torch.Tensor:
    """Return ``[S, H, Dv]``; ``prefix`` is None, as `flashinfer_reasons` refuses others."""
    from moe_kernels.attention.reference import checked_bounds

    assert prefix is None
    rows = checked_bounds(cu_seqlens, q_SHD.shape[0])[-1]
    out = q_SHD.new_zeros(*q_SHD.shape[:2], v_SHD.shape[2])
    if rows == 0:
        return out
    wrapper = import_module("flashinfer").BatchPrefillWithRaggedKVCacheWrapper(_workspace(q_SHD.device), "NHD")
    wrapper.plan(
        cu_seqlens,
        cu_seqlens,
        q_SHD.shape[1],
        k_SHD.shape[1],
        q_SHD.shape[2],
        head_dim_vo=v_SHD.shape[2],
        causal=causal,
        window_left=-1 if window is None else window - 1,
        sm_scale=scale,
        q_data_type=q_SHD.dtype,
        kv_data_type=k_SHD.dtype,
    )
    out[:rows] = wrapper.run(*(tensor[:rows].contiguous() for tensor in (q_SHD, k_SHD, v_SHD)))
    return out


def _pages(
    cache: torch.Tensor, page_table_BP: torch.Tensor, seq_lens_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(bounds ``[B + 1]``, pages of all sequences in a row, lengths ``[B]``); a sequence of no keys gets one slot."""
    import torch

    page_size, most = cache.shape[1], page_table_BP.shape[1]
    lens = seq_lens_B.clamp(1, max(1, most * page_size))
    count = (lens + page_size - 1) // page_size
    bounds = torch.nn.functional.pad(count.cumsum(0, dtype=torch.int32), (1, 0))
    used = torch.arange(most, device=lens.device) < count[:, None]
    # Entries before a window, or of a sequence of no keys, may be anything.
    return bounds, page_table_BP[used].clamp(0, cache.shape[0] - 1), lens


def _without_keys(out: torch.Tensor, seq_lens_B: torch.Tensor) -> torch.Tensor:
    return out.masked_fill((seq_lens_B <= 0)[:, None, None], 0.0)


@functools.cache
def _workspace(device: torch.device) -> Any:
    import torch

    return torch.zeros(_WORKSPACE, dtype=torch.uint8, device=device)
