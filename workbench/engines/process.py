"""The worker as its parent sees it: a process group, a queue of its answers, a log. No torch here."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from typing import IO

from workbench.devices import DeviceInfo
from workbench.engines.lock import command_line
from workbench.engines.protocol import Answer, Close, Request, decode_answer, encode
from workbench.errors import InvalidInput

MODULE = "workbench.engines.worker"
LOG_TAIL_BYTES = 4000
CLOSE_S = 3.0


class WorkerProcess:
    """One run of the worker. `answers` gives its messages, then None when it has gone."""

    def __init__(self, device: DeviceInfo) -> None:
        # Unlinked from the start: nothing to clean up, however the two processes end.
        self._log = tempfile.TemporaryFile(prefix="moe-workbench-")  # noqa: SIM115 - it lives as long as the worker
        self._owner = os.getpid()
        asked = "cpu" if device.type == "cpu" else "cuda"
        # Nothing is ever written to this pipe: its end tells the worker's watchdog that we are gone, however we went.
        alive, self._alive = os.pipe()
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-X",
                "faulthandler",
                "-m",
                MODULE,
                asked,
                str(alive),
                str(os.getpid()),
                command_line(),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=worker_environment(device),
            pass_fds=(alive,),
            start_new_session=True,  # Ctrl-C in the terminal is ours; and the group can be killed whole
        )
        os.close(alive)
        self.pid = self._process.pid
        self.answers: queue.SimpleQueue[Answer | None] = queue.SimpleQueue()
        assert self._process.stdout is not None
        reader = threading.Thread(
            target=_read, args=(self._process.stdout, self.answers), name="worker-answers", daemon=True
        )
        reader.start()

    def send(self, message: Request) -> None:
        """Write a request. A worker that has gone is told by `answers`."""
        pipe = self._process.stdin
        assert pipe is not None
        with suppress(BrokenPipeError, ValueError, OSError):
            pipe.write(encode(message))
            pipe.flush()

    def status(self) -> int | None:
        """Exit status, negative for a signal; None while it runs.

        The worker is not reaped by this: until `kill`, its number, which is its group's, cannot be given to another.
        """
        if self._process.returncode is not None or not hasattr(os, "waitid"):
            return self._process.poll()
        try:
            found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # reaped by someone else in this process
            return self._process.poll()
        if found is None:
            return None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    def wait(self, timeout_s: float) -> int | None:
        """Exit status; None where it still runs after this time."""
        until = time.monotonic() + timeout_s
        while (status := self.status()) is None and time.monotonic() < until:
            time.sleep(0.01)
        return status

    def kill_group(self) -> None:
        """End the worker and all that it started, without waiting."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def kill(self) -> None:
        """End the worker and all that it started; its device is free when this returns. Read `log_tail` before."""
        if os.getpid() != self._owner:  # a fork of our process that ends: the worker is not its own
            return
        self.kill_group()
        self._process.wait()
        alive, self._alive = self._alive, -1
        if alive >= 0:
            os.close(alive)
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        self._log.close()

    def close(self) -> None:
        """Let it end by itself when it is idle, else make it."""
        self.send(Close())
        self.wait(CLOSE_S)
        self.kill()

    def log_tail(self) -> str:
        """The end of what it wrote to its standard error."""
        try:
            file = self._log.fileno()
            size = os.fstat(file).st_size
            return os.pread(file, LOG_TAIL_BYTES, max(0, size - LOG_TAIL_BYTES)).decode(errors="replace")
        except (OSError, ValueError):
            return ""

    def ending(self) -> str:
        """How it ended, in words."""
        code = self.wait(CLOSE_S)
        if code is None:
            return "it closed its pipe and went on"
        if code < 0:
            try:
                return f"killed by signal {signal.Signals(-code).name}"
            except ValueError:
                return f"killed by signal {-code}"
        return f"exit status {code}"


def worker_environment(device: DeviceInfo) -> dict[str, str]:
    """Variables of the worker: our module path (a notebook's folder is on it), and one GPU, by its own number."""
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    environment["PYTHONUNBUFFERED"] = "1"
    if device.type == "cuda" and device.uuid is not None:
        environment["CUDA_VISIBLE_DEVICES"] = device.uuid
    return environment


def _read(pipe: IO[bytes], answers: queue.SimpleQueue[Answer | None]) -> None:
    """Hold no reference to the process or engine, so that a forgotten engine can be collected and closed."""
    with pipe:
        for line in pipe:
            try:
                answers.put(decode_answer(line))
            except InvalidInput:
                break  # cut short by a crash, or not our worker: as good as gone
    answers.put(None)
