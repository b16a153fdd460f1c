"""Widgets for JupyterLab. No torch here: points run in a worker process, and callbacks only post and return."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workbench.widgets.frozen import Frozen
    from workbench.widgets.modes import ModePanel
    from workbench.widgets.panel import SweepPanel, Workbench
    from workbench.widgets.words import is_headless

_HOME = {"Frozen": "frozen", "ModePanel": "modes", "SweepPanel": "panel", "Workbench": "panel", "is_headless": "words"}

__all__ = ["Frozen", "ModePanel", "SweepPanel", "Workbench", "is_headless"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'workbench.widgets' has no attribute {name!r}")
    value = getattr(import_module(f"workbench.widgets.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
