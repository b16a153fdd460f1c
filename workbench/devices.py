"""Which devices this machine has, found without torch and without touching CUDA state."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from workbench.errors import InvalidInput


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceInfo:
    """One device: `capability` is (9, 0) for Hopper, `memory_bytes` its total, `torch_device` torch's name for it."""

    type: str
    name: str
    torch_device: str
    index: int = 0
    uuid: str | None = None
    capability: tuple[int, int] | None = None
    memory_bytes: int | None = None
    driver: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Datasheet:
    """A vendor's dense peak rates: bytes/s of memory, operations/s by format."""

    read: float
    rates: dict[str, float]

    def rate(self, name: str) -> float:
        """Operations/s of a format; on listed devices `fp8` and `int8` have twice those of bf16, `fp4` four times."""
        times = {"fp8": 2, "int8": 2, "fp4": 4}.get(name)
        return self.rates[name] if times is None else times * self.rates["bf16"]


# Vendor datasheets, dense (no sparsity): the guard against impossible results, never a floor. Of a
# name with several boards the fastest (H100 NVL reads 3.94 TB/s, H100 SXM 3.35).
DATASHEETS = {
    "H200": Datasheet(read=4.8e12, rates={"bf16": 989e12, "fp16": 989e12, "fp32": 67e12}),
    "H100": Datasheet(read=3.94e12, rates={"bf16": 989e12, "fp16": 989e12, "fp32": 67e12}),
    "A100": Datasheet(read=2.039e12, rates={"bf16": 312e12, "fp16": 312e12, "fp32": 19.5e12}),
    "B200": Datasheet(read=8.0e12, rates={"bf16": 2250e12, "fp16": 2250e12, "fp32": 80e12}),
    "L40S": Datasheet(read=0.864e12, rates={"bf16": 362e12, "fp16": 362e12, "fp32": 91.6e12}),
}


def datasheet(device_name: str) -> Datasheet | None:
    """The datasheet whose name stands in `device_name`; None for a device that is not listed."""
    words = device_name.replace("-", " ").split()
    return next((sheet for name, sheet in DATASHEETS.items() if name in words), None)


def package_version(name: str) -> str:
    """Installed version of a package, or an empty string."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def cpu_name() -> str:
    """The processor's model name."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


@cache
def gpus() -> tuple[DeviceInfo, ...]:
    """The NVIDIA GPUs that this process may use, through NVML, as `CUDA_VISIBLE_DEVICES` orders them."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no driver, no library: no GPU
        return ()
    found = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
        found.append(
            (
                pynvml.nvmlDeviceGetName(handle),
                pynvml.nvmlDeviceGetUUID(handle),
                (int(major), int(minor)),
                int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
            )
        )
    driver = str(pynvml.nvmlSystemGetDriverVersion())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        wanted = [word.strip() for word in visible.split(",") if word.strip()]
        found = [
            g
            for word in wanted
            for i, g in enumerate(found)
            if word == str(i) or (word.startswith("GPU-") and g[1].startswith(word))
        ]
    return tuple(
        DeviceInfo(
            type="cuda",
            name=str(name),
            torch_device=f"cuda:{i}",
            index=i,
            uuid=str(uuid),
            capability=cc,
            memory_bytes=memory,
            driver=driver,
        )
        for i, (name, uuid, cc, memory) in enumerate(found)
    )


def find_device(asked: str = "auto") -> DeviceInfo:
    """Resolve `auto`, `cpu`, `cuda` or `cuda:N`.

    Raises:
        InvalidInput: a GPU was asked for that is not here, or torch is a CPU build.
    """
    usable = () if package_version("torch").endswith("+cpu") else gpus()
    if asked == "cpu" or (asked == "auto" and not usable):
        memory = None
        if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
            memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return DeviceInfo(type="cpu", name=cpu_name(), torch_device="cpu", memory_bytes=memory)
    if asked not in ("auto", "cuda") and not asked.startswith("cuda:"):
        raise InvalidInput(f"device: must be auto, cpu, cuda or cuda:N, not {asked!r}")
    index = int(asked.partition(":")[2] or 0)
    if index >= len(usable):
        why = (
            "torch is a CPU build"
            if gpus()
            else "there is no NVIDIA GPU here"
            if not usable
            else f"there are {len(usable)}"
        )
        raise InvalidInput(f"device: {asked} cannot be used, {why}; cpu is allowed")
    return usable[index]
