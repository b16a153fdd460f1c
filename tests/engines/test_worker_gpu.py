"""A worker that holds a GPU: others are told, and what hangs lets go of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from workbench.devices import find_device, gpus
from workbench.engines.local import LocalEngine
from workbench.engines.lock import DeviceLock
from workbench.errors import DeviceBusy
from workbench.record import Record, Status
from workbench.spec import RunSpec

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not gpus(), reason="needs an NVIDIA GPU")]


def good(record: Record) -> bool:
    """Measured and found right."""
    assert record.status is Status.OK, f"{record.status}: {record.reason}\n{record.detail}"
    return record.correctness is not None and record.correctness.passed and record.resolved["device"] == "cuda:0"


@pytest.fixture(scope="module")
def gpu(surroundings: Path) -> Iterator[LocalEngine]:
    with LocalEngine("cuda") as shared:
        yield shared


def test_a_point_that_hangs_lets_go_of_the_device(gpu: LocalEngine, point: Callable[..., RunSpec]) -> None:
    assert gpu.run(point("sleeps", device="cuda", timeout_s=2.0)).status is Status.TIMED_OUT
    assert good(gpu.run(point(device="cuda")))


def test_busy_says_how_much_memory_is_free(gpu: LocalEngine, point: Callable[..., RunSpec]) -> None:
    assert good(gpu.run(point(device="cuda")))
    with pytest.raises(DeviceBusy, match=r"of \d+\.\d GiB of its memory are free") as told:
        DeviceLock(find_device("cuda")).acquire(owner_pid=1, owner="me")
    assert str(gpu.pid) in str(told.value)
