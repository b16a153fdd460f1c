"""`RunSpec`: the frozen description of one run, and its round trips to code, argv and JSON. No torch here."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Self

from pydantic import (
    BeforeValidator,
    Field,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    model_serializer,
    model_validator,
)

from workbench.errors import InvalidInput, choices
from workbench.modes import L2, Cache, RoutingKind, Subject, resolve
from workbench.parts import MAX_SPLIT_K as MAX_SPLIT_K
from workbench.parts import MAX_TOKENS as MAX_TOKENS
from workbench.parts import Frozen as Frozen
from workbench.parts import LayerPoint as LayerPoint
from workbench.parts import Modes as Modes
from workbench.parts import Name, Positive, code, member, whole
from workbench.parts import StepPoint as StepPoint

POINTS: dict[Subject, type[LayerPoint] | type[StepPoint]] = {
    Subject.MOE_LAYER: LayerPoint,
    Subject.STEP: StepPoint,
}
SIZE_FIELD: dict[Subject, str] = {Subject.MOE_LAYER: "num_tokens", Subject.STEP: "batch_size"}
"""The field that figures have along their x axis."""
STEP_MODES = (
    "attention_backend",
    "mla_prefill",
    "mla_decode",
    "fusion",
    "compile_scope",
    "max_compile_batch",
    "max_capture_batch",
)
STEP_FIELDS = ("num_layers", *STEP_MODES, *StepPoint.model_fields)
LAYER_FIELDS = tuple(LayerPoint.model_fields)
"""Fields that have a meaning for one subject alone."""
_PLAIN_MODES = Modes()


def _device(value: object, info: ValidationInfo) -> object:
    text = value if isinstance(value, str) else ""
    index = text.removeprefix("cuda:")
    if text in ("auto", "cpu", "cuda") or (text.startswith("cuda:") and index.isdigit()):
        return value
    raise InvalidInput(f"device: must be auto, cpu, cuda or cuda:N, not {value!r}")


class RunSpec(Frozen):
    """One run, whole: the same spec gives the same work, and `key` names it.

    Attributes:
        subject: what is timed.
        model: a preset's name, a `config.json`, a checkpoint (GGUF file or safetensors folder) or a Hugging Face id in
            the local cache.
        experts: number of experts that a dense checkpoint's MLP is cut into; None takes the preset's, else 8 (a layer),
            or leaves the MLP whole (a step).
        top_k: experts per token; None takes the model's.
        num_layers: layers of a step that are kept, counted in MoE layers where the model starts dense; None keeps all.
        tp_size: tensor-parallel size; the shape of one rank is run.
        device: `auto` (the first GPU, else the CPU), `cpu`, `cuda` or `cuda:N`.
        modes: every mode axis.
        point: where it is measured: a `LayerPoint` for a layer, a `StepPoint` for a step.
        l2: last-level cache `cold` or `hot` before each sample of a layer.
        cache: compile and kernel caches `warm` (as found) or `cold` (empty).
        seed: of weights, inputs and routings.
        samples: number of timed samples.
        timeout_s: seconds after which the point is ended and recorded as `timed_out`.
    """

    subject: Annotated[Subject, BeforeValidator(member)] = Subject.MOE_LAYER
    model: Name = "smollm2-135m"
    experts: Positive | None = None
    top_k: Positive | None = None
    num_layers: Positive | None = None
    tp_size: Positive = 1
    device: Annotated[str, BeforeValidator(_device)] = "auto"
    modes: Modes = Modes()
    point: LayerPoint | StepPoint = LayerPoint()
    l2: Annotated[L2, BeforeValidator(member)] = L2.COLD
    cache: Annotated[Cache, BeforeValidator(member)] = Cache.WARM
    seed: int = Field(default=0, ge=0, lt=2**31)
    samples: Annotated[int, BeforeValidator(whole), Field(le=100_000)] = 20
    timeout_s: float = Field(default=300.0, gt=0, le=86_400)

    @model_validator(mode="before")
    @classmethod
    def _parts_of_the_subject(cls, data: Any) -> Any:
        """Give the point its class, and a step the routing that it has where nothing was said."""
        if not isinstance(data, Mapping):
            return data
        subject = resolve(Subject, data.get("subject", Subject.MOE_LAYER), "subject")
        given, kind = dict(data), POINTS[subject]
        point, modes = given.get("point", {}), given.get("modes", {})
        if isinstance(point, Mapping):
            refuse_foreign(subject, point)
            given["point"] = kind(**point)
        elif not isinstance(point, kind):
            raise InvalidInput(f"point: must be a {kind.__name__} with subject {subject}, not a {type(point).__name__}")
        if subject is Subject.STEP:
            if isinstance(modes, Modes) and "routing" not in modes.model_fields_set:
                given["modes"] = modes.model_copy(update={"routing": RoutingKind.MODEL})
            elif isinstance(modes, Mapping) and "routing" not in modes:
                given["modes"] = {**modes, "routing": RoutingKind.MODEL}
        return given

    @model_validator(mode="after")
    def _nothing_of_another_subject(self) -> Self:
        if self.subject is Subject.MOE_LAYER:
            odd = [name for name in STEP_MODES if getattr(self.modes, name) != getattr(_PLAIN_MODES, name)]
            refuse_foreign(self.subject, odd if self.num_layers is None else ["num_layers", *odd])
        return self

    @model_serializer(mode="wrap")
    def _without_the_other_subject(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        data: dict[str, Any] = handler(self)
        if self.subject is Subject.MOE_LAYER:
            data.pop("num_layers", None)
            for name in STEP_MODES:
                data.get("modes", {}).pop(name, None)
        return data

    @property
    def key(self) -> str:
        """Sixteen hex digits naming this spec; fields at their default are left out, so new fields keep old keys."""
        plain = DEFAULTS[self.subject]
        given = {name: value for name, value in self.flat().items() if value != plain[name]}
        if self.subject is not Subject.MOE_LAYER:
            given["subject"] = self.subject.value
        text = json.dumps(given, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def num_tokens(self) -> int:
        """Rows that a layer is called with. Raises `InvalidInput` for a step."""
        if isinstance(self.point, LayerPoint):
            return self.point.num_tokens
        raise InvalidInput(f"num_tokens: is for subject moe_layer, and the subject is {self.subject}")

    @property
    def step_point(self) -> StepPoint:
        """The point of a step. Raises `InvalidInput` for a layer."""
        if isinstance(self.point, StepPoint):
            return self.point
        raise InvalidInput(f"batch_size: is for subject step, and the subject is {self.subject}")

    @property
    def size(self) -> int:
        """What figures have along their x axis: `num_tokens` of a layer, `batch_size` of a step."""
        return self.point.num_tokens if isinstance(self.point, LayerPoint) else self.point.batch_size

    @property
    def size_label(self) -> str:
        """The point in words: `16 tokens`, or `batch 8, 128 + 8 tokens` (input and output)."""
        if isinstance(self.point, LayerPoint):
            return f"{self.point.num_tokens} tokens"
        return f"batch {self.point.batch_size}, {self.point.input_len} + {self.point.output_len} tokens"

    def flat(self) -> dict[str, Any]:
        """Every leaf that the subject has, under its own short name (`num_tokens`, `compile`, ...), as JSON values."""
        data = self.model_dump(mode="json")
        return {name: value for part in (data, data.pop("modes"), data.pop("point")) for name, value in part.items()}

    @classmethod
    def from_flat(cls, values: Mapping[str, Any]) -> Self:
        """Build from short names; what is not given takes its default.

        Raises:
            InvalidInput: an unknown name, or one that has no meaning for the subject.
        """
        unknown = [name for name in values if name not in FIELDS]
        if unknown:
            raise InvalidInput(f"{unknown[0]}: no such field; there are {choices(FIELDS)}")
        subject = resolve(Subject, values.get("subject", Subject.MOE_LAYER), "subject")
        parts: dict[str, dict[str, Any]] = {"": {}, "modes": {}, "point": {}}
        for name, value in values.items():
            parts[FIELDS[name]][name] = value
        refuse_foreign(subject, parts["point"])
        return cls(**parts[""], modes=Modes(**parts["modes"]), point=POINTS[subject](**parts["point"]))

    def replace(self, **values: Any) -> Self:
        """A copy with short-named fields changed: `spec.replace(quant="fp16", num_tokens=8)`.

        Another `subject` takes along what both have; a routing at the old subject's default becomes the new one's.
        """
        kept = self.flat()
        subject = resolve(Subject, values.get("subject", self.subject), "subject")
        if subject is not self.subject:
            old, new = DEFAULTS[self.subject], DEFAULTS[subject]
            kept = {name: value for name, value in kept.items() if name in new}
            if kept["routing"] == old["routing"]:
                del kept["routing"]
        return type(self).from_flat({**kept, **values})

    def to_code(self) -> str:
        """Python that builds this spec, fields at their default left out; `eval` of it gives an equal spec."""
        return code(
            self, RunSpec(subject=self.subject), always=() if self.subject is Subject.MOE_LAYER else ("subject",)
        )

    def to_argv(self) -> list[str]:
        """The command that runs this spec: `workbench run --model ... --num-tokens ...`."""
        return ["workbench", "run", *self.options()]

    def options(self, *, without: Sequence[str] = ()) -> list[str]:
        """The fields off their default as command-line options."""
        plain = {**DEFAULTS[self.subject], "subject": DEFAULTS[Subject.MOE_LAYER]["subject"]}
        words: list[str] = []
        for name, value in self.flat().items():
            if value != plain[name] and name not in without:
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


def refuse_foreign(subject: Subject, names: Iterable[str]) -> None:
    """Raise `InvalidInput` for the first name of a field that has no meaning for `subject`."""
    other, foreign = (Subject.STEP, STEP_FIELDS) if subject is Subject.MOE_LAYER else (Subject.MOE_LAYER, LAYER_FIELDS)
    if odd := [name for name in names if name in foreign]:
        own = choices(POINTS[subject].model_fields)
        raise InvalidInput(f"{odd[0]}: is for subject {other}; a {subject} is measured at {own}")


def size_words(subject: Subject, size: int) -> str:
    """A size in words: `1 token`, `16 tokens`, `batch 8`."""
    if subject is Subject.STEP:
        return f"batch {size:,}"
    return f"{size:,} token{'' if size == 1 else 's'}"


FIELDS: dict[str, str] = {
    **dict.fromkeys((name for name in RunSpec.model_fields if name not in ("modes", "point")), ""),
    **dict.fromkeys(Modes.model_fields, "modes"),
    **dict.fromkeys(LayerPoint.model_fields, "point"),
    **dict.fromkeys(StepPoint.model_fields, "point"),
}
"""Short name of every leaf of a `RunSpec`, of any subject -> the part that holds it."""

DEFAULTS: dict[Subject, dict[str, Any]] = {subject: RunSpec(subject=subject).flat() for subject in Subject}
"""What each subject's fields are where nothing is said."""
_ANY = {**DEFAULTS[Subject.STEP], **DEFAULTS[Subject.MOE_LAYER]}
BOOLEAN = {name: isinstance(_ANY[name], bool) for name in FIELDS}
OPTIONAL = tuple(name for name in FIELDS if _ANY[name] is None)
"""Fields that may be left open: None there means the model's own, or as tuned."""
WHOLE = tuple(
    name for name in FIELDS if name in OPTIONAL or (isinstance(_ANY[name], int) and not isinstance(_ANY[name], bool))
)
"""Fields that hold whole numbers."""
_FLOAT = {"timeout_s", "zipf_exponent"}


def subject_of(name: str, subject: Subject = Subject.MOE_LAYER) -> Subject:
    """The subject that the field `name` belongs to; `subject` where both have it."""
    if name in STEP_FIELDS:
        return Subject.STEP
    return Subject.MOE_LAYER if name in LAYER_FIELDS else subject


def check_value(name: str, value: Any) -> Any:
    """`value` as `RunSpec.flat` gives it. Raises `InvalidInput` where the field `name` does not allow it."""
    return RunSpec.from_flat({"subject": subject_of(name), name: value}).flat()[name]


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
    if name in WHOLE or name in _FLOAT:
        try:
            return int(text) if name in WHOLE else float(text)
        except ValueError:
            raise InvalidInput(f"{name}: must be a {'whole ' if name in WHOLE else ''}number, not {text!r}") from None
    return text
