"""Where a run happens: device, versions, clocks. No torch here."""

from __future__ import annotations

import os
import platform
import subprocess
from functools import cache
from pathlib import Path
from typing import Literal

import workbench
from workbench.devices import DeviceInfo, package_version
from workbench.record import Environment


def device_environment(device: DeviceInfo) -> Environment:
    """What can be said without touching the device; measured roofs and clocks are added by the worker."""
    kind: Literal["cpu", "cuda"] = "cuda" if device.type == "cuda" else "cpu"
    return Environment(
        device_type=kind,
        device_name=device.name,
        device_uuid=device.uuid,
        capability=".".join(map(str, device.capability)) if device.capability else None,
        memory_bytes=device.memory_bytes,
        driver=device.driver,
        python=platform.python_version(),
        torch=package_version("torch"),
        triton=package_version("triton"),
        workbench=workbench.__version__,
        commit=checkout_commit(),
        host_os=platform.platform(),
        cores=cores(),
    )


def cores() -> int | None:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


@cache
def checkout_commit() -> str | None:
    """The commit of the checkout that the package runs from, with `-changed` where files differ from it.

    None where the package is installed, or git has no answer.
    """
    top = Path(workbench.__file__).resolve().parent.parent
    try:
        said = subprocess.run(
            ["git", "-C", str(top), "rev-parse", "--show-toplevel", "HEAD"],
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        ).stdout.split("\n")
    except (OSError, subprocess.SubprocessError):
        return None
    # A package installed below some other repository must not take that one's commit.
    if len(said) < 2 or Path(said[0]).resolve() != top:
        return None
    changed = subprocess.run(["git", "-C", str(top), "diff", "--quiet", "HEAD"], capture_output=True, check=False)
    return said[1] + ("-changed" if changed.returncode == 1 else "")


def with_clocks(environment: Environment) -> Environment:
    """The same with the GPU's clocks and temperature as they are now, where the driver tells."""
    if environment.device_uuid is None:
        return environment
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(environment.device_uuid)
        clocks = {
            "sm": int(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)),
            "memory": int(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM)),
        }
        temperature = int(pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU))
    except Exception:  # some drivers and virtual machines do not tell; the run goes on without
        return environment
    return environment.model_copy(update={"clocks_mhz": clocks, "temperature_c": temperature})
