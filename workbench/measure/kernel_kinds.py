"""What a kernel does, by its name. No torch here."""

from __future__ import annotations

import re
from typing import Literal

Kind = Literal["gemm", "moe", "attention", "norm", "elementwise", "memory", "other"]

# In this order: the first that fits. Our own kernels by their whole names, others by the words that libraries use.
_RULES: tuple[tuple[Kind, str], ...] = (
    (
        "moe",
        r"^(up|down|activate|sum|scatter|count|prepare|gate|find_block)\w*_kernel$|^fused_moe|moe_align|grouped_mm"
        r"|topk_gating|moe_kernels::(fused|moe|select|gate|prepare)",
    ),
    ("attention", r"^(decode|prefill|merge)\w*_kernel$|flash|fmha|attention|mha_|sdpa|softmax"),
    (
        "gemm",
        r"^(linear|sum_parts|round_rows)\w*_kernel|gemm|gemv|nvjet|cutlass|xmma|ampere_|hopper_|cublas|splitk"
        r"|aten::(mm|addmm|bmm|baddbmm|linear|matmul|mv|_scaled_mm|einsum)$|moe_kernels::linear|mkldnn",
    ),
    ("norm", r"norm"),
    (
        "memory",
        r"memcpy|memset|copy|gather|scatter|index|cat(array|_)|aten::(cat|stack|clone|fill_|zero_|embedding|new_"
        r"|empty|arange|repeat|expand|slice|select|roll)|fillfunctor|embedding|catarray|roll_",
    ),
    (
        "elementwise",
        r"elementwise|vectorized|reduce|aten::(add|mul|sub|div|neg|sin|cos|silu|sigmoid|to|_to_copy|argmax|sum|cumsum"
        r"|remainder|floor_divide|exp|pow|sqrt|rsqrt|mean|max|min|where|sort|topk|floor|eq|gt|lt|bitwise|logical)"
        r"|silu|argmax|sort|cumsum|scan|arange|cub::|distribution|pointwise|^triton_(poi|red|per)",
    ),
)
_COMPILED = tuple((kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in _RULES)


def kernel_kind(name: str) -> Kind:
    """The kind that a name speaks of; `other` for a name that says nothing."""
    short = re.sub(r"^(void|at::native::)\s*", "", name)
    return next((kind for kind, pattern in _COMPILED if pattern.search(short)), "other")
