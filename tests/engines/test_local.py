"""A point in a process of its own: what goes wrong there costs that point and no other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from workbench.engines.local import LocalEngine
from workbench.errors import InvalidInput
from workbench.record import Record, Status
from workbench.spec import RunSpec

Point = Callable[..., RunSpec]
pytestmark = pytest.mark.usefixtures("light")
OWNER = """
import sys
from workbench.engines import process
from workbench.engines.local import LocalEngine
from workbench.spec import RunSpec
process.MODULE = "light_worker"
engine = LocalEngine("cpu")
"""


def good(record: Record) -> bool:
    """Whether the point was run, and no other one's answer is given for it."""
    assert record.status is Status.OK, f"{record.status}: {record.reason}\n{record.detail}"
    return record.latency_us == record.spec.point.num_tokens


def test_two_points_in_one_worker(engine: LocalEngine, point: Point) -> None:
    states: list[str] = []
    texts: list[str] = []

    def progress(state: str, text: str) -> None:
        states.append(state)
        texts.append(text)

    spec = point()
    first = engine.run(spec, progress=progress)
    pid = engine.pid
    second = engine.run(point(num_tokens=7))
    assert good(first)
    assert first.spec == spec
    assert good(second)
    assert second.spec.point.num_tokens == 7
    assert pid is not None
    assert pid not in (None, os.getpid())
    assert engine.pid == pid
    assert not engine.busy
    assert states[0] == "starting"
    assert states[-1] == "done"
    assert [s for s in dict.fromkeys(states) if s in ("checking", "measuring")] == ["checking", "measuring"]
    assert all(texts)


def test_the_environment_is_the_same_before_and_after_the_start(own_lock: Path, point: Point) -> None:
    with LocalEngine("cpu") as engine:
        before = engine.environment
        assert engine.pid is None
        record = engine.run(point())
        assert engine.environment.fingerprint == before.fingerprint == record.environment.fingerprint
        assert before.torch
        assert before.device_type == "cpu"


def test_stray_output_does_not_reach_the_messages(engine: LocalEngine, point: Point) -> None:
    record = engine.run(point("noisy", num_tokens=5))
    assert good(record)
    assert record.spec == point("noisy", num_tokens=5)
    assert good(engine.run(point()))


def test_a_point_that_fails_leaves_the_worker_alone(engine: LocalEngine, point: Point) -> None:
    assert good(engine.run(point()))
    pid = engine.pid
    record = engine.run(point("raises"))
    assert record.status is Status.RUNTIME_ERROR
    assert "divided by nought" in record.reason
    assert record.metrics == {}
    assert good(engine.run(point()))
    assert engine.pid == pid


def test_a_device_error_gives_the_next_point_a_new_worker(
    engine: LocalEngine, point: Point, gone: Callable[..., None]
) -> None:
    engine.run(point())
    pid = engine.pid
    assert pid is not None
    record = engine.run(point("poisons"))
    assert record.status is Status.RUNTIME_ERROR
    assert "illegal memory access" in record.reason
    assert any("device is in an error state" in note for note in record.notes)
    gone(pid)
    assert good(engine.run(point()))
    assert engine.pid != pid


def test_an_abort_costs_one_point(engine: LocalEngine, point: Point) -> None:
    engine.run(point())
    pid = engine.pid
    record = engine.run(point("aborts"))
    assert record.status is Status.CRASHED
    assert "SIGABRT" in record.reason
    assert "last words before the abort" in record.detail
    assert record.metrics == {}
    assert record.environment.torch
    assert good(engine.run(point()))
    assert engine.pid != pid


def test_a_worker_that_leaves_gives_its_exit_code(engine: LocalEngine, point: Point) -> None:
    record = engine.run(point("leaves"))
    assert record.status is Status.CRASHED
    assert "exit status 3" in record.reason
    assert good(engine.run(point()))


def test_a_worker_that_dies_and_leaves_a_fork_behind(engine: LocalEngine, point: Point) -> None:
    start = time.monotonic()
    record = engine.run(point("orphans"))
    assert record.status is Status.CRASHED
    assert "SIGSEGV" in record.reason
    assert time.monotonic() - start < 5
    assert good(engine.run(point()))


