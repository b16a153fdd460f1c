"""Stop, and an interrupt, in the middle of a compile: nothing asks there, so the worker and its compilers are ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from workbench.engines.local import LocalEngine
from workbench.record import Status
from workbench.spec import RunSpec


@pytest.mark.parametrize("way", ["stop", "interrupt"])
def test_the_compile_ends_and_the_next_point_is_right(
    surroundings: Path, point: Callable[..., RunSpec], own_lock: Path, gone: Callable[..., None], way: str
) -> None:
    stop = threading.Event()
    seen: list[str] = []
    children: list[int] = []

    def progress(state: str, text: str) -> None:
        seen.append(state)
        if state == "compiling" and engine.pid is not None and not children:
            time.sleep(1.0)  # well into it: dynamo's import alone takes longer
            children.extend(child.pid for child in psutil.Process(engine.pid).children(recursive=True))
            if way == "interrupt":
                raise KeyboardInterrupt
            stop.set()

    spec = point(moe_backend="reference", compile="default", cache="cold", num_tokens=5)
    with LocalEngine("cpu") as engine:
        assert engine.run(point()).status is Status.OK
        pid: Any = engine.pid
        start = time.monotonic()
        if way == "interrupt":
            with pytest.raises(KeyboardInterrupt):
                engine.run(spec, progress=progress)
        else:
            record = engine.run(spec, progress=progress, stop=stop)
            assert record.status is Status.CANCELLED
            assert "compiling" in record.reason
            assert record.metrics == {}
        assert time.monotonic() - start < 5
        assert seen[-1] == "compiling" or way == "stop"
        assert children  # the watchdog at least
        gone(pid, *children)
        assert not engine.busy
        assert engine.run(point()).status is Status.OK
