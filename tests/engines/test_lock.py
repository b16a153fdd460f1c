"""One process a device, and a sentence about who has it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from workbench.devices import DeviceInfo
from workbench.engines.local import LocalEngine
from workbench.engines.lock import DeviceLock, lock_folder, lock_name
from workbench.errors import DeviceBusy
from workbench.record import Status
from workbench.spec import RunSpec

CPU = DeviceInfo(type="cpu", name="Some CPU", torch_device="cpu")
GPU = DeviceInfo(type="cuda", name="Some GPU", torch_device="cuda:1", index=1, uuid="GPU-12ab/34")

HOLD = """
import sys
from workbench.devices import DeviceInfo
from workbench.engines.lock import DeviceLock
lock = DeviceLock(DeviceInfo(type="cpu", name="Some CPU", torch_device="cpu"))
lock.acquire(owner_pid=4242, owner="a notebook")
print("held")
sys.stdin.readline()
"""


@pytest.fixture
def folder(own_lock: Path) -> Path:
    return own_lock


def hold(script: Callable[..., subprocess.Popen[str]]) -> subprocess.Popen[str]:
    holder = script(HOLD)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    return holder


def test_a_second_process_is_told_who_and_since_when(
    folder: Path, script: Callable[..., subprocess.Popen[str]]
) -> None:
    holder = hold(script)
    with pytest.raises(DeviceBusy) as told:
        DeviceLock(CPU).acquire(owner_pid=1, owner="me")
    text = str(told.value)
    for word in ("Some CPU", "4242", "a notebook", str(holder.pid), "since 20"):
        assert word in text
    holder.kill()
    holder.wait(10)
    lock = DeviceLock(CPU)
    lock.acquire(owner_pid=1, owner="me")  # what the dead one wrote is no obstacle
    lock.release()
    lock.release()


@pytest.mark.parametrize("content", ["", "nonsense", '{"pid": 1}', "[1]", "\udcff"])
def test_any_content_without_a_lock_is_no_obstacle(folder: Path, content: str) -> None:
    folder.mkdir()
    (folder / "cpu.lock").write_bytes(content.encode(errors="surrogateescape"))
    lock = DeviceLock(CPU)
    lock.acquire(owner_pid=os.getpid(), owner="me")
    with pytest.raises(DeviceBusy, match=str(os.getpid())):  # one lock an open file, so also within a process
        DeviceLock(CPU).acquire(owner_pid=1, owner="another")
    lock.release()


def test_busy_is_said_even_where_the_content_says_nothing(
    folder: Path, script: Callable[..., subprocess.Popen[str]]
) -> None:
    hold(script)
    (folder / "cpu.lock").write_text("torn{", encoding="utf-8")
    with pytest.raises(DeviceBusy, match=r"Some CPU .* in use by another process"):
        DeviceLock(CPU).acquire(owner_pid=1, owner="me")


def test_devices_have_locks_of_their_own(folder: Path) -> None:
    assert lock_name(CPU) == "cpu"
    assert lock_name(GPU) == "GPU-12ab-34"
    one, two = DeviceLock(CPU), DeviceLock(GPU)
    one.acquire(owner_pid=1, owner="me")
    two.acquire(owner_pid=1, owner="me")
    assert {path.name for path in folder.iterdir()} == {"cpu.lock", "GPU-12ab-34.lock"}
    one.release()
    two.release()


def test_where_locks_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_WORKBENCH_LOCK_DIR", str(tmp_path / "own"))
    assert lock_folder() == tmp_path / "own"
    monkeypatch.delenv("MOE_WORKBENCH_LOCK_DIR")
    for name in ("XDG_RUNTIME_DIR", "TMPDIR"):  # of one login or one job: another would look for the lock elsewhere
        monkeypatch.setenv(name, str(tmp_path))
    assert lock_folder() == Path("/tmp/moe-workbench-locks")


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_users_share_the_folder(folder: Path) -> None:
    before = os.umask(0o077)
    try:
        lock = DeviceLock(CPU)
        lock.acquire(owner_pid=1, owner="me")
        lock.release()
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o7777 == 0o1777
    assert (folder / "cpu.lock").stat().st_mode & 0o777 == 0o666


def test_a_lock_that_cannot_be_made_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("MOE_WORKBENCH_LOCK_DIR", str(tmp_path / "file"))
    with pytest.raises(DeviceBusy, match="cannot be used"):
        DeviceLock(CPU).acquire(owner_pid=1, owner="me")


def test_a_second_engine_elsewhere_is_told_and_can_run_afterwards(
    own_lock: Path,
    point: Callable[..., RunSpec],
    script: Callable[..., subprocess.Popen[str]],
    light: None,
) -> None:
    owner = script(
        "import sys\n"
        "from workbench.engines import process\n"
        "process.MODULE = 'light_worker'\n"
        "from workbench.engines.local import LocalEngine\n"
        "from workbench.spec import RunSpec\n"
        "engine = LocalEngine('cpu')\n"
        "print(engine.run(RunSpec.from_json(sys.argv[1])).status, engine.pid)\n"
        "sys.stdin.readline()\n"
        "engine.close()\n",
        point().to_json(),
    )
    assert owner.stdout is not None
    assert owner.stdin is not None
    status, pid = owner.stdout.readline().split()
    assert status == "ok"
    with LocalEngine("cpu") as engine:
        with pytest.raises(DeviceBusy) as told:
            engine.run(point())
        assert str(owner.pid) in str(told.value)
        assert pid in str(told.value)
        assert engine.pid is None
        assert not engine.busy
        owner.stdin.write("\n")
        owner.stdin.flush()
        assert owner.wait(15) == 0
        assert engine.run(point()).status is Status.OK


def test_the_lock_is_taken_before_torch_is_imported(
    own_lock: Path,
    point: Callable[..., RunSpec],
    script: Callable[..., subprocess.Popen[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hold(script)
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    with LocalEngine("cpu") as engine, pytest.raises(DeviceBusy, match="4242"):
        engine.run(point())
