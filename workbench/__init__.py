"""Choose how a Mixture-of-Experts layer is run. Names are imported when first used; torch is not imported here."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from workbench.devices import package_version

if TYPE_CHECKING:
    from workbench.errors import DeviceBusy, InvalidInput
    from workbench.record import Record, Status
    from workbench.spec import LayerPoint, Modes, RunSpec, StepPoint
    from workbench.support import find_reasons as supports
    from workbench.sweeps.loader import load, recordings
    from workbench.sweeps.results import Results
    from workbench.sweeps.runner import run, sweep
    from workbench.sweeps.spec import SweepSpec

__version__ = package_version("moe-workbench") or "0.1.0"

_HOME = {
    "DeviceBusy": "workbench.errors",
    "InvalidInput": "workbench.errors",
    "LayerPoint": "workbench.spec",
    "Modes": "workbench.spec",
    "Record": "workbench.record",
    "Results": "workbench.sweeps.results",
    "RunSpec": "workbench.spec",
    "Status": "workbench.record",
    "StepPoint": "workbench.spec",
    "SweepSpec": "workbench.sweeps.spec",
    "load": "workbench.sweeps.loader",
    "recordings": "workbench.sweeps.loader",
    "run": "workbench.sweeps.runner",
    "supports": "workbench.support:find_reasons",
    "sweep": "workbench.sweeps.runner",
}

__all__ = [
    "DeviceBusy",
    "InvalidInput",
    "LayerPoint",
    "Modes",
    "Record",
    "Results",
    "RunSpec",
    "Status",
    "StepPoint",
    "SweepSpec",
    "__version__",
    "load",
    "recordings",
    "run",
    "supports",
    "sweep",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'workbench' has no attribute {name!r}")
    module, _, own = _HOME[name].partition(":")
    value = getattr(import_module(module), own or name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
