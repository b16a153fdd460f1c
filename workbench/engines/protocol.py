"""What the worker and its parent say to each other: one JSON object a line. No torch here.

Standard output of the worker is kept for this alone, so that a stray print of any library cannot break a message.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from workbench.errors import InvalidInput
from workbench.record import Environment, Record
from workbench.spec import Frozen, RunSpec

PROGRESS_STATES = (
    "idle",
    "starting",
    "compiling",
    "warming",
    "checking",
    "measuring",
    "done",
    "failed",
    "cancelled",
    "timed_out",
)


class Run(Frozen):
    """To the worker: run a point. Answers carry the same `generation`."""

    kind: Literal["run"] = "run"
    generation: int
    spec: RunSpec


class Cancel(Frozen):
    """To the worker: end that point at the next chance."""

    kind: Literal["cancel"] = "cancel"
    generation: int


class Close(Frozen):
    """To the worker: leave when idle."""

    kind: Literal["close"] = "close"


class Ready(Frozen):
    """From the worker: it holds the device."""

    kind: Literal["ready"] = "ready"
    pid: int
    environment: Environment


class Busy(Frozen):
    """From the worker: another process holds the device; it leaves."""

    kind: Literal["busy"] = "busy"
    sentence: str


class Unable(Frozen):
    """From the worker: it cannot start, or was given a spec that describes no layer (`invalid`)."""

    kind: Literal["unable"] = "unable"
    sentence: str
    generation: int = 0
    invalid: bool = False


class Progress(Frozen):
    """From the worker: where a point stands."""

    kind: Literal["progress"] = "progress"
    generation: int
    state: str
    text: str


class Done(Frozen):
    """From the worker: the record of a point; `leaving` says why it must be started anew, empty where it goes on."""

    kind: Literal["done"] = "done"
    generation: int
    record: Record
    leaving: str = ""


Request = Run | Cancel | Close
Answer = Ready | Busy | Unable | Progress | Done
_REQUEST: TypeAdapter[Request] = TypeAdapter(Annotated[Request, Field(discriminator="kind")])
_ANSWER: TypeAdapter[Answer] = TypeAdapter(Annotated[Answer, Field(discriminator="kind")])


def encode(message: Request | Answer) -> bytes:
    """One line, its end included."""
    return message.to_json().encode() + b"\n"


def decode_request(line: bytes) -> Request:
    """Raises `InvalidInput` for a line that is no request."""
    request: Request = _decode(_REQUEST, line)
    return request


def decode_answer(line: bytes) -> Answer:
    """Raises `InvalidInput` for a line that is no answer."""
    answer: Answer = _decode(_ANSWER, line)
    return answer


def _decode(adapter: TypeAdapter[Any], line: bytes) -> Any:
    try:
        return adapter.validate_json(line)
    except ValueError:
        raise InvalidInput(f"message: must be one of the worker's, not {line[:80]!r}") from None
