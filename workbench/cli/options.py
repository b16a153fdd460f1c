"""One command-line option for every field of a `RunSpec`, made from its field list, so that none can be forgotten."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, Optional

import typer

from workbench.errors import choices
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
from workbench.spec import BOOLEAN, DEFAULTS, FIELDS, parse_value, subject_of

HELP = {
    "subject": f"What is timed: {choices(Subject)}.",
    "model": "A preset, a config.json, a checkpoint (GGUF file or safetensors folder) or a cached Hugging Face id.",
    "experts": "Experts that a dense model's MLP is cut into.",
    "top_k": "Experts per token; the model's own where left out.",
    "num_layers": "Layers of a step that are kept (MoE layers where the model starts dense); all where left out.",
    "tp_size": "Tensor-parallel size; the shape of one rank is run.",
    "device": "auto (the first GPU, else the CPU), cpu, cuda or cuda:N.",
    "l2": f"Last-level cache before each sample: {choices(L2)}.",
    "cache": f"Compile and kernel caches: {choices(Cache)}.",
    "seed": "Seed of weights, inputs and routings.",
    "samples": "Number of timed samples.",
    "timeout_s": "Seconds after which a point is ended and recorded as timed_out.",
    "compile": f"torch.compile mode: {choices(Compile)}.",
    "dynamic": "Whether torch.compile makes code for any number of tokens.",
    "graph": f"CUDA graph: {choices(Graph)}.",
    "quant": f"Format of weights and arithmetic: {choices(Quant)}.",
    "moe_backend": f"Who computes the experts: {choices(BACKENDS)}, or a registered one.",
    "group_size": f"Columns that share a scale, of int4: {choices(GROUP_SIZES)}.",
    "zero_points": "Whether each group of int4 has a zero point.",
    "activation_scale": f"Scale of activations; static for fp8_tensor: {choices(ActivationScale)}.",
    "split_k": "Parts that triton splits each K loop into; none is as tuned.",
    "reduction": f"How those parts are added up: {choices(Reduction)}.",
    "attention_backend": f"Who computes the attention of a step: {choices(ATTENTION_BACKENDS)}, or a registered one.",
    "mla_prefill": f"Latent attention in the prefill of a step: {choices(Mla)}.",
    "mla_decode": f"Latent attention in decode steps: {choices(Mla)}.",
    "fusion": f"Whether a step's small kernels are fused: {choices(Fusion)}.",
    "compile_scope": f"What of a compiled step is compiled: {choices(CompileScope)}.",
    "max_compile_batch": "Batches of a step above this run uncompiled; no limit where left out.",
    "max_capture_batch": "Largest batch of a step that graph full captures; the point's own where left out.",
    "routing": f"Which experts tokens choose: {choices(RoutingKind)}.",
    "zipf_exponent": "Skew of zipf routing.",
    "num_tokens": "Number of tokens of one call of a layer.",
    "batch_size": "Sequences that a step runs together.",
    "input_len": "Tokens of each prompt of a step.",
    "output_len": "Tokens that each sequence of a step gets; the prefill gives the first.",
    "page_size": "Tokens of one page of a step's KV cache.",
    "perplexity_tokens": "Tokens of real text whose perplexity is measured beside a step; none where left out.",
}
GIVEN = "given"


def word(value: object) -> str:
    """A value as it is typed: `none`, `true`, `4`."""
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def flag(name: str) -> str:
    """`num_tokens` as `--num-tokens`."""
    return "--" + name.replace("_", "-")


def default_words(name: str) -> str:
    """A field's default as help says it: ` [default: balanced; of a step model]`; empty where it is left open."""
    own = subject_of(name)
    plain = DEFAULTS[own][name]
    if plain is None:
        return ""
    other = DEFAULTS[Subject.STEP].get(name, plain)
    more = "" if name == "subject" or other == plain else f"; of a step {word(other)}"
    return f" [default: {word(plain)}{more}]"


def _parameter(name: str) -> inspect.Parameter:
    words = HELP[name] + default_words(name)
    if BOOLEAN[name]:
        option = typer.Option(None, f"{flag(name)}/--no-{flag(name)[2:]}", help=words, show_default=False)
        kind: Any = Optional[bool]  # noqa: UP045 - typer reads this at run time
    else:
        option = typer.Option(None, flag(name), help=words, show_default=False, metavar="VALUE")
        kind = Optional[str]  # noqa: UP045
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=kind)


def spec_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options to a command; it is called with `given`, the fields that were set, parsed."""

    @wraps(command)
    def wrapped(**values: Any) -> None:
        given = {name: values.pop(name) for name in FIELDS}
        parsed = {
            name: value if isinstance(value, bool) else parse_value(name, value)
            for name, value in given.items()
            if value is not None
        }
        command(**values, **{GIVEN: parsed})

    own = inspect.signature(command, eval_str=True).parameters
    kept = [parameter for name, parameter in own.items() if name != GIVEN]
    parameters = [*kept, *(_parameter(name) for name in FIELDS)]
    wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    del wrapped.__wrapped__  # else typer would look at the command behind
    return wrapped
