"""Names of faults, and what they leave behind."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from workbench.engines.faults import Cancelled, Unsupported, describe
from workbench.errors import InvalidInput
from workbench.record import Status
from workbench.runtime.graph import CaptureError


def chained(cause: BaseException, top: BaseException) -> BaseException:
    try:
        try:
            raise cause
        except BaseException as error:
            raise top from error
    except BaseException as error:
        return error


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (Cancelled(), Status.CANCELLED),
        (Unsupported("no"), Status.UNSUPPORTED),
        (InvalidInput("routing: no"), Status.UNSUPPORTED),
        (torch.OutOfMemoryError("x"), Status.OUT_OF_MEMORY),
        (MemoryError(), Status.OUT_OF_MEMORY),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), Status.OUT_OF_MEMORY),
        (CaptureError("the capture failed"), Status.CAPTURE_ERROR),
        (chained(torch.OutOfMemoryError("x"), CaptureError("y")), Status.OUT_OF_MEMORY),
        (torch._dynamo.exc.Unsupported("x"), Status.COMPILE_ERROR),
        (torch._dynamo.exc.FailOnRecompileLimitHit("x"), Status.COMPILE_ERROR),
        (ValueError("x"), Status.RUNTIME_ERROR),
        (RuntimeError("CUDA error: device-side assert triggered"), Status.RUNTIME_ERROR),
    ],
)
def test_names(error: BaseException, status: Status) -> None:
    fault = describe(error, "cpu")
    assert fault.status is status
    assert fault.reason
    assert fault.poisoned == ""


@pytest.mark.parametrize(
    "text", ["CUDA error: device-side assert triggered", "an illegal memory access was encountered"]
)
def test_device_errors_poison_a_gpu_process(text: str) -> None:
    assert "cannot use it" in describe(RuntimeError(text), "cuda").poisoned
    assert "cannot use it" in describe(chained(RuntimeError(text), ValueError("later")), "cuda").poisoned
    assert describe(RuntimeError("CUDA error: invalid argument"), "cuda").poisoned == ""


def test_a_capture_that_keeps_memory_poisons() -> None:
    assert "64 MiB" in describe(CaptureError("x", leaked_bytes=64 * 2**20), "cuda").poisoned
    assert describe(CaptureError("x"), "cuda").poisoned == ""


def test_frames_are_let_go() -> None:
    class Block:
        pass

    kept: list[weakref.ref[Block]] = []

    def inner() -> None:
        block = Block()
        kept.append(weakref.ref(block))
        raise ValueError("x")

    try:
        inner()
    except ValueError as caught:
        error = caught
    fault = describe(error, "cpu")
    gc.collect()
    assert kept[0]() is None
    assert "inner" in fault.detail


def test_long_messages_are_cut() -> None:
    fault = describe(ValueError("word " * 10_000 + "\nnext"), "cpu")
    assert len(fault.reason) < 330
    assert len(fault.detail) < 8100
    assert describe(ValueError(), "cpu").reason == "ValueError: no message"
