"""Why an implementation of attention, built in or registered, would not run; and which one runs."""

from __future__ import annotations

from typing import Any

from moe_kernels.attention.registry import attention_backends, find_attention_backend
from moe_kernels.attention.rules import AttentionImpl, attention_preference, builtin_attention_reasons


def attention_reasons(
    impl: str,
    kind: str,
    *,
    device_type: str,
    dtype: str,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    v_head_dim: int,
    page_size: int | None = None,
    window: int | None = None,
    compile: bool = False,
    graph: bool = False,
    capability: tuple[int, int] | None = None,
) -> list[str]:
    """Say why ``impl`` would not run an operation; an empty list means that it runs. Needs neither tensors nor torch.

    Args:
        impl: a built-in or registered name.
        kind: ``"decode"``, ``"mla_decode"`` or ``"prefill"``.
        device_type: ``"cpu"``, ``"cuda"``, ...
        dtype: ``"fp32"``, ``"bf16"`` or ``"fp16"``.
        num_heads, num_kv_heads, head_dim, v_head_dim: H, Hkv, D, Dv; for ``"mla_decode"`` Hkv is 1, D the latent's
            size and Dv its rank.
        page_size: of the cache; None where there is none.
        window: keys that a query sees at most, its own included; None for all.
        compile: under ``torch.compile``.
        graph: captured in a CUDA graph.
        capability: the device's compute capability; None leaves rules about it out.

    Raises:
        ValueError: ``impl`` is neither built in nor registered, or ``kind`` is unknown.
    """
    if impl in ("reference", "sdpa", "triton"):
        return builtin_attention_reasons(
            impl,
            kind,
            device_type,
            dtype=dtype,
            head_dim=head_dim,
            v_head_dim=v_head_dim,
            graph=graph,
            capability=capability,
        )
    backend = find_attention_backend(impl)
    if backend is None:
        raise ValueError(f"impl must be one of {', '.join(attention_backends())}; got {impl!r}.")
    if kind not in backend.functions:
        return [f"{impl} has no {kind}; it has {', '.join(backend.functions)}."]
    asked: dict[str, Any] = {
        "device_type": device_type,
        "dtype": dtype,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "v_head_dim": v_head_dim,
        "page_size": page_size,
        "window": window,
        "compile": compile,
        "graph": graph,
    }
    return list(backend.supports(kind=kind, **asked))


def resolve_attention_impl(
    kind: str,
    *,
    device_type: str,
    dtype: str,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    v_head_dim: int,
    page_size: int | None = None,
    window: int | None = None,
    compile: bool = False,
    graph: bool = False,
    capability: tuple[int, int] | None = None,
    impl: str | None = None,
) -> str:
    """Return the name of the implementation that an operation runs; arguments as for ``attention_reasons``.

    Raises:
        ValueError: ``impl`` or ``kind`` is unknown.
        NotImplementedError: what was asked for does not run; the message says why.
    """
    if impl is None:
        names = attention_preference(device_type)
    else:
        names = (impl.value if isinstance(impl, AttentionImpl) else impl,)
    refused = []
    for name in names:
        reasons = attention_reasons(
            name,
            kind,
            device_type=device_type,
            dtype=dtype,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            v_head_dim=v_head_dim,
            page_size=page_size,
            window=window,
            compile=compile,
            graph=graph,
            capability=capability,
        )
        if not reasons:
            return name
        refused.append(f"impl {name!r} does not run here: {' '.join(reasons)}")
    raise NotImplementedError(" ".join(refused))
