"""`SweepSpec`: a product of axes over a base run, and its round trips to code, argv and JSON. No torch here."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo

from workbench.errors import InvalidInput, choices
from workbench.spec import DEFAULTS, FIELDS, SIZE_FIELD, Frozen, RunSpec, check_value, parse_value, refuse_foreign

MAX_POINTS = 100_000
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")

# Slowest first: what builds the subject, so that it is built once; then what wraps it; the number of tokens fastest.
AXES: tuple[str, ...] = (
    *("model", "experts", "top_k", "num_layers", "tp_size", "seed"),
    *("quant", "group_size", "zero_points", "activation_scale", "fusion"),
    *("routing", "zipf_exponent", "moe_backend", "split_k", "reduction"),
    *("attention_backend", "mla_prefill", "mla_decode"),
    *("compile", "compile_scope", "max_compile_batch", "dynamic"),
    *("graph", "max_capture_batch", "cache", "l2", "samples"),
    *("perplexity_tokens", "page_size", "input_len", "output_len", *SIZE_FIELD.values()),
)
ASCENDING = tuple(SIZE_FIELD.values())
_WHOLE_SWEEP = {"subject", "device", "timeout_s"}  # one sweep runs on one engine, which owns one device
AXES += tuple(name for name in FIELDS if name not in AXES and name not in _WHOLE_SWEEP)


def _name(value: object) -> object:
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise InvalidInput(
            f"name: must be 1 to 80 letters, digits, '.', '_' or '-', a letter or digit first, not {value!r}"
        )
    return value


def check_axis(name: str, values: object) -> tuple[Any, ...]:
    """The values of one axis as JSON scalars, each checked as the field of a `RunSpec`.

    Raises:
        InvalidInput: no such axis, no values, a value that the field does not allow, a repeated one, or `num_tokens`
            or `batch_size` out of order.
    """
    if name not in AXES:
        why = "is set once for a whole sweep, in base" if name in _WHOLE_SWEEP else "no such axis"
        raise InvalidInput(f"{name}: {why}; axes are {choices(AXES)}")
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Sequence):
        raise InvalidInput(f"{name}: must be a list of values, not {values!r}")
    if not values:
        raise InvalidInput(f"{name}: must have at least one value")
    found = tuple(check_value(name, value) for value in values)
    for index, value in enumerate(found):
        if value in found[:index]:
            raise InvalidInput(f"{name}: {value} is given twice")
    if name in ASCENDING and list(found) != sorted(found):
        raise InvalidInput(f"{name}: must be in ascending order, not {', '.join(map(str, found))}")
    return found


def _axes(value: object) -> object:
    if not isinstance(value, Mapping):
        raise InvalidInput(f"axes: must map names to lists of values, not {value!r}")
    for name in value:
        if name not in AXES:
            check_axis(str(name), ())
    checked = {name: check_axis(name, value[name]) for name in AXES if name in value}
    points = math.prod(len(values) for values in checked.values())
    if points > MAX_POINTS:
        raise InvalidInput(f"axes: {points:,} points are too many; at most {MAX_POINTS:,} are allowed")
    return checked


def _base(value: RunSpec, info: ValidationInfo) -> RunSpec:
    # The base's own value of an axis never counts: at its default, equal sweeps are equal values.
    axes, plain = info.data.get("axes", {}), DEFAULTS[value.subject]
    refuse_foreign(value.subject, axes)
    return value.replace(**{name: plain[name] for name in axes})


class SweepSpec(Frozen):
    """Every combination of `axes` over `base`.

    Attributes:
        version: of this format; 1.
        name: names the results folder.
        axes: short field name -> its values, each allowed by `RunSpec`; kept in the order of `AXES`, slowest first,
            whatever order was given. `num_tokens` and `batch_size` must ascend.
        base: everything that does not vary, the subject among it; its own values of the axes do not count.
    """

    version: Literal[1] = 1
    name: Annotated[str, BeforeValidator(_name)] = "sweep"
    axes: Annotated[dict[str, tuple[Any, ...]], BeforeValidator(_axes)] = Field(default={})
    base: Annotated[RunSpec, AfterValidator(_base)] = Field(default=RunSpec(), validate_default=True)

    def __len__(self) -> int:
        """Number of points."""
        return math.prod(len(values) for values in self.axes.values())

    def __bool__(self) -> bool:
        return True

    @property
    def size_field(self) -> str:
        """The axis that figures have along x: `num_tokens` of layers, `batch_size` of steps."""
        return SIZE_FIELD[self.base.subject]

    @property
    def varying(self) -> list[str]:
        """The axes with several values, but for the size."""
        return [name for name, values in self.axes.items() if len(values) > 1 and name != self.size_field]

    def points(self) -> Iterator[RunSpec]:
        """Every point, subject-building axes slowest and the size (`num_tokens` or `batch_size`) fastest."""
        for values in product(*self.axes.values()):
            yield self.base.replace(**dict(zip(self.axes, values, strict=True)))

    def with_axes(self, **axes: Sequence[Any]) -> Self:
        """A copy with axes added or replaced; an empty list takes the axis away (its field is then the default)."""
        merged = {**self.axes, **{name: tuple(values) for name, values in axes.items()}}
        return type(self)(
            name=self.name,
            base=self.base,
            axes={n: v for n, v in merged.items() if v or n not in axes or n not in AXES},
        )

    def to_code(self) -> str:
        """Python that builds this sweep; `eval` of it gives an equal one."""
        parts = [f"name={self.name!r}"] if self.name != "sweep" else []
        parts += [f"axes={self.axes!r}"] if self.axes else []
        parts += [f"base={self.base.to_code()}"] if self.base != RunSpec() else []
        return f"SweepSpec({', '.join(parts)})"

    def to_argv(self) -> list[str]:
        """The command that runs this sweep: `workbench sweep --axis num_tokens=1,16 ...`."""
        words = ["workbench", "sweep", *(["--name", self.name] if self.name != "sweep" else []), *self.base.options()]
        for name, values in self.axes.items():
            words += ["--axis", f"{name}={_join(values)}"]
        return words

    @property
    def command(self) -> str:
        """`to_argv` as one shell line."""
        return shlex.join(self.to_argv())

    @classmethod
    def from_argv(cls, argv: Sequence[str]) -> Self:
        """Read back what `to_argv` wrote. Raises `InvalidInput`."""
        words = list(argv[2:] if list(argv[:2]) == ["workbench", "sweep"] else argv)
        rest: list[str] = []
        texts: list[str] = []
        name = "sweep"
        while words:
            word = words.pop(0)
            if word in ("--axis", "--name") and not words:
                raise InvalidInput(f"{word}: needs a value")
            if word == "--axis":
                texts.append(words.pop(0))
            elif word == "--name":
                name = words.pop(0)
            else:
                rest.append(word)
        return cls(name=name, axes=parse_axes(texts), base=RunSpec.from_argv(rest))

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """Read a sweep description, strict JSON. Raises `InvalidInput` with one sentence that names the file."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
            raise InvalidInput(f"file: {path} cannot be read ({why})") from None
        try:
            return cls.from_json(text)
        except InvalidInput as error:
            raise InvalidInput(f"{path}: {error}") from None


def _join(values: tuple[Any, ...]) -> str:
    """Values with commas between; as a JSON list where a value itself would be misread."""
    texts = ["none" if v is None else str(v).lower() if isinstance(v, bool) else str(v) for v in values]
    if any("," in text or text.startswith("[") for text in texts):
        return json.dumps(values)
    return ",".join(texts)


def parse_axes(texts: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    """Read `name=value,value,...` or `name=[JSON list]`; a name given twice gathers its values.

    Raises:
        InvalidInput: not of that form, or no such axis.
    """
    axes: dict[str, tuple[Any, ...]] = {}
    for text in texts:
        name, equals, listed = text.partition("=")
        name = name.strip().replace("-", "_")
        if not equals:
            raise InvalidInput(f"axis: must be NAME=VALUE,VALUE,..., not {text!r}")
        if name not in AXES:
            check_axis(name, ())
        if listed.startswith("["):
            try:
                values = json.loads(listed)
            except ValueError as error:
                raise InvalidInput(f"{name}: not a JSON list ({error})") from None
        else:
            values = [parse_value(name, word.strip()) for word in listed.split(",")] if listed else []
        axes[name] = axes.get(name, ()) + tuple(values)
    return axes
