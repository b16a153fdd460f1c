"""The two live figures of a panel. They are lent from a pool: each costs 5 MB on its way to the page, and the library
keeps every one that was ever made reachable, so a panel that replaces another takes its figures over."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import ipywidgets
import pandas as pd

from workbench.plots import detail_figure, latency_figure, update_latency
from workbench.plots.style import wanted_height

HINT = "The figures are static, because anywidget is not installed; with it they are live: pip install anywidget"
_EMPTY = pd.DataFrame()
_POOL: dict[str, list[Any]] = {"latency": [], "detail": []}


def live() -> bool:
    """Whether figures can be live here."""
    return find_spec("anywidget") is not None


def borrow(kind: str) -> Any:
    """A figure, `latency` or `detail`, without data: live where anywidget is installed, else a static one."""
    if _POOL[kind]:
        return _POOL[kind].pop()
    figure = latency_figure(_EMPTY, widget=live()) if kind == "latency" else detail_figure(widget=live())
    if live():
        figure._config = figure._config | {
            "displaylogo": False,
            "responsive": True,
            "modeBarButtonsToRemove": ["select2d", "lasso2d"],
        }
    return figure


def give_back(kind: str, figure: Any) -> None:
    """Return a figure; it is emptied, so that it holds no results alive."""
    with figure.batch_update():
        for trace in figure.data:
            trace.visible = False
            trace.x, trace.y = [], []
            if trace.type == "heatmap":
                trace.z, trace.text, trace.hovertext = [], [], []
            else:
                trace.text, trace.meta = [], None
    if kind == "latency":
        update_latency(figure, _EMPTY)
    _POOL[kind].append(figure)


class Shown:
    """A figure in the page: the live figure itself, or an image of it that is drawn anew.

    `view` is the widget, `box` the one around it, which has the figure's height.
    """

    def __init__(self, kind: str) -> None:
        """Borrow a figure of this kind."""
        self.kind, self.figure = kind, borrow(kind)
        self.is_live = live()
        self.view: Any = self.figure if self.is_live else ipywidgets.HTML()
        self.box = ipywidgets.VBox([self.view], layout=ipywidgets.Layout(width="100%", min_width="0"))
        self.box.add_class("moewb-figure")

    def fit(self) -> None:
        """Give the box the height that the figure wants; the figure fills it."""
        if self.is_live:
            self.box.layout.height = f"{wanted_height(self.figure)}px"

    def drawn(self, fallback: str) -> None:
        """Called after the figure was updated; `fallback` is HTML for a page without live figures."""
        if not self.is_live:
            self.view.value = fallback

    def release(self) -> None:
        """Give the figure back."""
        give_back(self.kind, self.figure)
