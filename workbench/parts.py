"""The parts of a `RunSpec`: modes, and the points where a subject is measured. No torch here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo

from workbench import modes as vocabulary
from workbench.errors import InvalidInput, choices, sentence
from workbench.modes import (
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

MAX_TOKENS = 2**20
MAX_SPLIT_K = 64
MAX_BATCH = 2**14
MAX_OUTPUT = 2**16
MAX_PAGE = 2**12


class Frozen(BaseModel):
    """Base of every described value: immutable, unknown fields refused, bad input said in one sentence."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise InvalidInput(sentence(error, type(self).model_fields)) from None

    # Tells pydantic that parts of a larger value need not come through here: thousands of records load twice as fast.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parse strict JSON. Raises `InvalidInput` with one sentence."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise InvalidInput(f"{cls.__name__}: not valid JSON ({error})") from None
        if not isinstance(data, dict):
            raise InvalidInput(f"{cls.__name__}: must be a JSON object, not {type(data).__name__}")
        return cls(**data)

    def to_json(self, *, indent: int | None = None) -> str:
        """Strict JSON: no NaN, numbers at full precision."""
        return json.dumps(self.model_dump(mode="json"), allow_nan=False, indent=indent, ensure_ascii=False)


def member(value: object, info: ValidationInfo) -> object:
    """Resolve a field of the vocabulary by the field's name."""
    kind = {
        "subject": Subject,
        "compile": Compile,
        "graph": Graph,
        "quant": Quant,
        "activation_scale": ActivationScale,
        "reduction": Reduction,
        "mla_prefill": Mla,
        "mla_decode": Mla,
        "fusion": Fusion,
        "compile_scope": CompileScope,
        "routing": RoutingKind,
        "l2": L2,
        "cache": Cache,
    }[info.field_name or ""]
    return vocabulary.resolve(kind, value, info.field_name or "")


def whole(value: object, info: ValidationInfo) -> object:
    """Refuse what is not a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidInput(f"{info.field_name}: must be a whole number of at least 1, not {value!r}")
    return value


def _group(value: object, info: ValidationInfo) -> object:
    if isinstance(value, bool) or value not in GROUP_SIZES:
        raise InvalidInput(f"{info.field_name}: must be {choices(GROUP_SIZES)}, not {value!r}")
    return value


def _name(value: object, info: ValidationInfo) -> object:
    if not isinstance(value, str) or not value or value != value.strip() or any(c in value for c in "\n\r\0"):
        raise InvalidInput(f"{info.field_name}: must be a non-empty name on one line, not {value!r}")
    return value


Positive = Annotated[int, BeforeValidator(whole)]
Name = Annotated[str, BeforeValidator(_name)]


class Modes(Frozen):
    """How the subject is run.

    Attributes:
        dynamic: `torch.compile`'s own flag.
        group_size: columns that share one scale, of `int4` alone.
        zero_points: whether each group has a zero point, of `int4` alone.
        activation_scale: of `fp8_tensor` alone: worked out at each call, or fixed beforehand.
        split_k: parts that each K loop of `triton` is split into; None as tuned.
        reduction: how those parts are added up, where there is more than one.
        attention_backend: of a step: `reference`, `sdpa`, `triton` or a registered name.
        mla_prefill, mla_decode: of a step whose model has latent attention.
        fusion: of a step: whether its small kernels are fused.
        compile_scope: of a step that is compiled: what of it.
        max_compile_batch: batches above it run uncompiled, in a step that is compiled; None for no limit.
        max_capture_batch: largest batch size that `graph` `full` of a step captures, beside the smaller ones that
            others are padded to; a batch above it runs eager. None captures the point's own batch size alone.
        routing: `balanced` where nothing is said for a layer, `model` for a step.
        zipf_exponent: counts for `zipf` routing only.
    """

    compile: Annotated[Compile, BeforeValidator(member)] = Compile.NONE
    dynamic: bool = False
    graph: Annotated[Graph, BeforeValidator(member)] = Graph.DISABLED
    quant: Annotated[Quant, BeforeValidator(member)] = Quant.BF16
    group_size: Annotated[int, BeforeValidator(_group)] = 128
    zero_points: bool = False
    activation_scale: Annotated[ActivationScale, BeforeValidator(member)] = ActivationScale.DYNAMIC
    moe_backend: Name = "reference"
    split_k: Annotated[Positive | None, Field(le=MAX_SPLIT_K)] = None
    reduction: Annotated[Reduction, BeforeValidator(member)] = Reduction.DETERMINISTIC
    attention_backend: Name = "sdpa"
    mla_prefill: Annotated[Mla, BeforeValidator(member)] = Mla.EXPANDED
    mla_decode: Annotated[Mla, BeforeValidator(member)] = Mla.ABSORBED
    fusion: Annotated[Fusion, BeforeValidator(member)] = Fusion.OFF
    compile_scope: Annotated[CompileScope, BeforeValidator(member)] = CompileScope.ALL
    max_compile_batch: Annotated[Positive | None, Field(le=MAX_BATCH)] = None
    max_capture_batch: Annotated[Positive | None, Field(le=MAX_BATCH)] = None
    routing: Annotated[RoutingKind, BeforeValidator(member)] = RoutingKind.BALANCED
    zipf_exponent: float = Field(default=1.2, gt=0, le=10)


class LayerPoint(Frozen):
    """Where a `moe_layer` is measured: `num_tokens` rows of hidden states."""

    num_tokens: Annotated[int, BeforeValidator(whole), Field(le=MAX_TOKENS)] = 16


class StepPoint(Frozen):
    """Where a `step` is measured.

    Attributes:
        batch_size: sequences that are run together.
        input_len: tokens of each prompt, prefilled at once.
        output_len: tokens that each sequence gets. The prefill gives the first, so that `output_len - 1` decode steps
            follow, as SGLang's `bench_one_batch` counts.
        page_size: tokens of one page of the KV cache.
        perplexity_tokens: tokens of real text (Python's help topics) whose perplexity is measured too; None for none.
    """

    batch_size: Annotated[int, BeforeValidator(whole), Field(le=MAX_BATCH)] = 1
    input_len: Annotated[int, BeforeValidator(whole), Field(le=MAX_TOKENS)] = 128
    output_len: Annotated[int, BeforeValidator(whole), Field(le=MAX_OUTPUT)] = 8
    page_size: Annotated[int, BeforeValidator(whole), Field(le=MAX_PAGE)] = 16
    perplexity_tokens: Annotated[Positive | None, Field(ge=2, le=MAX_TOKENS)] = None

    @property
    def max_len(self) -> int:
        """Tokens of each sequence at the end: what the KV cache must hold."""
        return self.input_len + self.output_len


def code(value: Any, plain: Any, *, always: Sequence[str] = ()) -> str:
    """Python that builds `value`: its fields that differ from those of `plain`, and those named in `always`."""
    if isinstance(value, Frozen):
        words = [
            f"{name}={code(getattr(value, name), getattr(plain, name))}"
            for name in type(value).model_fields
            if name in always or getattr(value, name) != getattr(plain, name)
        ]
        return f"{type(value).__name__}({', '.join(words)})"
    return repr(str(value)) if isinstance(value, StrEnum) else repr(value)
