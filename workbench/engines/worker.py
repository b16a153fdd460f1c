"""The process that owns a device: `python -m workbench.engines.worker DEVICE ALIVE OWNER_PID OWNER`.

It speaks `protocol` over its standard input and output, runs one point at a time on its main thread, and ends with its
parent: a watchdog process reads the pipe ALIVE, which ends when the parent has gone, and kills the worker's process
group. So compilers that it started go too, and a call that hangs without letting Python's threads run.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import BinaryIO

from workbench.devices import DeviceInfo, find_device
from workbench.engines.environment import device_environment, with_clocks
from workbench.engines.lock import DeviceLock
from workbench.engines.protocol import (
    Answer,
    Busy,
    Cancel,
    Close,
    Done,
    Progress,
    Ready,
    Run,
    Unable,
    decode_request,
    encode,
)
from workbench.errors import DeviceBusy, InvalidInput

WATCHDOG = "import os, sys; os.read(int(sys.argv[1]), 1); os.killpg(0, 9)"


def start_watchdog(alive: int) -> None:
    """A process of this group that kills the group when the pipe ends. Python alone, no site: it starts in a moment."""
    if os.getpgid(0) != os.getpid():  # started by hand: the group is the shell's, and not ours to kill
        return
    nothing = subprocess.DEVNULL
    command = [sys.executable, "-I", "-S", "-c", WATCHDOG, str(alive)]
    subprocess.Popen(command, pass_fds=(alive,), stdin=nothing, stdout=nothing, stderr=nothing)
    os.close(alive)


class Channel:
    """The pipe to the parent, taken away from whatever else in this process prints or reads."""

    def __init__(self) -> None:
        self._in: BinaryIO = os.fdopen(os.dup(0), "rb")
        self._out: BinaryIO = os.fdopen(os.dup(1), "wb", buffering=0)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        os.dup2(2, 1)
        self._lock = threading.Lock()
        self.requests: queue.Queue[Run | Close] = queue.Queue()
        self._cancelled = 0

    def send(self, message: Answer) -> None:
        """Write one message whole. A parent that has gone is noticed by the reader."""
        data = memoryview(encode(message))
        with self._lock:
            while data:
                try:
                    data = data[self._out.write(data) :]
                except BrokenPipeError:
                    return

    def cancelled(self, generation: int) -> bool:
        """Whether the parent asked to end this job."""
        return self._cancelled == generation

    def read_for_ever(self) -> None:
        """Sort requests as they come, until the parent's end of the pipe is gone."""
        for line in self._in:
            try:
                request = decode_request(line)
            except InvalidInput as error:
                print(error, file=sys.stderr, flush=True)  # noqa: T201 - standard error is the log
                continue
            if isinstance(request, Cancel):
                self._cancelled = request.generation
            else:
                self.requests.put(request)
        self.requests.put(Close())


def main(argv: list[str]) -> int:
    """Hold the device and run points until told to close."""
    asked, alive, owner_pid, owner = argv[1], int(argv[2]), int(argv[3]), argv[4]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interrupt means
    channel = Channel()
    start_watchdog(alive)
    threading.Thread(target=channel.read_for_ever, name="parent", daemon=True).start()
    try:
        device = find_device(asked)
        lock = DeviceLock(device)
        lock.acquire(owner_pid=owner_pid, owner=owner)
    except DeviceBusy as error:
        channel.send(Busy(sentence=str(error)))
        return 0
    except InvalidInput as error:
        channel.send(Unable(sentence=str(error)))
        return 0
    serve(channel, device)
    return 0


def serve(channel: Channel, device: DeviceInfo) -> None:
    """Answer requests. Torch is imported here, once the device is ours."""
    from workbench.engines.faults import Cancelled
    from workbench.engines.point import run_point
    from workbench.engines.session import PointSession
    from workbench.measure.roofs import find_roofs
    from workbench.models.cache import cache_folder
    from workbench.runtime.compile import watch_compiles

    watch_compiles()
    try:
        roofs = find_roofs(device, cache_folder())
    except Exception as error:
        channel.send(Unable(sentence=f"{device.name} cannot be used: {type(error).__name__}: {error}"))
        return
    environment = device_environment(device).model_copy(update={"roofs": roofs})
    session = PointSession(device, environment)
    channel.send(Ready(pid=os.getpid(), environment=with_clocks(environment)))
    while isinstance(request := channel.requests.get(), Run):
        generation = request.generation

        def check(generation: int = generation) -> None:
            if channel.cancelled(generation):
                raise Cancelled

        record = run_point(request.spec, device, session, _teller(channel, generation), check)
        channel.send(Done(generation=generation, record=record, leaving=session.poisoned))
        if session.poisoned:
            return


def _teller(channel: Channel, generation: int) -> Callable[[str, str], None]:
    def tell(state: str, text: str) -> None:
        channel.send(Progress(generation=generation, state=state, text=text))

    return tell


def leave(code: int) -> None:
    """End at once: a device in an error state can make the interpreter's own clean-up hang."""
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main(sys.argv))
