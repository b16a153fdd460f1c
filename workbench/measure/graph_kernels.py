"""How many kernels a replayed graph runs, by torch's profiler."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

PREFIX = "graph|"
_KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")


def count_kernels(replay: Callable[[int], object], sizes: Iterable[int], device: torch.device) -> dict[int, int]:
    """Kernels, copies and fills of one replay at each size; empty where the profiler saw none."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=False) as profiler:
        for size in sizes:
            with record_function(f"{PREFIX}{size}"):
                replay(size)
                torch.cuda.synchronize(device)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return kernels_of(json.loads(path.read_text(encoding="utf-8"))["traceEvents"])


def kernels_of(events: Iterable[Mapping[str, Any]]) -> dict[int, int]:
    """Kernels by size: those whose graph was launched within the size's range."""
    found: Counter[int] = Counter()
    complete = [event for event in events if event.get("ph") == "X"]
    ranges = [
        (float(e["ts"]), float(e["ts"]) + float(e["dur"]), int(str(e["name"]).removeprefix(PREFIX)))
        for e in complete
        if str(e.get("name", "")).startswith(PREFIX) and e.get("cat") == "user_annotation"
    ]
    launched: dict[Any, int] = {}
    for event in complete:
        if "GraphLaunch" in str(event.get("name", "")):
            at = float(event["ts"])
            for start, end, size in ranges:
                if start <= at <= end:
                    launched[event.get("args", {}).get("correlation")] = size
    for event in complete:
        size_or_none = launched.get(event.get("args", {}).get("correlation"))
        if event.get("cat") in _KERNELS and size_or_none is not None:
            found[size_or_none] += 1
    return dict(found)
