"""Parts of the panel: the bar with Run and Stop, the two figures with their switches, the strip below."""

from __future__ import annotations

import html
import threading
from collections.abc import Callable, Sequence
from typing import Any

import ipywidgets
import pandas as pd

from workbench.errors import InvalidInput
from workbench.plots import VIEWS, baselines, frozen_page, results_table, update_detail, update_latency
from workbench.sweeps.planner import duration
from workbench.sweeps.runner import SweepProgress
from workbench.widgets import look
from workbench.widgets.figures import HINT, Shown


def row(*children: Any) -> Any:
    """Children beside each other, wrapped where the page is narrow."""
    return ipywidgets.HBox(
        list(children), layout=ipywidgets.Layout(width="100%", align_items="center", flex_flow="row wrap")
    )


class RunBar:
    """Run, Stop, progress, the state as one plain word, counts, and what went wrong."""

    def __init__(self) -> None:
        """Make the widgets; `view` holds the bar, `error_view` the error panel."""
        self.run = ipywidgets.Button(description="Run", button_style="primary", icon="play")
        self.stop = ipywidgets.Button(description="Stop", icon="stop", disabled=True)
        for button in (self.run, self.stop):
            button.layout.width = "96px"
        self.progress = ipywidgets.IntProgress(0, 0, 1, layout=ipywidgets.Layout(width="220px", margin="2px 8px"))
        self.progress.add_class("moewb-progress")
        self.state = "idle"
        self._state_view = look.text("idle", css="moewb-state")
        self._counts = look.text(padding="0 0 0 8px")
        self._stale = look.text(css="moewb-stale", padding="0 0 0 14px", display="none")
        self.error_view = look.text(css="moewb-error", width="100%", display="none")
        self.view = row(self.run, self.stop, self.progress, self._state_view, self._counts, self._stale)

    def set_state(self, state: str) -> None:
        """Show the state; nothing is sent when it is the same."""
        if state != self.state:
            self.state = state
            self._state_view.value = html.escape(state)

    def show_progress(self, progress: SweepProgress) -> None:
        """Show counts, the bar and the time left."""
        self.progress.max, self.progress.value = max(1, progress.total), progress.done
        left = f" · about {duration(progress.remaining_s)} left" if progress.remaining_s > 0 else ""
        self.say(
            f"{progress.done} of {progress.total} points · {progress.ok} ok, {progress.failed} failed, "
            f"{progress.skipped} cannot run{left}"
        )

    def say(self, words: str) -> None:
        """Show a sentence beside the state."""
        self._counts.value = html.escape(words)

    def say_error(self, error: BaseException | None) -> None:
        """Show what went wrong, escaped, or clear it."""
        words = "" if error is None else str(error) or type(error).__name__
        if error is not None and not isinstance(error, InvalidInput):
            words = f"{type(error).__name__}: {words}"
        self.error_view.value = html.escape(words)
        look.show(self.error_view, bool(words))

    def mark_stale(self, stale: bool) -> None:
        """Say that the settings are no longer those of the results, or take it back."""
        self._stale.value = "stale: the settings changed since these results" if stale else ""
        look.show(self._stale, stale)


class FigureArea:
    """The latency figure, and one that shows the speed-up matrix or the correctness."""

    def __init__(self, guard: Callable[[Callable[[], None]], None]) -> None:
        """Borrow the figures; `guard` runs a callback's action and shows what it raises."""
        self._lock = threading.RLock()
        self._quiet = False
        self._frame, self._axes = pd.DataFrame(), None  # type: pd.DataFrame, Sequence[str] | None
        self._latency, self._detail = Shown("latency"), Shown("detail")
        self.which = ipywidgets.ToggleButtons(options=list(VIEWS), style={"button_width": "110px"})
        self.which.add_class("moewb-switch")
        self.baseline = ipywidgets.Dropdown(options=[("", "")], layout=ipywidgets.Layout(width="320px"))
        self._against = look.text("against", padding="0 6px 0 14px")
        self.hint = look.text(html.escape(HINT), css="moewb-why", display=None if not self._latency.is_live else "none")
        self.which.observe(lambda _: guard(self.draw_detail), names="value")
        self.baseline.observe(lambda _: None if self._quiet else guard(self.draw_detail), names="value")
        boxes = [shown.box for shown in (self._latency, self._detail)]
        self.view = ipywidgets.VBox(
            [
                self.hint,
                boxes[0],
                row(self.which, self._against, self.baseline),
                boxes[1],
            ],
            layout=ipywidgets.Layout(width="100%"),
        )

    @property
    def figures(self) -> tuple[Any, Any]:
        """The plotly figures: latency, and detail."""
        return self._latency.figure, self._detail.figure

    @property
    def chosen_baseline(self) -> str | None:
        """The label of the baseline; None before there are results."""
        return self.baseline.value or None

    def draw(self, frame: pd.DataFrame, axes: Sequence[str] | None) -> None:
        """Show these results; `axes` name the lines."""
        with self._lock:
            self._frame, self._axes = frame, axes
            update_latency(self._latency.figure, frame, axes=axes)
            self._latency.fit()
            names = list(baselines(frame, axes))
            options = tuple((name, name) for name in names) or (("", ""),)
            if self.baseline.options != options:
                kept = self.baseline.value if self.baseline.value in names else options[0][1]
                self._quiet = True
                self.baseline.options = options
                self.baseline.value = kept
                self._quiet = False
            self.draw_detail()
            if not self._latency.is_live:
                page = frozen_page(frame, code="", command="", axes=axes, whole=False) if len(frame) else ""
                self._latency.drawn(page)
                self._detail.drawn(results_table(frame, axes=axes))

    def draw_detail(self) -> None:
        """Draw the second figure anew."""
        with self._lock:
            speed = self.which.value == "speed-up"
            for widget in (self.baseline, self._against):
                look.show(widget, speed)
            known = baselines(self._frame, self._axes)
            baseline = self.chosen_baseline if self.chosen_baseline in known else None
            update_detail(self._detail.figure, self._frame, self.which.value, baseline=baseline, axes=self._axes)
            self._detail.fit()

    def release(self) -> None:
        """Give the figures back."""
        for shown in (self._latency, self._detail):
            shown.release()
