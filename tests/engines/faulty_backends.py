"""Backends of a user's own, imported in the worker: one that is right, and others that do what must not hurt anybody.

Where a fault leaves word for the test (its process numbers), it writes files to the folder `$FAULTS_FOLDER`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

FORGED = b'{"kind":"done","generation":1,"record":null}\n'


def right(x: Any, weights: Any, routing: Any) -> Any:
    """The specification itself; without weights (in `light_worker`) what it was given."""
    if weights is None:
        return x
    from moe_kernels import fused_experts

    return fused_experts(x, weights, routing, impl="reference")


def noisy(x: Any, weights: Any, routing: Any) -> Any:
    """Writes to standard output in every way, lines that look like messages among them, and reads standard input."""
    print("a stray print")
    print(FORGED.decode(), end="", flush=True)
    os.write(1, b"no line end")
    os.write(sys.__stdout__.fileno(), FORGED)
    assert sys.stdin.read() == ""
    return right(x, weights, routing)


def raises(x: Any, weights: Any, routing: Any) -> Any:
    """An ordinary error."""
    raise ZeroDivisionError("the backend divided by nought")


def poisons(x: Any, weights: Any, routing: Any) -> Any:
    """What an illegal memory access leaves behind; only `light_worker` knows of it."""
    raise RuntimeError("an illegal memory access was encountered")


def orphans(x: Any, weights: Any, routing: Any) -> Any:
    """Dies and leaves a fork behind that holds all its pipes open."""
    if os.fork() == 0:
        time.sleep(3600)
    os.kill(os.getpid(), 11)


def wrong(x: Any, weights: Any, routing: Any) -> Any:
    """Twice the right answer."""
    return 2 * right(x, weights, routing)


def aborts(x: Any, weights: Any, routing: Any) -> Any:
    """What a failed C++ assertion does."""
    os.write(2, b"last words before the abort\n")
    os.abort()


def leaves(x: Any, weights: Any, routing: Any) -> Any:
    """Ends the process without a word."""
    os._exit(3)


def hangs(x: Any, weights: Any, routing: Any) -> Any:
    """Computes for ever and never asks whether to stop."""
    _tell("hanging", os.getpid())
    os.write(2, b"hanging from here on\n")
    while True:
        pass


def sleeps(x: Any, weights: Any, routing: Any) -> Any:
    """Waits in the system, as for a kernel that never ends."""
    _tell("hanging", os.getpid())
    time.sleep(3600)


def holds_interpreter(x: Any, weights: Any, routing: Any) -> Any:
    """Sits in a C function that never lets another thread of the process run."""
    import ctypes

    _tell("hanging", os.getpid())
    ctypes.PyDLL(None).sleep(3600)


def has_child(x: Any, weights: Any, routing: Any) -> Any:
    """Starts a process, as inductor does, then hangs."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    _tell("child", child.pid)
    return sleeps(x, weights, routing)


def _tell(name: str, number: int) -> None:
    path = Path(os.environ["FAULTS_FOLDER"], name)
    part = path.with_suffix(".part")
    part.write_text(str(number), encoding="utf-8")
    part.rename(path)
