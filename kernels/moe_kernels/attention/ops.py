"""torch.library schemas, fakes and dispatch of attention.

The ops are opaque to the compiler: what they launch depends on sizes met at run time, and a step that is compiled or
cut into pieces is cut here. They are for inference; no gradient is defined.
"""

from __future__ import annotations

import torch

from moe_kernels.attention.reference import decode_reference, prefill_reference
from moe_kernels.attention.sdpa import decode_sdpa, prefill_sdpa
from moe_kernels.attention.types import PagedPrefix

_LIBRARY = torch.library.Library("moe_kernels", "FRAGMENT")
_LIBRARY.define(
    "decode_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor page_table, Tensor seq_lens, float scale, "
    "int window, int num_kv_splits, str impl, int[] config) -> Tensor"
)
_LIBRARY.define(
    "prefill_attention(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, float scale, bool causal, int window, "
    "Tensor? prefix_k, Tensor? prefix_v, Tensor? page_table, Tensor? prefix_lens, str impl, int[] config) -> Tensor"
)


def _decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    window: int,
    num_kv_splits: int,
    impl: str,
    config: list[int],
) -> torch.Tensor:
    if impl == "triton":
        from moe_kernels.attention.launch import launch_decode

        with torch.cuda.device(q.device if q.is_cuda else -1):
            return launch_decode(q, k_cache, v_cache, page_table, seq_lens, scale, window, num_kv_splits, config)
    run = {"reference": decode_reference, "sdpa": decode_sdpa}[impl]
    out: torch.Tensor = run(q, k_cache, v_cache, page_table, seq_lens, scale, window or None)
    return out.contiguous()


def _decode_fake(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *_: object) -> torch.Tensor:
    return q.new_empty(q.shape[0], q.shape[1], v_cache.shape[3])


def _prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    scale: float,
    causal: bool,
    window: int,
    prefix_k: torch.Tensor | None,
    prefix_v: torch.Tensor | None,
    page_table: torch.Tensor | None,
    prefix_lens: torch.Tensor | None,
    impl: str,
    config: list[int],
) -> torch.Tensor:
    prefix = None
    if prefix_k is not None:
        assert prefix_v is not None and page_table is not None and prefix_lens is not None  # noqa: PT018
        prefix = PagedPrefix(prefix_k, prefix_v, page_table, prefix_lens)
    if impl == "triton":
        from moe_kernels.attention.launch import launch_prefill

        with torch.cuda.device(q.device if q.is_cuda else -1):
            return launch_prefill(q, k, v, cu_seqlens, scale, causal, window, prefix, config)
    run = {"reference": prefill_reference, "sdpa": prefill_sdpa}[impl]
    out: torch.Tensor = run(q, k, v, cu_seqlens, scale, causal, window or None, prefix)
    return out.contiguous()


def _prefill_fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: object) -> torch.Tensor:
    return q.new_empty(q.shape[0], q.shape[1], v.shape[2])


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("decode_attention", _decode, _key)
    _LIBRARY.impl("prefill_attention", _prefill, _key)
torch.library.register_fake("moe_kernels::decode_attention", _decode_fake, lib=_LIBRARY)
torch.library.register_fake("moe_kernels::prefill_attention", _prefill_fake, lib=_LIBRARY)


def decode_attention(
    q_BHD: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table_BP: torch.Tensor,
    seq_lens_B: torch.Tensor,
    *,
    scale: float,
    window: int | None,
    num_kv_splits: int | None,
    impl: str,
    config: list[int] | None = None,
) -> torch.Tensor:
    """Call the registered op; ``config`` is `DecodeTiles.as_ints` for ``"triton"``, None for the default."""
    result: torch.Tensor = torch.ops.moe_kernels.decode_attention(
        q_BHD, k_cache, v_cache, page_table_BP, seq_lens_B, scale, window or 0, num_kv_splits or 0, impl, config or []
    )
    return result


def prefill_attention(
    q_SHD: torch.Tensor,
    k_SHD: torch.Tensor,
    v_SHD: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    scale: float,
    causal: bool,
    window: int | None,
    prefix: PagedPrefix | None,
    impl: str,
    config: list[int] | None = None,
) -> torch.Tensor:
    """Call the registered op; ``config`` is `PrefillTiles.as_ints` for ``"triton"``, None for the default."""
    cached = (None, None, None, None) if prefix is None else tuple(prefix)
    result: torch.Tensor = torch.ops.moe_kernels.prefill_attention(
        q_SHD, k_SHD, v_SHD, cu_seqlens, scale, causal, window or 0, *cached, impl, config or []
    )
    return result
