"""A worker that several tests share, the tiny layer that it runs, and ways to wait for what it does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from moe_kernels import Impl, backends, unregister_backend

from workbench.engines.local import LocalEngine
from workbench.record import Record
from workbench.spec import RunSpec

HERE = Path(__file__).parent
CONFIG = {
    "model_type": "mixtral",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 1,
}


@pytest.fixture(scope="session")
def surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Locks, caches and the backends' notes in folders of this session; the backends can be imported."""
    folder = tmp_path_factory.mktemp("engines")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOE_WORKBENCH_LOCK_DIR", str(folder / "locks"))
        patch.setenv("MOE_WORKBENCH_CACHE", str(folder / "cache"))
        patch.setenv("FAULTS_FOLDER", str(folder))
        patch.setenv("OMP_NUM_THREADS", "1")  # threads that wait for one another on a busy machine take seconds
        patch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]))
        patch.syspath_prepend(str(HERE))
        yield folder


@pytest.fixture(scope="session")
def model(surroundings: Path) -> str:
    path = surroundings / "tiny" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(CONFIG), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="session")
def point(model: str) -> Callable[..., RunSpec]:
    """A spec of the tiny layer: `point("hangs", timeout_s=2)` with the backend of that name."""

    def make(backend: str = "right", **values: Any) -> RunSpec:
        given = {"model": model, "device": "cpu", "quant": "fp32", "num_tokens": 4, "samples": 3, "timeout_s": 60.0}
        return RunSpec.from_flat({**given, "moe_backend": f"faulty_backends:{backend}", **values})

    return make


@pytest.fixture
def own_lock(surroundings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Locks of this test alone: the engine that others share holds the device."""
    monkeypatch.setenv("MOE_WORKBENCH_LOCK_DIR", str(tmp_path / "locks"))
    return tmp_path / "locks"


@pytest.fixture(scope="module")
def light(surroundings: Path) -> Iterator[None]:
    """Engines of this module start `light_worker`, which needs no torch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("workbench.engines.process.MODULE", "light_worker")
        yield


@pytest.fixture(scope="module")
def engine(surroundings: Path) -> Iterator[LocalEngine]:
    """One engine for the tests of a module."""
    with LocalEngine("cpu") as shared:
        yield shared


@pytest.fixture
def told(surroundings: Path) -> Iterator[Callable[[str], int]]:
    """Waits for the number that a backend leaves under a name."""
    names = [surroundings / name for name in ("hanging", "child")]
    for path in names:
        path.unlink(missing_ok=True)

    def wait(name: str) -> int:
        wait_for(lambda: (surroundings / name).exists(), 60, f"the backend to write {name}")
        return int((surroundings / name).read_text(encoding="utf-8"))

    yield wait
    for path in names:
        path.unlink(missing_ok=True)


@pytest.fixture
def script(own_lock: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts another Python process, for instance one that owns an engine; killed at the end of the test."""
    started: list[subprocess.Popen[str]] = []

    def start(text: str, *argv: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-u", "-c", text, *argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait(10)
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()


class Background:
    """`engine.run(spec)` in a thread of its own."""

    def __init__(self, engine: Any, spec: RunSpec, **options: Any) -> None:
        self.record: Record | None = None
        self.error: BaseException | None = None
        self._call = lambda: engine.run(spec, **options)
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            self.record = self._call()
        except BaseException as error:
            self.error = error

    def result(self, timeout_s: float) -> Record:
        """The record, within `timeout_s`."""
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), f"the run did not end within {timeout_s} s"
        if self.error is not None:
            raise self.error
        assert self.record is not None
        return self.record


@pytest.fixture(scope="session")
def background() -> type[Background]:
    return Background


def wait_for(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"waited {timeout_s} s for {what}"
        time.sleep(0.02)


@pytest.fixture(scope="session")
def gone() -> Callable[..., None]:
    """Waits until none of the processes runs any more; a zombie runs no more (not every container reaps orphans)."""

    def dead(pid: int) -> bool:
        try:
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    def wait(*pids: int, timeout_s: float = 5) -> None:
        wait_for(lambda: all(map(dead, pids)), timeout_s, f"processes {pids} to be gone")

    return wait


@pytest.fixture(autouse=True)
def no_backend_is_left_behind() -> Iterator[None]:
    """Backends that a test registers in this process are gone after it."""
    yield
    for name in backends()[len(Impl) :]:
        unregister_backend(name)
