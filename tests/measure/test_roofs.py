"""Roofs are measured once a device, and a file that is not whole is not believed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from workbench.devices import DeviceInfo
from workbench.measure import roofs
from workbench.measure.roofs import NAMES, find_roofs, measure_roofs, roof_names

CPU = DeviceInfo(type="cpu", name="Some CPU", torch_device="cpu")
MADE_UP = {name: 10.0**10 + index for index, name in enumerate(NAMES)}


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    calls: list[torch.device] = []

    def measure(device: torch.device) -> dict[str, float]:
        calls.append(device)
        return dict(MADE_UP)

    monkeypatch.setattr(roofs, "measure_roofs", measure)
    return calls


GPU = DeviceInfo(type="cuda", name="Some GPU", torch_device="cuda:0")


def test_a_gpu_is_measured_once_and_kept(tmp_path: Path, measured: list[torch.device]) -> None:
    folder = tmp_path / "new" / "folder"
    assert find_roofs(GPU, folder) == MADE_UP
    assert find_roofs(GPU, folder) == MADE_UP
    assert measured == [torch.device("cuda:0")]
    assert [path.name for path in folder.iterdir()] == ["roofs-cuda-0.json"]
    other = DeviceInfo(type="cuda", name="Another GPU", torch_device="cuda:0")
    find_roofs(other, folder)
    assert len(measured) == 2


def test_a_cpu_that_was_busy_once_does_not_look_slow_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = iter([3.0, 9.0, 4.0])
    monkeypatch.setattr(roofs, "measure_roofs", lambda device: dict.fromkeys(NAMES, next(rates)))
    assert [find_roofs(CPU, tmp_path)["read"] for _ in range(3)] == [3.0, 9.0, 9.0]


def test_narrow_formats_have_roofs_where_a_gpu_multiplies_them(tmp_path: Path, measured: list[torch.device]) -> None:
    assert roof_names("cpu", None) == NAMES
    assert roof_names("cuda", (7, 5)) == NAMES
    assert roof_names("cuda", (8, 0)) == (*NAMES, "int8")
    assert roof_names("cuda", (9, 0)) == (*NAMES, "fp8", "int8")
    hopper = DeviceInfo(type="cuda", name="Some GPU", torch_device="cuda:0", capability=(9, 0))
    find_roofs(hopper, tmp_path)
    find_roofs(hopper, tmp_path)
    assert len(measured) == 2  # what was written lacks them, so it is not believed


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: text[:-5],
        lambda text: "[]",
        lambda text: text.replace("10000000001.0", "NaN"),
        lambda text: text.replace("10000000001.0", "-3"),
        lambda text: json.dumps({**json.loads(text), "roofs": {"read": 1.0}}),
        lambda text: json.dumps({**json.loads(text), "identity": ["cpu"]}),
    ],
)
def test_a_spoilt_file_is_measured_again(tmp_path: Path, measured: list[torch.device], spoil: object) -> None:
    find_roofs(GPU, tmp_path)
    path = tmp_path / "roofs-cuda-0.json"
    text = path.read_text(encoding="utf-8")
    path.write_text(spoil(text), encoding="utf-8")  # type: ignore[operator]
    assert find_roofs(GPU, tmp_path) == MADE_UP
    assert len(measured) == 2
    assert path.read_text(encoding="utf-8") == text


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path, measured: list[torch.device]) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert find_roofs(CPU, tmp_path / "file") == MADE_UP


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_real_measurement_on_a_gpu() -> None:
    found = measure_roofs(torch.device("cuda"))
    assert set(found) == set(roof_names("cuda", torch.cuda.get_device_capability()))
    assert found.get("fp8", 2 * found["bf16"]) > 1.2 * found["bf16"]


def test_a_real_measurement() -> None:
    found = measure_roofs(torch.device("cpu"))
    assert set(found) == set(NAMES)
    assert all(1e7 < rate < 1e15 for rate in found.values())
