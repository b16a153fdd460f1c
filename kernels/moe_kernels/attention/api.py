"""Public attention: checks and dispatch.

Shapes: B sequences, S new tokens of all of them, H query heads, Hkv heads of keys and values (H a multiple of it),
D and Dv head sizes, L the latent's size, P pages of a sequence at most.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from moe_kernels.attention import ops
from moe_kernels.attention.registry import find_attention_backend
from moe_kernels.attention.support import attention_reasons as attention_reasons
from moe_kernels.attention.support import resolve_attention_impl as resolve_attention_impl
from moe_kernels.attention.types import PagedPrefix as PagedPrefix
from moe_kernels.types import DTYPE_NAME

MAX_KV_SPLITS = 1024


def decode_attention(
    q_BHD: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table_BP: torch.Tensor,
    seq_lens_B: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    num_kv_splits: int | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    """Attend from the last token of each sequence to its cached keys and values, its own included.

    ``out[b, h] = sum over j of softmax_j(scale * q[b, h] . k[j, g]) * v[j, g]`` with ``g = h // (H / Hkv)`` and j from
    0, or ``seq_lens[b] - window``, to ``seq_lens[b] - 1``. Scores, softmax and sums are float32; the result is rounded
    once (``"sdpa"`` rounds as torch does, ``"triton"`` also rounds probabilities to the dtype of the values). Other
    slots never reach the result, whatever they hold. The same arguments give the same bits in every call. For
    inference: no gradient.

    Args:
        q_BHD: ``[B, H, D]``, float32, bfloat16 or float16; B may be 0.
        k_cache: ``[num_pages, page_size, Hkv, D]``, any strides.
        v_cache: ``[num_pages, page_size, Hkv, Dv]``, any strides.
        page_table_BP: int32 ``[B, P]``: page of slots ``p * page_size`` on; entries past a sequence may be anything.
        seq_lens_B: int32 ``[B]``, clamped to 0 and ``P * page_size``; 0 gives zeros.
        scale: of the scores.
        window: keys that are seen at most, the query's own included; None for all.
        num_kv_splits: parts that each sequence is cut into, for ``"triton"``: more than it has keys are allowed; None
            chooses by sizes and device.
        impl: ``"reference"`` (the specification), ``"sdpa"``, ``"triton"``, a registered name, or None for the best
            that runs these tensors (``resolve_attention_impl`` says which).

    Returns:
        ``[B, H, Dv]``, contiguous, in the dtype of ``q_BHD``.

    Raises:
        ValueError: tensors that do not fit together, or an option out of range.
        NotImplementedError: the named implementation does not run these tensors; the message says why.
    """
    _check_query("q_BHD", q_BHD, "[B, H, D]")
    _check_cache(q_BHD, k_cache, v_cache, page_table_BP, seq_lens_B, "seq_lens_B")
    _check_options(scale, window, num_kv_splits)
    chosen = _resolve("decode", q_BHD, v_cache, impl, window, page_size=k_cache.shape[1])
    _check_splits(num_kv_splits, chosen)
    backend = find_attention_backend(chosen)
    tensors = (q_BHD, k_cache, v_cache, page_table_BP, seq_lens_B)
    if backend is not None:
        foreign: torch.Tensor = backend.functions["decode"](*tensors, scale=scale, window=window)
        return foreign
    return ops.decode_attention(*tensors, scale=scale, window=window, num_kv_splits=num_kv_splits, impl=chosen)


def mla_decode_attention(
    q_BHL: torch.Tensor,
    latent_cache: torch.Tensor,
    page_table_BP: torch.Tensor,
    seq_lens_B: torch.Tensor,
    *,
    kv_lora_rank: int,
    scale: float,
    num_kv_splits: int | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    """Attend in latent space (MLA, absorbed): all heads share one key, whose first columns are the value.

    As ``decode_attention`` with one head of keys ``latent`` and values ``latent[..., :kv_lora_rank]``; what it says of
    numbers, unused slots and repeats holds here.

    Args:
        q_BHL: ``[B, H, L]``: the absorbed part (``kv_lora_rank`` columns), then the rotary part.
        latent_cache: ``[num_pages, page_size, L]``, any strides.
        page_table_BP, seq_lens_B, scale, num_kv_splits, impl: as for ``decode_attention``.
        kv_lora_rank: 1 to L.

    Returns:
        ``[B, H, kv_lora_rank]``, contiguous, in the dtype of ``q_BHL``.

    Raises:
        ValueError: tensors that do not fit together, or an option out of range.
        NotImplementedError: the named implementation does not run these tensors; the message says why.

    Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.
    """
    _check_query("q_BHL", q_BHL, "[B, H, L]")
    if latent_cache.dim() != 3:
        raise ValueError(f"latent_cache must be [num_pages, page_size, L]; got {list(latent_cache.shape)}.")
    if not 1 <= kv_lora_rank <= latent_cache.shape[2]:
        raise ValueError(
            f"kv_lora_rank must be from 1 to {latent_cache.shape[2]}, the latent's size; got {kv_lora_rank}."
        )
    k_cache = latent_cache.unsqueeze(2)
    v_cache = k_cache[..., :kv_lora_rank]
    _check_cache(q_BHL, k_cache, v_cache, page_table_BP, seq_lens_B, "seq_lens_B")
    _check_options(scale, None, num_kv_splits)
    chosen = _resolve("mla_decode", q_BHL, v_cache, impl, None, page_size=k_cache.shape[1])
    _check_splits(num_kv_splits, chosen)
    backend = find_attention_backend(chosen)
    if backend is not None:
        foreign: torch.Tensor = backend.functions["mla_decode"](
            q_BHL, latent_cache, page_table_BP, seq_lens_B, kv_lora_rank=kv_lora_rank, scale=scale
        )
        return foreign
    return ops.decode_attention(
        q_BHL,
        k_cache,
        v_cache,
        page_table_BP,
        seq_lens_B,
        scale=scale,
        window=None,
        num_kv_splits=num_kv_splits,
        impl=chosen,
    )


def prefill_attention(
    q_SHD: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    prefix: PagedPrefix | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    """Attend from new tokens of sequences of any lengths to each other and to what is cached before them.

    Sequence b has the rows ``cu_seqlens[b]`` to ``cu_seqlens[b + 1] - 1``, at positions that follow its prefix. A query
    sees the keys up to its own position (all of its sequence where not causal), with a window the last ``window`` of
    them. Numbers as for ``decode_attention``. Nothing in rows of no sequence, or in slots past a prefix, reaches
    another row.

    Args:
        q_SHD: ``[S, H, D]``, float32, bfloat16 or float16; S may be 0; any strides.
        k: ``[S, Hkv, D]``, any strides.
        v: ``[S, Hkv, Dv]``, any strides; for absorbed MLA a view of ``k``'s first columns.
        cu_seqlens: int32 ``[B + 1]``, from 0 up to S at most; sequences may be empty.
        scale: of the scores.
        causal: whether later tokens are hidden.
        window: keys that a query sees at most, its own included; None for all. Needs ``causal``.
        prefix: what is cached before the new tokens, or None.
        impl: as for ``decode_attention``.

    Returns:
        ``[S, H, Dv]``, contiguous, in the dtype of ``q_SHD``; rows from ``cu_seqlens[B]`` on are zero.

    Raises:
        ValueError: tensors that do not fit together, or an option out of range.
        NotImplementedError: the named implementation does not run these tensors; the message says why.
    """
    _check_query("q_SHD", q_SHD, "[S, H, D]")
    _check_new(q_SHD, k, v, cu_seqlens)
    _check_options(scale, window, None)
    if window is not None and not causal:
        raise ValueError("window needs causal; got causal=False.")
    page_size = None
    if prefix is not None:
        _check_cache(q_SHD, prefix.k_cache, prefix.v_cache, prefix.page_table_BP, prefix.prefix_lens_B, "prefix_lens_B")
        if prefix.k_cache.shape[2:] != k.shape[1:] or prefix.v_cache.shape[2:] != v.shape[1:]:
            raise ValueError(
                f"prefix must hold heads as k and v do, {list(k.shape[1:])} and {list(v.shape[1:])}; got "
                f"{list(prefix.k_cache.shape[2:])} and {list(prefix.v_cache.shape[2:])}."
            )
        if prefix.prefix_lens_B.shape[0] != cu_seqlens.shape[0] - 1:
            raise ValueError(
                f"prefix must hold {cu_seqlens.shape[0] - 1} sequences, as cu_seqlens does; got "
                f"{prefix.prefix_lens_B.shape[0]}."
            )
        page_size = prefix.k_cache.shape[1]
    chosen = _resolve("prefill", q_SHD, v[:, None], impl, window, page_size=page_size)
    backend = find_attention_backend(chosen)
    options: dict[str, Any] = {"scale": scale, "causal": causal, "window": window, "prefix": prefix}
    if backend is not None:
        foreign: torch.Tensor = backend.functions["prefill"](q_SHD, k, v, cu_seqlens, **options)
        return foreign
    return ops.prefill_attention(q_SHD, k, v, cu_seqlens, **options, impl=chosen)


def _resolve(
    kind: str, q: torch.Tensor, v_cache: torch.Tensor, impl: str | None, window: int | None, page_size: int | None
) -> str:
    compiling = torch.compiler.is_compiling()
    capturing = q.is_cuda and not compiling and torch.cuda.is_current_stream_capturing()
    return resolve_attention_impl(
        kind,
        device_type=q.device.type,
        dtype=DTYPE_NAME[q.dtype],
        num_heads=q.shape[1],
        num_kv_heads=v_cache.shape[2],
        head_dim=q.shape[2],
        v_head_dim=v_cache.shape[3],
        page_size=page_size,
        window=window,
        compile=compiling,
        graph=capturing,
        capability=_capability() if q.is_cuda else None,
        impl=impl,
    )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _capability() -> tuple[int, int] | None:
    """Compute capability where CUDA has been started anyhow; asking must not start it."""
    return torch.cuda.get_device_capability() if torch.cuda.is_initialized() else None


def _check_query(name: str, q: torch.Tensor, shape: str) -> None:
    if q.dim() != 3 or min(q.shape[1:]) < 1:
        raise ValueError(f"{name} must be {shape}; got {list(q.shape)}.")
    if q.dtype not in DTYPE_NAME:
        raise ValueError(f"{name} must be {', '.join(DTYPE_NAME.values())}; got {q.dtype}.")


def _check_cache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    lens: torch.Tensor,
    lens_name: str,
) -> None:
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.dim() != 4 or min(cache.shape) < 1:
            raise ValueError(f"{name} must be [num_pages, page_size, Hkv, head size]; got {list(cache.shape)}.")
    _check_heads(q, k_cache, v_cache, "k_cache", "v_cache")
    if page_table.dim() != 2 or page_table.dtype != torch.int32:
        raise ValueError(f"page_table_BP must be int32 [B, P]; got {page_table.dtype} {list(page_table.shape)}.")
    if lens.shape != page_table.shape[:1] or lens.dtype != torch.int32:
        raise ValueError(
            f"{lens_name} must be int32 [{page_table.shape[0]}], as page_table_BP has rows; got {lens.dtype} "
            f"{list(lens.shape)}."
        )
    if lens_name == "seq_lens_B" and lens.shape[0] != q.shape[0]:
        raise ValueError(f"seq_lens_B must hold {q.shape[0]} sequences, as the queries do; got {lens.shape[0]}.")
    if not q.device == page_table.device == lens.device:
        raise ValueError(
            f"page_table_BP and {lens_name} must be on the device of the queries, {q.device}; got "
            f"{page_table.device} and {lens.device}."
        )


def _check_new(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor) -> None:
    for name, new in (("k", k), ("v", v)):
        if new.dim() != 3 or new.shape[0] != q.shape[0] or min(new.shape[1:]) < 1:
            raise ValueError(f"{name} must be [{q.shape[0]}, Hkv, head size]; got {list(new.shape)}.")
    _check_heads(q, k, v, "k", "v")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1 or cu_seqlens.dtype != torch.int32:
        raise ValueError(f"cu_seqlens must be int32 [B + 1]; got {cu_seqlens.dtype} {list(cu_seqlens.shape)}.")
    if cu_seqlens.device != q.device:
        raise ValueError(f"cu_seqlens must be on the device of q_SHD, {q.device}; got {cu_seqlens.device}.")


def _check_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, k_name: str, v_name: str) -> None:
    """Checks that keys and values, the last two axes heads and columns, fit the queries and each other."""
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"{k_name} must have the queries' head size, {q.shape[-1]}; got {k.shape[-1]}.")
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(
            f"{v_name} must have the shape of {k_name} but for the head size; got {list(v.shape)} beside "
            f"{list(k.shape)}."
        )
    if q.shape[1] % k.shape[-2]:
        raise ValueError(f"the queries' {q.shape[1]} heads must be a multiple of {k_name}'s, {k.shape[-2]}.")
    for name, tensor in ((k_name, k), (v_name, v)):
        if tensor.dtype != q.dtype or tensor.device != q.device:
            raise ValueError(
                f"{name} must have the dtype and device of the queries, {q.dtype} on {q.device}; got {tensor.dtype} on "
                f"{tensor.device}."
            )


def _check_options(scale: float, window: int | None, num_kv_splits: int | None) -> None:
    if not math.isfinite(scale):
        raise ValueError(f"scale must be finite; got {scale}.")
    if window is not None and window < 1:
        raise ValueError(f"window must be None or at least 1; got {window}.")
    if num_kv_splits is not None and not 1 <= num_kv_splits <= MAX_KV_SPLITS:
        raise ValueError(f"num_kv_splits must be None or from 1 to {MAX_KV_SPLITS}; got {num_kv_splits}.")


def _check_splits(num_kv_splits: int | None, chosen: str) -> None:
    if num_kv_splits is not None and chosen != "triton":
        raise ValueError(f"num_kv_splits is for impl 'triton'; this call runs {chosen!r}.")
