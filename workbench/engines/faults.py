"""From an exception to a record's status and a sentence."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from workbench.errors import InvalidInput
from workbench.record import Status
from workbench.runtime.graph import CaptureError

DETAIL_CHARACTERS = 8000
# What the CPU allocator and drivers write when memory is out.
_MEMORY_WORDS = ("can't allocate memory", "not enough memory", "CUDA out of memory", "CUDA error: out of memory")
# After these the CUDA context answers every call with the same error.
_STICKY_WORDS = ("device-side assert", "illegal memory access", "misaligned address", "illegal instruction",
                 "unspecified launch failure", "invalid program counter", "hardware stack error", "launch timed out",
                 "illegal address", "Invalid address space")  # fmt: skip


class Cancelled(Exception):
    """The point was asked to end."""


class Unsupported(Exception):
    """The point cannot run here; `str` is the sentence."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What went wrong. `poisoned`: why this process can do no more, empty where it can."""

    status: Status
    reason: str
    detail: str
    poisoned: str = ""


def describe(error: BaseException, device_type: str) -> Fault:
    """Name the fault, then let go of everything that the traceback holds, so that its memory can be used again."""
    text = "".join(traceback.format_exception(error))
    detail = text if len(text) <= DETAIL_CHARACTERS else "...\n" + text[-DETAIL_CHARACTERS:]
    chain = list(_chain(error))
    status, reason = _status(error, chain)
    poisoned = _poisoned(chain, device_type)
    for one in chain:
        traceback.clear_frames(one.__traceback__)
        one.__traceback__ = None
    gc.collect()
    return Fault(status, reason, "" if status in (Status.CANCELLED, Status.UNSUPPORTED) else detail, poisoned)


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        one = todo.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            yield one
            todo += [one.__context__, one.__cause__, getattr(one, "inner_exception", None)]


def _status(error: BaseException, chain: list[BaseException]) -> tuple[Status, str]:
    if isinstance(error, Cancelled):
        return Status.CANCELLED, "stopped by the user"
    if isinstance(error, (Unsupported, InvalidInput)):
        return Status.UNSUPPORTED, str(error)
    for one in chain:
        if isinstance(one, (torch.OutOfMemoryError, MemoryError)) or any(w in str(one) for w in _MEMORY_WORDS):
            return Status.OUT_OF_MEMORY, f"memory ran out: {_line(one)}"
    if isinstance(error, CaptureError):
        return Status.CAPTURE_ERROR, _line(error)
    for one in chain:
        if _is_compile_error(one):
            return Status.COMPILE_ERROR, f"{type(one).__name__}: {_line(one)}"
    return Status.RUNTIME_ERROR, f"{type(error).__name__}: {_line(error)}"


def _is_compile_error(error: BaseException) -> bool:
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    if isinstance(error, (TorchDynamoException, FailOnRecompileLimitHit)):
        return True
    module = type(error).__module__
    return module.startswith(("torch._inductor", "torch._dynamo", "triton.compiler", "triton.runtime.errors"))


def _poisoned(chain: list[BaseException], device_type: str) -> str:
    for one in chain:
        if device_type == "cuda" and any(word in str(one) for word in _STICKY_WORDS):
            return "the device reported an error after which this process cannot use it"
        if isinstance(one, CaptureError) and one.leaked_bytes:
            return f"a failed capture kept {one.leaked_bytes / 2**20:.0f} MiB of device memory"
    return ""


def _line(error: BaseException) -> str:
    """The first line of a message that says something, short enough for a table."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else "no message"
    return text if len(text) <= 300 else text[:297] + "..."
