"""One process a device: a lock file that the kernel lets go of when its holder ends. No torch here."""

from __future__ import annotations

import getpass
import json
import os
import re
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from workbench.devices import DeviceInfo
from workbench.errors import DeviceBusy
from workbench.record import now


def lock_folder() -> Path:
    """`$MOE_WORKBENCH_LOCK_DIR`, else one in `/tmp` (the temp folder where there is none).

    Never a place that differs from user to user or from login to job, such as `$XDG_RUNTIME_DIR` or `$TMPDIR`: two
    processes that look in two folders would both take the device.
    """
    own = os.environ.get("MOE_WORKBENCH_LOCK_DIR")
    if own:
        return Path(own)
    shared = Path("/tmp")
    return (shared if shared.is_dir() else Path(tempfile.gettempdir())) / "moe-workbench-locks"


def lock_name(device: DeviceInfo) -> str:
    """`cpu`, or the GPU's own number, so that two names for one GPU meet in one lock."""
    identity = device.uuid or device.torch_device
    return "cpu" if device.type == "cpu" else re.sub(r"[^A-Za-z0-9-]", "-", identity)


class DeviceLock:
    """Held from `acquire` until `release`, or until this process ends in whatever way."""

    def __init__(self, device: DeviceInfo) -> None:
        self.device = device
        self.path = lock_folder() / f"{lock_name(device)}.lock"
        self._file: int | None = None

    def acquire(self, *, owner_pid: int, owner: str) -> None:
        """Take the device for `owner`, the process that this one works for.

        Raises:
            DeviceBusy: another process holds it, or the lock file cannot be used; the sentence says which.
        """
        import fcntl

        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with suppress(OSError):
                self.path.parent.chmod(0o1777)  # shared by the users of a machine, like the temp folder itself
            flags = os.O_RDWR | os.O_NOFOLLOW
            try:  # a kernel with fs.protected_regular lets nobody "create" what another user has made there
                file = os.open(self.path, flags)
            except FileNotFoundError:
                file = os.open(self.path, flags | os.O_CREAT, 0o666)
            with suppress(OSError):
                os.chmod(self.path, 0o666)
        except OSError as error:
            raise DeviceBusy(f"The lock {self.path} of {self.device.name} cannot be used ({error.strerror}).") from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            text = os.pread(file, 65536, 0).decode(errors="replace")
            os.close(file)
            raise DeviceBusy(busy_sentence(self.device, text)) from None
        holder = {"pid": os.getpid(), "owner_pid": owner_pid, "user": user(), "command": owner, "since": now()}
        os.ftruncate(file, 0)
        os.pwrite(file, json.dumps(holder).encode(), 0)
        self._file = file

    def release(self) -> None:
        """Let go. The file stays: removing it would let two processes lock two files of one name."""
        if self._file is not None:
            os.ftruncate(self._file, 0)
            os.close(self._file)
            self._file = None


def user() -> str:
    """The user's name, or number where there is no name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):
        return str(os.getuid())


def command_line() -> str:
    """How this process was started, short enough for a sentence."""
    text = " ".join(sys.argv) or "python"
    return text if len(text) <= 120 else text[:117] + "..."


def busy_sentence(device: DeviceInfo, holder: str) -> str:
    """Who holds the device, since when, and how much memory is free."""
    try:
        data = json.loads(holder)
        who = (
            f"is in use by process {int(data['owner_pid'])} of {data['user']} ({data['command']}; its worker is "
            f"process {int(data['pid'])}) since {data['since']}"
        )
    except (ValueError, KeyError, TypeError):
        who = "is in use by another process"
    return f"{device.name} ({device.torch_device}) {who}.{_free_memory(device)} Close it there or wait."


def _free_memory(device: DeviceInfo) -> str:
    if device.type != "cuda" or device.uuid is None:
        return ""
    try:
        import pynvml

        pynvml.nvmlInit()
        memory = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByUUID(device.uuid))
    except Exception:  # without the driver's word there is nothing to say
        return ""
    return f" {memory.free / 2**30:.1f} of {memory.total / 2**30:.1f} GiB of its memory are free."
