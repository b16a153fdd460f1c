"""The axes of the panel: which values each offers, in which words, and where they stand, by subject."""

from __future__ import annotations

from typing import Any, NamedTuple

from workbench.models.network.presets import NETWORKS
from workbench.models.shapes import PRESETS
from workbench.modes import (
    ATTENTION_BACKENDS,
    BACKENDS,
    GROUP_SIZES,
    L2,
    ActivationScale,
    Cache,
    Compile,
    CompileScope,
    Fusion,
    Graph,
    Mla,
    Quant,
    Reduction,
    RoutingKind,
    Subject,
)
from workbench.spec import DEFAULTS

SUBJECTS = (("MoE layer", str(Subject.MOE_LAYER)), ("whole-model step", str(Subject.STEP)))
SIZES: dict[str, tuple[int, ...]] = {
    "num_tokens": (1, 4, 16, 64, 128, 256, 1024, 4096),
    "batch_size": (1, 4, 8, 16, 32, 64, 128),
}
"""What figures have along x, and the values that are offered."""
MODELS: dict[Subject, tuple[str, ...]] = {Subject.MOE_LAYER: tuple(PRESETS), Subject.STEP: tuple(NETWORKS)}
VALUES: dict[str, tuple[Any, ...]] = {
    "moe_backend": BACKENDS,
    "quant": tuple(str(v) for v in Quant),
    "group_size": GROUP_SIZES,
    "zero_points": (False, True),
    "activation_scale": tuple(str(v) for v in ActivationScale),
    "split_k": (None, 1, 2, 4, 8),
    "reduction": tuple(str(v) for v in Reduction),
    "attention_backend": ATTENTION_BACKENDS,
    "mla_prefill": tuple(str(v) for v in Mla),
    "mla_decode": tuple(str(v) for v in Mla),
    "fusion": tuple(str(v) for v in Fusion),
    "compile": tuple(str(v) for v in Compile),
    "compile_scope": tuple(str(v) for v in CompileScope),
    "dynamic": (False, True),
    "graph": tuple(str(v) for v in Graph),
    "routing": tuple(str(v) for v in RoutingKind),
    "l2": tuple(str(v) for v in L2),
    "cache": tuple(str(v) for v in Cache),
}
TITLES = {
    "moe_backend": "backend",
    "group_size": "group",
    "zero_points": "zero points",
    "activation_scale": "activation scale",
    "split_k": "split-K",
    "attention_backend": "attention",
    "mla_prefill": "MLA in prefill",
    "mla_decode": "in decode",
    "fusion": "fused kernels",
    "compile_scope": "compiled",
    "num_tokens": "tokens",
    "batch_size": "batch",
    "l2": "L2",
    "cache": "compile cache",
    "dynamic": "shapes",
}
LINES = (
    ("model",),
    ("moe_backend", "split_k", "reduction"),
    ("quant", "group_size", "zero_points", "activation_scale"),
    ("attention_backend", "mla_prefill", "mla_decode"),
    ("fusion",),
    ("compile", "compile_scope"),
    ("dynamic", "graph", "l2", "cache"),
    ("routing",),
    ("num_tokens",),
    ("batch_size",),
)
"""The axes as they stand in the panel, those of one line beside each other."""
BESIDE = {axis for line in LINES for axis in line[1:]}
WORDS = {
    ("dynamic", False): "static",
    ("dynamic", True): "dynamic",
    ("zero_points", False): "without",
    ("zero_points", True): "with",
    ("split_k", None): "as tuned",
    ("compile_scope", "skip_moe"): "all but MoE",
}
PLAIN_AGAIN = ("experts", "top_k", "dynamic", "l2", "routing")
"""Fields that go back to their default with another subject, for which they mean something else."""


class Typed(NamedTuple):
    """A field typed as text: its name, title, what an empty one shows, and how wide it is."""

    name: str
    title: str
    hint: str
    width: str


FIELDS = (
    Typed("experts", "experts", "model's", "84px"),
    Typed("top_k", "top-k", "model's", "84px"),
    Typed("num_layers", "layers", "all", "64px"),
    Typed("tp_size", "TP size", "1", "64px"),
    Typed("input_len", "input", "128", "64px"),
    Typed("output_len", "output", "8", "64px"),
    Typed("page_size", "page", "16", "64px"),
    Typed("max_compile_batch", "compiled up to batch", "any", "64px"),
    Typed("max_capture_batch", "captured up to batch", "own", "64px"),
    Typed("perplexity_tokens", "perplexity of", "no tokens", "84px"),
    Typed("zipf_exponent", "Zipf exponent", "1.2", "64px"),
    Typed("samples", "samples", "20", "64px"),
    Typed("seed", "seed", "0", "64px"),
)


def has(subject: Subject, name: str) -> bool:
    """Whether a subject has the axis or field."""
    return name in DEFAULTS[subject]
