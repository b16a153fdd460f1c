"""The last-level cache: how large it is, and reading something larger to empty it."""

from __future__ import annotations

import re
from pathlib import Path

import torch

DEFAULT_CPU_CACHE = 64 * 2**20
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "": 1}


def cpu_cache_bytes(folder: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Bytes of the CPU's largest cache, as the system says; 64 MiB where it says nothing."""
    sizes = []
    for path in folder.glob("index*/size"):
        try:
            found = re.fullmatch(r"(\d+)([KMG]?)", path.read_text(encoding="utf-8").strip())
        except OSError:
            continue
        if found:
            sizes.append(int(found[1]) * _UNITS[found[2]])
    return max(sizes, default=DEFAULT_CPU_CACHE)


def cache_bytes(device: torch.device) -> int:
    """Bytes of the device's last-level cache."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    return cpu_cache_bytes()


class Evictor:
    """Empties the last-level cache by reading a buffer of four times its size.

    Reading, because a written buffer leaves dirty lines whose write-back would be paid for inside the sample.
    """

    def __init__(self, device: torch.device) -> None:
        self._buffer = torch.ones(max(4 * cache_bytes(device), 2**26) // 4, dtype=torch.int32, device=device)
        self._sum = torch.zeros((), dtype=torch.int32, device=device)

    @property
    def nbytes(self) -> int:
        """Size of the buffer."""
        return self._buffer.nbytes

    def __call__(self) -> None:
        """Read the buffer."""
        torch.sum(self._buffer, dim=0, dtype=torch.int32, out=self._sum)