def test_a_worker_killed_in_the_middle(
    engine: LocalEngine, point: Point, told: Callable[[str], int], background: Any
) -> None:
    going = background(engine, point("hangs"))
    os.kill(told("hanging"), signal.SIGKILL)
    record = going.result(5)
    assert record.status is Status.CRASHED
    assert "SIGKILL" in record.reason
    assert good(engine.run(point()))


def test_a_worker_killed_between_two_points(engine: LocalEngine, point: Point) -> None:
    engine.run(point())
    assert engine.pid is not None
    psutil.Process(engine.pid).kill()
    time.sleep(0.2)
    assert good(engine.run(point()))


@pytest.mark.parametrize("backend", ["hangs", "sleeps"])
def test_a_hang_ends_at_its_time_out(
    engine: LocalEngine, point: Point, told: Callable[[str], int], gone: Callable[..., None], backend: str
) -> None:
    engine.run(point())
    start = time.monotonic()
    record = engine.run(point(backend, timeout_s=2.5))
    took = time.monotonic() - start
    assert record.status is Status.TIMED_OUT
    assert "2.5 s" in record.reason
    assert 2.4 < took < 6
    assert "hanging from here on" in record.detail or backend == "sleeps"
    gone(told("hanging"))
    assert good(engine.run(point()))


@pytest.mark.parametrize(
    ("backend", "way"),
    [("hangs", "event"), ("hangs", "request"), ("sleeps", "event"), ("holds_interpreter", "event")],
)
def test_stop_ends_a_point_that_never_asks(
    engine: LocalEngine, point: Point, told: Callable[[str], int], background: Any, backend: str, way: str
) -> None:
    stop = threading.Event()
    going = background(engine, point(backend), stop=stop)
    pid = told("hanging")
    assert engine.busy
    assert engine.pid == pid
    start = time.monotonic()
    if way == "event":
        stop.set()
    else:
        engine.request_stop()
    record = going.result(5)
    assert record.status is Status.CANCELLED
    assert record.reason
    assert time.monotonic() - start < 4
    assert not engine.busy
    assert not psutil.pid_exists(pid)
    assert good(engine.run(point()))


def test_stop_is_heard_between_phases_and_the_worker_stays(engine: LocalEngine, point: Point) -> None:
    engine.run(point())
    pid = engine.pid
    stop = threading.Event()
    seen: list[str] = []

    def progress(state: str, text: str) -> None:
        seen.append(state)
        if state == "checking":
            stop.set()

    start = time.monotonic()
    record = engine.run(point(samples=100_000), stop=stop, progress=progress)
    assert record.status is Status.CANCELLED
    assert time.monotonic() - start < 4
    assert engine.pid == pid
    assert seen[-1] == "cancelled"
    assert good(engine.run(point()))


