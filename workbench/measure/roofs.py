"""What this very device can do: bandwidth and matrix rates, measured once and kept in a file."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from workbench.devices import DeviceInfo, package_version
from workbench.measure.cachelevel import cache_bytes
from workbench.measure.timer import middle

FORMAT = "2"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Sides of the square products: large enough to reach the rate, small enough for a second in all.
_GPU_SIDE = {"bf16": 8192, "fp16": 8192, "fp32": 4096, "fp8": 8192, "int8": 8192}
_CPU_SIDE = {"bf16": 512, "fp16": 256, "fp32": 768}
NAMES = ("read", "copy", *DTYPES)
"""Rates that every device has."""
# Rates that some GPUs have, and the compute capability from which on torch multiplies such matrices.
_QUANTIZED = {"fp8": (8, 9), "int8": (8, 0)}


def roof_names(device_type: str, capability: tuple[int, int] | None) -> tuple[str, ...]:
    """The rates that are measured on a device: `NAMES`, and on a GPU those of its narrow formats."""
    if device_type != "cuda" or capability is None:
        return NAMES
    return (*NAMES, *(name for name, first in _QUANTIZED.items() if capability >= first))


def find_roofs(device: DeviceInfo, folder: Path) -> dict[str, float]:
    """Measured rates by name (`roof_names`): bytes/s read and copied, operations/s of each format.

    Read from `folder` where this device, driver and torch were measured before; else measured and written there. A CPU
    that others kept busy would look slow for ever: it is measured each time, and the faster of old and new is kept. A
    folder that cannot be written is no error: the next worker measures again.
    """
    path = folder / f"roofs-{device.torch_device.replace(':', '-')}.json"
    identity = _identity(device)
    kept = _read(path, identity, roof_names(device.type, device.capability))
    if kept is not None and device.type != "cpu":
        return kept
    roofs = measure_roofs(torch.device(device.torch_device))
    if kept is not None:
        roofs = {name: max(rate, kept.get(name, rate)) for name, rate in roofs.items()}
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    text = json.dumps({"identity": identity, "roofs": roofs}, allow_nan=False)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    except OSError:
        with suppress(OSError):
            part.unlink(missing_ok=True)
    return roofs


def _identity(device: DeviceInfo) -> list[str]:
    threads = "" if device.type == "cuda" else str(torch.get_num_threads())
    return [device.type, device.name, device.uuid or "", device.driver or "", package_version("torch"), threads, FORMAT]


def _read(path: Path, identity: list[str], names: tuple[str, ...]) -> dict[str, float] | None:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        roofs = {name: float(data["roofs"][name]) for name in names}
        whole = data["identity"] == identity and all(math.isfinite(rate) and rate > 0 for rate in roofs.values())
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return roofs if whole else None


def measure_roofs(device: torch.device) -> dict[str, float]:
    """Measure now: under 2 s on a GPU, under 1.5 s on a CPU of two cores.

    `read` and `copy` in bytes/s, the formats in operations/s.
    """
    timed = _gpu_seconds if device.type == "cuda" else _cpu_seconds
    size = 2**31 if device.type == "cuda" else max(2**27, 4 * cache_bytes(device))
    read, copy = (timed(call) for call in _traffic(size, device))
    roofs = {"read": size / read, "copy": 2 * size / copy}
    sides = _GPU_SIDE if device.type == "cuda" else _CPU_SIDE
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    for name in roof_names(device.type, capability)[2:]:
        product = _product(sides[name], DTYPES[name], device) if name in DTYPES else _narrow(name, sides[name], device)
        roofs[name] = 2 * sides[name] ** 3 / timed(product)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return roofs


def _traffic(size: int, device: torch.device) -> tuple[Callable[[], object], Callable[[], object]]:
    """Read `size` bytes; copy `size` bytes."""
    source = torch.ones(size // 4, dtype=torch.int32, device=device)
    target, total = torch.empty_like(source), torch.zeros((), dtype=torch.int32, device=device)
    return lambda: torch.sum(source, dim=0, dtype=torch.int32, out=total), lambda: target.copy_(source)


def _product(side: int, dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    # Random numbers: a product of constants draws less power and runs faster than real ones do.
    a, b = (torch.randn(side, side, device=device, dtype=torch.float32).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b.T, out=out)  # transposed, as weights are stored: CPUs have another path for that


def _narrow(name: str, side: int, device: torch.device) -> Callable[[], object]:
    """A product of e4m3 with float32 accumulation, or of int8 with int32 accumulation; the second operand transposed.

    Random numbers here too: e4m3 of normal ones, int8 over its whole range. Fast accumulation, as a roof is the most
    that the device gives.
    """
    if name == "int8":
        p, q = (torch.randint(-127, 128, (side, side), dtype=torch.int8, device=device) for _ in range(2))
        return lambda: torch._int_mm(p, q.T)
    a, b = (torch.randn(side, side, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), dtype=torch.float32, device=device)
    return lambda: torch._scaled_mm(a, b.T, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)


def _gpu_seconds(call: Callable[[], object], times: int = 10) -> float:
    call()
    call()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(times)]
    for start, end in events:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return middle([start.elapsed_time(end) / 1e3 for start, end in events])


def _cpu_seconds(call: Callable[[], object], times: int = 10, limit_s: float = 0.2) -> float:
    """The best of up to `times`: other work on the machine only ever slows a sample down."""
    call()
    taken: list[float] = []
    until = time.perf_counter() + limit_s
    while len(taken) < times and (not taken or time.perf_counter() < until):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return min(taken)
