"""What `workbench env` says: devices, versions, and what is missing and why."""

from __future__ import annotations

import json
import os
import platform
import shutil
from importlib.util import find_spec
from pathlib import Path

from platformdirs import user_cache_path

import workbench
from workbench.devices import DeviceInfo, find_device, gpus, package_version
from workbench.sweeps.loader import RECORDINGS

PACKAGES = ("torch", "triton", "transformers", "pandas", "pyarrow", "plotly", "ipywidgets", "anywidget", "jupyterlab")
NEEDED_FOR = {
    "triton": "the triton backend and torch.compile on a GPU",
    "plotly": "figures; pip install 'moe-workbench[lab]'",
    "ipywidgets": "the panels; pip install 'moe-workbench[lab]'",
    "anywidget": "live figures; pip install 'moe-workbench[lab]'",
    "jupyterlab": "the notebook; pip install 'moe-workbench[lab]'",
    "gguf": "reading GGUF checkpoints; pip install 'moe-workbench[gguf]'",
}
UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError)
"""What reading a broken file of roofs may raise."""


def rows() -> list[tuple[str, str]]:
    """What and its state, one line each."""
    device = find_device()
    found = [
        ("workbench", workbench.__version__),
        ("python", platform.python_version()),
        ("system", platform.platform()),
    ]
    memory = f", {device.memory_bytes / 2**30:.1f} GiB" if device.memory_bytes else ""
    found.append(("device in use", f"{device.torch_device}: {device.name}{memory}"))
    found.append(("measured roofs", cached_roofs(device)))
    for gpu in gpus():
        capability = ".".join(map(str, gpu.capability or ()))
        size = (gpu.memory_bytes or 0) / 2**30
        found.append((f"GPU {gpu.index}", f"{gpu.name}, {size:.1f} GiB, compute {capability}, driver {gpu.driver}"))
    found += [(name, package_version(name)) for name in PACKAGES if package_version(name)]
    found.append(("recordings", f"{len(list(RECORDINGS.glob('*.parquet')))} files"))
    found += [("missing", text) for text in missing()]
    return found


def cached_roofs(device: DeviceInfo) -> str:
    """This device's measured roofs, as kept by an earlier run; torch is not imported for it."""
    path = _roof_file(device)
    try:
        rates = _kept_rates(device, path)
        if rates is None:
            return f"none of this device in {path}; the next run measures them"
    except FileNotFoundError:
        return "not measured yet; the first run measures them"
    except UNREADABLE as error:
        return f"{path} cannot be read ({type(error).__name__}); the next run measures them"
    units = {"read": "GB/s", "copy": "GB/s"}
    return ", ".join(f"{name} {rate / 1e9:,.1f} {units.get(name, 'GFLOP/s')}" for name, rate in rates.items())


def kept_read_rate(device: DeviceInfo) -> float | None:
    """Bytes a second that an earlier run measured this device to read; None where it is not known."""
    try:
        return (_kept_rates(device, _roof_file(device)) or {}).get("read")
    except UNREADABLE:
        return None


def _roof_file(device: DeviceInfo) -> Path:
    own = os.environ.get("MOE_WORKBENCH_CACHE")
    folder = Path(own).expanduser() if own else user_cache_path("moe-workbench", appauthor=False)
    return folder / f"roofs-{device.torch_device.replace(':', '-')}.json"


def _kept_rates(device: DeviceInfo, path: Path) -> dict[str, float] | None:
    """Rates by name; None where the file is another device's."""
    kept = json.loads(path.read_text(encoding="utf-8"))
    if device.name not in kept["identity"]:
        return None
    return {str(name): float(rate) for name, rate in kept["roofs"].items()}


def missing() -> list[str]:
    """What cannot be used here and why, one sentence each."""
    said = []
    if not gpus():
        said.append("no NVIDIA GPU (none found through NVML): triton, graphs and autotuning cannot run")
    elif package_version("torch").endswith("+cpu"):
        said.append("torch is a CPU build, so the GPU cannot be used; install torch with CUDA")
    if gpus() and find_spec("deep_gemm") is None:
        said.append("deep_gemm, for the backend of that name; pip install 'moe-workbench[deep-gemm]'")
    said += [f"{name}, for {use}" for name, use in NEEDED_FOR.items() if find_spec(name) is None]
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        said.append("a C++ compiler, which torch.compile needs on a CPU")
    return said