def test_late_messages_of_an_earlier_point_are_dropped(
    own_lock: Path, point: Point, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workbench.engines.process.MODULE", "late_worker")
    with LocalEngine("cpu") as engine:
        for tokens in (3, 4, 5):
            said: list[tuple[str, str]] = []
            record = engine.run(point(num_tokens=tokens), progress=lambda *heard, said=said: said.append(heard))
            assert record.spec.point.num_tokens == tokens
            assert good(record)
            assert "failed" not in [state for state, _ in said]
            assert said[-1][0] == "done"


def test_stop_before_the_start_starts_nothing(own_lock: Path, point: Point) -> None:
    stop = threading.Event()
    stop.set()
    with LocalEngine("cpu") as engine:
        record = engine.run(point(), stop=stop)
        assert record.status is Status.CANCELLED
        assert engine.pid is None


def test_a_stop_of_one_point_is_not_one_of_the_next(engine: LocalEngine, point: Point) -> None:
    engine.request_stop()
    assert good(engine.run(point()))


def test_run_pressed_twice(engine: LocalEngine, point: Point, told: Callable[[str], int], background: Any) -> None:
    going = background(engine, point("hangs"))
    told("hanging")
    with pytest.raises(RuntimeError, match="already"):
        engine.run(point())
    engine.request_stop()
    assert going.result(5).status is Status.CANCELLED
    assert good(engine.run(point()))


def test_an_interrupt_ends_the_worker(engine: LocalEngine, point: Point, gone: Callable[..., None]) -> None:
    def interrupt(state: str, text: str) -> None:
        if state == "checking":
            raise KeyboardInterrupt

    engine.run(point())
    pid = engine.pid
    assert pid is not None
    with pytest.raises(KeyboardInterrupt):
        engine.run(point(), progress=interrupt)
    gone(pid)
    assert not engine.busy
    assert good(engine.run(point()))


def test_what_cannot_run_here_is_said_without_a_worker(own_lock: Path, point: Point) -> None:
    with LocalEngine("cpu") as engine:
        record = engine.run(point(graph="full"))
        assert record.status is Status.UNSUPPORTED
        assert "CUDA graphs need a GPU" in record.reason
        assert record.environment.device_type == "cpu"
        assert engine.pid is None


def test_bad_specs_are_one_sentence(engine: LocalEngine, point: Point) -> None:
    with pytest.raises(InvalidInput, match="model"):
        engine.run(point(model="no-such-model"))
    with pytest.raises(InvalidInput, match="top_k"):
        engine.run(point(top_k=5))
    with pytest.raises(InvalidInput, match="device"):
        engine.run(point(device="cuda:7"))
    with pytest.raises(InvalidInput, match="device"):
        LocalEngine("tpu")


def test_close_leaves_nothing(own_lock: Path, point: Point) -> None:
    own = psutil.Process()
    before = {child.pid for child in own.children(recursive=True)}
    engine = LocalEngine("cpu")
    engine.run(point())
    pid = engine.pid
    assert pid is not None
    start = time.monotonic()
    engine.close()
    engine.close()
    assert time.monotonic() - start < 6
    assert not psutil.pid_exists(pid)  # not even as a zombie
    assert {child.pid for child in own.children(recursive=True)} <= before
    assert engine.pid is None


def test_close_while_a_point_runs(own_lock: Path, point: Point, told: Callable[[str], int], background: Any) -> None:
    engine = LocalEngine("cpu")
    going = background(engine, point("hangs"))
    pid = told("hanging")
    engine.close()
    assert going.result(8).status is Status.CANCELLED
    assert not psutil.pid_exists(pid)


def test_an_engine_that_is_forgotten_takes_its_worker_along(
    own_lock: Path, point: Point, gone: Callable[..., None]
) -> None:
    engine = LocalEngine("cpu")
    engine.run(point())
    pid = engine.pid
    assert pid is not None
    del engine
    gone(pid)


def test_a_process_that_ends_takes_its_worker_along(
    script: Callable[..., subprocess.Popen[str]], point: Point, gone: Callable[..., None]
) -> None:
    owner = script(
        OWNER + "engine.run(RunSpec.from_json(sys.argv[1]))\nprint(engine.pid)",
        point().to_json(),
    )
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    assert owner.wait(10) == 0
    gone(pid)


def test_a_fork_of_the_notebook_that_ends_does_not_end_the_worker(
    script: Callable[..., subprocess.Popen[str]], point: Point
) -> None:
    owner = script(
        OWNER
        + "import os\n"
        + "spec = RunSpec.from_json(sys.argv[1])\n"
        + "engine.run(spec)\n"
        + "pid = engine.pid\n"
        + "if not (fork := os.fork()):\n"
        + "    sys.exit()\n"
        + "os.waitpid(fork, 0)\n"
        + "print(engine.run(spec).status, engine.pid == pid)\n",
        point().to_json(),
    )
    assert owner.stdout is not None
    assert owner.stdout.readline() == "ok True\n"


@pytest.mark.parametrize("backend", ["has_child", "holds_interpreter"])
def test_a_notebook_that_is_killed_takes_its_worker_and_what_that_started_along(
    script: Callable[..., subprocess.Popen[str]],
    point: Point,
    told: Callable[[str], int],
    gone: Callable[..., None],
    backend: str,
) -> None:
    owner = script(
        OWNER + "engine.run(RunSpec.from_json(sys.argv[1]))",
        point(backend).to_json(),
    )
    pids = [told("hanging"), *([told("child")] if backend == "has_child" else [])]
    assert all(psutil.pid_exists(pid) for pid in pids)
    owner.kill()
    gone(*pids)


def test_no_torch_in_the_notebooks_process() -> None:
    code = (
        "import sys\n"
        "from workbench.engines import environment, fake, local, lock, protocol\n"
        "engine = local.LocalEngine('cpu'); engine.environment; engine.close()\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    assert subprocess.run([sys.executable, "-c", code], env=env, timeout=60).returncode == 0
