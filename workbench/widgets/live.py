"""Panels that are alive, so that a cell that is run again replaces its panel and leaves nothing behind."""

from __future__ import annotations

import atexit
from typing import Any, Protocol

import ipywidgets


class Closable(Protocol):
    """What a registry holds."""

    def close(self) -> None:
        """Let go of everything."""


_LIVE: dict[str, Closable] = {}


def replace(name: str, panel: Closable) -> None:
    """Make `panel` the live one of that name; the one before is closed."""
    previous = _LIVE.pop(name, None)
    if previous is not None and previous is not panel:
        previous.close()
    _LIVE[name] = panel


def forget(panel: Closable) -> None:
    """Take a closed panel out of the registry."""
    for name in [name for name, held in _LIVE.items() if held is panel]:
        del _LIVE[name]


@atexit.register
def close_all() -> None:
    """Close every live panel, and with it the worker process that it started."""
    for panel in list(_LIVE.values()):
        panel.close()


def close_tree(widget: Any, keep: tuple[Any, ...] = ()) -> None:
    """Close a widget, what it contains, and the layouts and styles that belong to them; `keep` stays open."""
    if any(widget is kept for kept in keep):
        return
    for child in getattr(widget, "children", ()):
        close_tree(child, keep)
    for part in ("layout", "style"):
        owned = getattr(widget, part, None)
        if owned is not None and hasattr(owned, "close"):
            owned.close()
    widget.unobserve_all()
    if hasattr(widget, "_click_handlers"):
        widget._click_handlers.callbacks.clear()
    ipywidgets.Widget.close(widget)  # not its own close(): a panel's leads here
