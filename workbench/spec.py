"""`RunSpec`: the frozen description of one run, and its round trips to code, argv and JSON. No torch here."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
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
    Graph,
    Quant,
    Reduction,
    RoutingKind,
    Subject,
)

MAX_TOKENS = 2**20
MAX_SPLIT_K = 64


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


def _member(value: object, info: ValidationInfo) -> object:
    kind = {
        "subject": Subject,
        "compile": Compile,
        "graph": Graph,
        "quant": Quant,
        "activation_scale": ActivationScale,
        "reduction": Reduction,
        "routing": RoutingKind,
        "l2": L2,
        "cache": Cache,
    }[info.field_name or ""]
    return vocabulary.resolve(kind, value, info.field_name or "")


def _whole(value: object, info: ValidationInfo) -> object:
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


Positive = Annotated[int, BeforeValidator(_whole)]
Name = Annotated[str, BeforeValidator(_name)]


def _device(value: object, info: ValidationInfo) -> object:
    text = value if isinstance(value, str) else ""
    index = text.removeprefix("cuda:")
    if text in ("auto", "cpu", "cuda") or (text.startswith("cuda:") and index.isdigit()):
        return value
    raise InvalidInput(f"device: must be auto, cpu, cuda or cuda:N, not {value!r}")


class Modes(Frozen):
    """How the layer is run.

    Attributes:
        dynamic: `torch.compile`'s own flag.
        group_size: columns that share one scale, of `int4` alone.
        zero_points: whether each group has a zero point, of `int4` alone.
        activation_scale: of `fp8_tensor` alone: worked out at each call, or fixed beforehand.
        split_k: parts that each K loop of `triton` is split into; None as tuned.
        reduction: how those parts are added up, where there is more than one.
        zipf_exponent: counts for `zipf` routing only.
    """

    compile: Annotated[Compile, BeforeValidator(_member)] = Compile.NONE
    dynamic: bool = False
    graph: Annotated[Graph, BeforeValidator(_member)] = Graph.DISABLED
    quant: Annotated[Quant, BeforeValidator(_member)] = Quant.BF16
    group_size: Annotated[int, BeforeValidator(_group)] = 128
    zero_points: bool = False
    activation_scale: Annotated[ActivationScale, BeforeValidator(_member)] = ActivationScale.DYNAMIC
    moe_backend: Name = "reference"
    split_k: Annotated[Positive | None, Field(le=MAX_SPLIT_K)] = None
    reduction: Annotated[Reduction, BeforeValidator(_member)] = Reduction.DETERMINISTIC
    routing: Annotated[RoutingKind, BeforeValidator(_member)] = RoutingKind.BALANCED
    zipf_exponent: float = Field(default=1.2, gt=0, le=10)


class LayerPoint(Frozen):
    """Where a `moe_layer` is measured: `num_tokens` rows of hidden states."""

    num_tokens: Annotated[int, BeforeValidator(_whole), Field(le=MAX_TOKENS)] = 16


class RunSpec(Frozen):
    """One run, whole: the same spec gives the same work, and `key` names it.

    Attributes:
        subject: what is timed.
        model: a preset's name, a `config.json`, a checkpoint (GGUF file or safetensors folder) or a Hugging Face id in
            the local cache.
        experts: number of experts that a dense checkpoint's MLP is cut into; None takes the preset's, else 8.
        top_k: experts per token; None takes the model's.
        tp_size: tensor-parallel size; the shape of one rank is run.
        device: `auto` (the first GPU, else the CPU), `cpu`, `cuda` or `cuda:N`.
        modes: every mode axis.
        point: where it is measured.
        l2: last-level cache `cold` or `hot` before each sample.
        cache: compile and kernel caches `warm` (as found) or `cold` (empty).
        seed: of weights, inputs and routings.
        samples: number of timed samples.
        timeout_s: seconds after which the point is ended and recorded as `timed_out`.
    """

    subject: Annotated[Subject, BeforeValidator(_member)] = Subject.MOE_LAYER
    model: Name = "smollm2-135m"
    experts: Positive | None = None
    top_k: Positive | None = None
    tp_size: Positive = 1
    device: Annotated[str, BeforeValidator(_device)] = "auto"
    modes: Modes = Modes()
    point: LayerPoint = LayerPoint()
    l2: Annotated[L2, BeforeValidator(_member)] = L2.COLD
    cache: Annotated[Cache, BeforeValidator(_member)] = Cache.WARM
    seed: int = Field(default=0, ge=0, lt=2**31)
    samples: Annotated[int, BeforeValidator(_whole), Field(le=100_000)] = 20
    timeout_s: float = Field(default=300.0, gt=0, le=86_400)

    @property
    def key(self) -> str:
        """Sixteen hex digits naming this spec; fields at their default are left out, so new fields keep old keys."""
        given = {name: value for name, value in self.flat().items() if value != _DEFAULTS[name]}
        text = json.dumps(given, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def flat(self) -> dict[str, Any]:
        """Every leaf under its own short name (`num_tokens`, `compile`, ...), as JSON values."""
        data = self.model_dump(mode="json")
        return {name: value for part in (data, data.pop("modes"), data.pop("point")) for name, value in part.items()}

    @classmethod
    def from_flat(cls, values: Mapping[str, Any]) -> Self:
        """Build from short names; what is not given takes its default. Raises `InvalidInput` for an unknown name."""
        unknown = [name for name in values if name not in FIELDS]
        if unknown:
            raise InvalidInput(f"{unknown[0]}: no such field; there are {choices(FIELDS)}")
        parts: dict[str, dict[str, Any]] = {"": {}, "modes": {}, "point": {}}
        for name, value in values.items():
            parts[FIELDS[name]][name] = value
        return cls(**parts[""], modes=Modes(**parts["modes"]), point=LayerPoint(**parts["point"]))

    def replace(self, **values: Any) -> Self:
        """A copy with short-named fields changed: `spec.replace(quant="fp16", num_tokens=8)`."""
        return type(self).from_flat({**self.flat(), **values})

    def to_code(self) -> str:
        """Python that builds this spec, fields at their default left out; `eval` of it gives an equal spec."""
        return _code(self)

    def to_argv(self) -> list[str]:
        """The command that runs this spec: `workbench run --model ... --num-tokens ...`."""
        return ["workbench", "run", *self.options()]

    def options(self, *, without: Sequence[str] = ()) -> list[str]:
        """The fields off their default as command-line options."""
        defaults = type(self)().flat()
        words: list[str] = []
        for name, value in self.flat().items():
            if value != defaults[name] and name not in without:
                flag = "--" + name.replace("_", "-")
                words += [flag if value else "--no-" + flag[2:]] if isinstance(value, bool) else [flag, str(value)]
        return words

    @classmethod
    def from_argv(cls, argv: Sequence[str]) -> Self:
        """Read back what `to_argv` wrote. Raises `InvalidInput` for an unknown option or a value of the wrong kind."""
        words = list(argv[2:] if list(argv[:2]) == ["workbench", "run"] else argv)
        values: dict[str, Any] = {}
        while words:
            word = words.pop(0)
            name = word.removeprefix("--").replace("-", "_")
            if name in FIELDS and BOOLEAN[name]:
                values[name] = True
            elif name.removeprefix("no_") in FIELDS and BOOLEAN[name.removeprefix("no_")]:
                values[name.removeprefix("no_")] = False
            elif word.startswith("--") and name in FIELDS and words:
                values[name] = parse_value(name, words.pop(0))
            else:
                options = choices("--" + field.replace("_", "-") for field in FIELDS)
                raise InvalidInput(f"{word}: not an option with a value; there are {options}")
        return cls.from_flat(values)

    @property
    def command(self) -> str:
        """`to_argv` as one shell line."""
        return shlex.join(self.to_argv())


FIELDS: dict[str, str] = {
    **dict.fromkeys((name for name in RunSpec.model_fields if name not in ("modes", "point")), ""),
    **dict.fromkeys(Modes.model_fields, "modes"),
    **dict.fromkeys(LayerPoint.model_fields, "point"),
}
"""Short name of every leaf of a `RunSpec` -> the part that holds it."""

_DEFAULTS = RunSpec().flat()
BOOLEAN = {name: isinstance(_DEFAULTS[name], bool) for name in FIELDS}
OPTIONAL = tuple(name for name in FIELDS if _DEFAULTS[name] is None)
"""Fields that may be left open: None there means the model's own, or as tuned."""
_INTEGER = {"experts", "top_k", "tp_size", "seed", "samples", "num_tokens", "group_size", "split_k"}
_FLOAT = {"timeout_s", "zipf_exponent"}


def parse_value(name: str, text: str) -> Any:
    """Read `text` as a value of the field `name`; `none` clears an optional one (but is a mode of `compile`)."""
    if name not in FIELDS:
        raise InvalidInput(f"{name}: no such field; there are {choices(FIELDS)}")
    if BOOLEAN[name]:
        if text.lower() not in ("true", "false"):
            raise InvalidInput(f"{name}: must be true or false, not {text!r}")
        return text.lower() == "true"
    if name in OPTIONAL and text.lower() == "none":
        return None
    if name in _INTEGER or name in _FLOAT:
        try:
            return int(text) if name in _INTEGER else float(text)
        except ValueError:
            raise InvalidInput(
                f"{name}: must be a {'whole ' if name in _INTEGER else ''}number, not {text!r}"
            ) from None
    return text


def _code(value: Any) -> str:
    if isinstance(value, Frozen):
        given = {
            n: getattr(value, n) for n, f in type(value).model_fields.items() if getattr(value, n) != f.get_default()
        }
        return f"{type(value).__name__}({', '.join(f'{n}={_code(v)}' for n, v in given.items())})"
    return repr(str(value)) if isinstance(value, StrEnum) else repr(value)
