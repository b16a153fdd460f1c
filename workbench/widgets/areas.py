"""Parts of the panel below the modes: plan and progress, figures, strip, freeze and export, and the error."""

from __future__ import annotations

import html
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ipywidgets
import pandas as pd

from workbench.errors import InvalidInput
from workbench.plots import (
    VIEWS,
    Timing,
    baselines,
    frozen_page,
    has_wall,
    of_steps,
    results_table,
    timed,
    update_detail,
    update_latency,
)
from workbench.sweeps.planner import duration
from workbench.sweeps.runner import SweepProgress
from workbench.widgets import look
from workbench.widgets.export import links
from workbench.widgets.figures import HINT, Shown
from workbench.widgets.frozen import Frozen


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


TIMES: tuple[tuple[str, Timing], ...] = (("device", "device"), ("with host launch", "wall"))
STEP_TIMES: tuple[tuple[str, Timing], ...] = (
    ("decode step", "decode"),
    ("prefill", "prefill"),
    ("prefill + decode", "total"),
)
NO_WALL = "no result shown has a time with host launch: it is recorded on a GPU; a CPU's latency holds both"


class FigureArea:
    """The latency figure, and one that shows the speed-up matrix or the correctness; which time both show."""

    def __init__(self, guard: Callable[[Callable[[], None]], None]) -> None:
        """Borrow the figures; `guard` runs a callback's action and shows what it raises."""
        self._lock = threading.RLock()
        self._quiet = False
        self._frame, self._axes = pd.DataFrame(), None  # type: pd.DataFrame, Sequence[str] | None
        self._latency, self._detail = Shown("latency"), Shown("detail")
        self._wanted: dict[bool, Timing] = {False: "device", True: "decode"}  # of layers, of steps
        self._steps = False
        self.time = ipywidgets.ToggleButtons(options=TIMES, disabled=True, style={"button_width": "130px"})
        self.time.add_class("moewb-switch")
        self._no_wall = look.text(html.escape(NO_WALL), css="moewb-why", padding="3px 0 0 8px", display="none")
        self.time.observe(lambda _: None if self._quiet else guard(self._time_chosen), names="value")
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
                row(look.label("time"), self.time, self._no_wall),
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

    @property
    def timing(self) -> Timing:
        """The time that is shown: the device's own where no result of a layer has the other."""
        chosen: Timing = self.time.value
        return chosen

    def _time_chosen(self) -> None:
        self._wanted[self._steps] = self.time.value
        self.draw(self._frame, self._axes)

    def _offer_times(self, frame: pd.DataFrame) -> None:
        """Let the time be chosen where there are two; what was chosen comes back with results that have it."""
        steps = of_steps(frame) if len(frame) else self._steps
        both = has_wall(frame) or steps
        self._quiet = True
        if steps is not self._steps:
            self._steps = steps
            self.time.options = STEP_TIMES if steps else TIMES
        self.time.value = self._wanted[steps] if both else "device"
        self._quiet = False
        if self.time.disabled is both:
            self.time.disabled = not both
        look.show(self._no_wall, len(frame) > 0 and not both)

    def draw(self, frame: pd.DataFrame, axes: Sequence[str] | None) -> None:
        """Show these results; `axes` name the lines."""
        with self._lock:
            self._offer_times(frame)
            frame = timed(frame, self.timing)
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


class KeepRow:
    """Freeze and Export, and where that was written; frozen results go below the panel, into the saved notebook."""

    def __init__(
        self,
        guard: Callable[[Callable[[], None]], None],
        freeze: Callable[[], tuple[Frozen, Path]],
        export: Callable[[], Mapping[str, Path]],
    ) -> None:
        """Make the widgets; `freeze` gives what was frozen and its file, `export` the files that it wrote."""
        self._freeze, self._export = freeze, export
        self.handles: list[Any] = []  # outputs of the cell that shows the panel
        self.freeze = ipywidgets.Button(
            description="Freeze",
            icon="camera",
            tooltip="keep what is shown in the saved notebook: figure, tables, code",
        )
        self.export = ipywidgets.Button(
            description="Export", icon="download", tooltip="write JSON lines, Parquet, CSV, Markdown and HTML"
        )
        self.freeze.layout.width = self.export.layout.width = "96px"
        self.freeze.on_click(lambda _: guard(self._freeze_pressed))
        self.export.on_click(lambda _: guard(self._export_pressed))
        self.files = look.text(css="moewb-files", padding="0 0 0 8px")
        self.frozen_view = look.text(css="moewb-frozen", width="100%", display="none")
        self.view = row(self.freeze, self.export, self.files)

    def say(self, markup: str) -> None:
        """Show HTML beside the buttons."""
        self.files.value = markup

    def _freeze_pressed(self) -> None:
        frozen, path = self._freeze()
        if self.handles:
            made = frozen.bundles()
            self.handles[0].update(made[0], raw=True)
            self.handles[1].update(made[-1], raw=True)
            where = "and put under this panel, where the saved notebook keeps it"
        else:
            self.frozen_view.value = frozen.html(whole=False)
            look.show(self.frozen_view, True)
            where = "and shown below"
        self.say(f"Frozen: written to <b>{html.escape(str(path))}</b> {where}.")

    def _export_pressed(self) -> None:
        files = self._export()
        self.say(links(files, next(iter(files.values())).parent))
