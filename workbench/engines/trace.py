"""The profile of one step, written as a trace file, in this process."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import torch

from workbench.check.step_trace import trace_step
from workbench.devices import find_device
from workbench.engines.draft import Draft
from workbench.engines.environment import device_environment
from workbench.engines.lock import DeviceLock, command_line
from workbench.engines.session import PointSession
from workbench.engines.step_point import StepRun, step_floors
from workbench.errors import InvalidInput
from workbench.measure.profile import profile_step
from workbench.measure.timer import nothing
from workbench.modes import Subject
from workbench.record import ProfileRow
from workbench.runtime.compile import watch_compiles
from workbench.spec import RunSpec


def run_profile(spec: RunSpec, path: Path) -> tuple[ProfileRow, ...]:
    """Run a step and write the trace of its prefill and first decode step, which Perfetto opens.

    Nothing is checked or timed here: kernels are slower under a profiler, and a run of the same spec says whether it is
    right.

    Args:
        spec: of subject `step`.
        path: the JSON file to write; its folder is made.

    Returns:
        The same in rows, by phase, layer, part and kind of kernel.

    Raises:
        InvalidInput: the spec is of another subject, cannot run here, or `path` cannot be written.
        DeviceBusy: another process holds the device.
    """
    from workbench.engines.faults import Unsupported

    if spec.subject is not Subject.STEP:
        raise InvalidInput(f"subject: a profile is of a step, not of a {spec.subject}")
    path = Path(path)
    _writable(path)
    device = find_device(spec.device)
    lock = DeviceLock(device)
    lock.acquire(owner_pid=os.getpid(), owner=command_line())
    try:
        watch_compiles()
        session = PointSession(device, device_environment(device))
        with torch.no_grad(), ExitStack() as stack:
            run = StepRun(spec, device, session, lambda _state, _text: None, nothing, Draft(), stack)
            try:
                runner, _ = run.prepare()
            except Unsupported as error:
                raise InvalidInput(str(error)) from None
            floors = step_floors(runner, trace_step(runner, nothing))
            return profile_step(runner, floors, path)
    finally:
        lock.release()


def _writable(path: Path) -> None:
    """Said before a model is loaded, not after."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise InvalidInput(f"out: must be a file, and {path} is a folder")
        with path.open("a", encoding="utf-8"):
            pass
    except OSError as error:
        raise InvalidInput(f"out: {path} cannot be written ({error.strerror})") from None
