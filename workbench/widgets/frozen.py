"""`Frozen`: results as they were, in a form that a saved notebook still shows when the kernel is gone."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from workbench.errors import InvalidInput
from workbench.plots import (
    PHASES,
    Timing,
    correctness_figure,
    frozen_page,
    latency_figure,
    latency_svg,
    of_steps,
    profile_svg,
    speedup_figure,
    timed,
    timing_of,
)
from workbench.record import Record
from workbench.widgets.profile import name_of

PLOTLY = "application/vnd.plotly.v1+json"


class Frozen:
    """Static figures, tables, and the code that repeats them.

    As the last value of a cell it writes plain outputs into the notebook: each figure as plotly JSON (drawn by
    JupyterLab itself, no kernel, no network; an SVG where that cannot be drawn), then tables and code as HTML without
    scripts. Live widgets leave nothing in a saved notebook; this does.
    """

    def __init__(
        self,
        frame: pd.DataFrame,
        *,
        code: str,
        command: str,
        baseline: str | Mapping[str, Any] | None = None,
        axes: Sequence[str] | None = None,
        notes: Sequence[str] = (),
        profile: Record | None = None,
    ) -> None:
        """Freeze the rows of `frame`, which `code` and `command` repeat, and the profile of one step."""
        self.frame, self.code, self.command, self.profile = frame.copy(), code, command, profile
        self.baseline, self.axes, self.notes = baseline, axes, tuple(notes)

    def figures(self) -> list[Any]:
        """Latency, speed-up and correctness as `go.Figure`; none where there are no results.

        Of steps the latency of the decode step and of the prefill, the one that was shown first.
        """
        if not len(self.frame):
            return []
        others: tuple[Timing, ...] = ("decode", "prefill") if of_steps(self.frame) else ()
        shown = "decode" if others and timing_of(self.frame) == "device" else timing_of(self.frame)
        return [
            latency_figure(self.frame, axes=self.axes),
            *(latency_figure(timed(self.frame, one), axes=self.axes) for one in others if one != shown),
            speedup_figure(self.frame, self.baseline, axes=self.axes),
            correctness_figure(self.frame, axes=self.axes),
        ]

    def html(self, *, whole: bool = True, figure: bool = True) -> str:
        """A page (or a fragment) without scripts; with `figure`, the latency figure is in it as SVG."""
        return frozen_page(
            self.frame,
            code=self.code,
            command=self.command,
            baseline=self.baseline,
            axes=self.axes,
            notes=self.notes,
            whole=whole,
            figure=figure,
            more=self._bars(),
        )

    def _bars(self) -> str:
        """The profile as HTML; empty where there is none."""
        if self.profile is None:
            return ""
        name = html.escape(name_of(self.profile))
        held = [phase for phase in PHASES if any(row.phase == phase for row in self.profile.profile)]
        return "".join(f"<p>{phase} of {name}</p>{profile_svg(self.profile, phase)}" for phase in held)

    def bundles(self) -> list[dict[str, Any]]:
        """One mime bundle an output."""
        made: list[dict[str, Any]] = []
        for place, figure in enumerate(self.figures()):
            fallback = latency_svg(self.frame, axes=self.axes) if place == 0 else html.escape(figure.layout.title.text)
            made.append(bundle(figure, fallback))
        made.append({"text/html": self.html(whole=False, figure=False), "text/plain": f"{self.code}\n{self.command}"})
        return made

    def save(self, path: str | Path) -> Path:
        """Write the page. Raises `InvalidInput` where the file cannot be written."""
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_text(self.html(), encoding="utf-8")
        except OSError as error:
            raise InvalidInput(f"out: {path} cannot be written ({error.strerror})") from None
        return Path(path)

    def _ipython_display_(self) -> None:
        from IPython.display import display

        for one in self.bundles():
            display(one, raw=True)

    def _repr_html_(self) -> str:
        return self.html(whole=False)


def bundle(figure: Any, fallback: str) -> dict[str, Any]:
    """A static figure as a mime bundle: plotly JSON, and HTML for what cannot draw that."""
    data = json.loads(figure.to_json())
    return {PLOTLY: data | {"config": {"responsive": True, "displaylogo": False}}, "text/html": fallback}
