"""`SweepPanel`: set modes, see the plan, run, stop, look, freeze, export. Callbacks post and return."""

from __future__ import annotations

import html
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ipywidgets
import pandas as pd

from workbench.devices import find_device
from workbench.errors import InvalidInput
from workbench.plots import choose, timed
from workbench.spec import RunSpec
from workbench.sweeps.loader import recordings
from workbench.sweeps.planner import plan
from workbench.sweeps.presets import PRESETS, preset
from workbench.sweeps.results import Results
from workbench.sweeps.spec import SweepSpec
from workbench.widgets import live, look
from workbench.widgets.areas import FigureArea, KeepRow, RunBar, row
from workbench.widgets.export import default_root, export_files, results_folder
from workbench.widgets.frozen import Frozen
from workbench.widgets.job import Snapshot, SweepJob
from workbench.widgets.modes import ModePanel
from workbench.widgets.profile import ProfileArea
from workbench.widgets.runs import Runs
from workbench.widgets.words import RECORDED, code_cell, is_headless, plan_line, starting_sweep

LIVE = "live"


class SweepPanel(ipywidgets.VBox):  # type: ignore[misc]  # ipywidgets ships no types
    """A sweep in a notebook. The same things without a screen: `.spec`, `.run(wait=True)`, `.results`, `.export()`."""

    _closed = True  # until it is made: what could not be made is collected, and closed by that

    def __init__(
        self,
        spec: RunSpec | SweepSpec | str | None = None,
        *,
        engine: Any = None,
        results: Results | None = None,
        out: str | Path | None = None,
        device: str = "auto",
        name: str = "workbench",
    ) -> None:
        """Make the panel; a live panel of the same `name` (an earlier run of the cell) is closed.

        Args:
            spec: a run, a sweep, or the name of a preset sweep; default the preset `quick`.
            engine: where points run, left open; default a worker process of the panel's own, closed with it.
            results: results to look at; default the recorded sweeps that come with the package.
            out: the folder that results folders are made in; default `results`.
            device: `auto`, `cpu`, `cuda` or `cuda:N`; decides what is available and what presets hold.

        Raises:
            InvalidInput: an unknown preset, or a device that is not here.
        """
        self._device = find_device(device)
        start = starting_sweep(spec, self._device)
        self.runs = Runs(engine, began=self._run_began, moved=self._run_moved, ended=self._run_ended)
        self._root = Path(out) if out is not None else default_root()
        self._frame = pd.DataFrame()
        live.replace(name, self)
        self.modes = ModePanel(sweep_spec=start, device=self._device)
        self._recorded = self._sources(results)
        self._make()
        super().__init__(children=self._arrange())
        self._closed = False
        self.layout.width = "100%"
        self.add_class("moewb")
        self.modes.observe(self._modes_changed, names=["sweep_spec", "problem"])
        self.modes.observe(self._filter_changed, names="filtered")
        self._replan()
        if self._recorded and (results is not None or (spec is None and self._prefers_recorded())):
            self.source.value = next(iter(self._recorded))
        else:
            self._draw()

    # --- state -------------------------------------------------------------------------------------------------

    @property
    def spec(self) -> RunSpec:
        """The run that is set (the first value of every axis); assign to move the controls."""
        result: RunSpec = self.modes.spec
        return result

    @spec.setter
    def spec(self, value: RunSpec) -> None:
        self.modes.spec = value

    @property
    def sweep_spec(self) -> SweepSpec:
        """The sweep that is set; assign to move the controls."""
        result: SweepSpec = self.modes.sweep_spec
        return result

    @sweep_spec.setter
    def sweep_spec(self, value: SweepSpec) -> None:
        self.modes.sweep_spec = value

    @property
    def code(self) -> str:
        """A code cell that runs what is set (for recorded results: that measures what is shown on this machine)."""
        return code_cell(self.modes.described())

    @property
    def cli(self) -> str:
        """The shell line that runs what is set."""
        return str(self.modes.described().command)

    @property
    def state(self) -> str:
        """What the panel says: idle, starting, compiling, ..., done, failed, cancelled, timed_out, or stopping."""
        return self.bar.state

    @property
    def results(self) -> Results | None:
        """The results of the last run, or those that are looked at; None before there are any."""
        if self.source.value != LIVE:
            return self._recorded[self.source.value]
        return self.runs.results

    @property
    def running(self) -> bool:
        """Whether a sweep is under way."""
        return self.runs.job is not None

    # --- what the buttons do -----------------------------------------------------------------------------------

    def run(self, *, wait: bool = False, timeout_s: float | None = None) -> Results | None:
        """Start the sweep that is set. With `wait`, until its end: gives its results or raises what made it fail.

        Raises:
            InvalidInput: a sweep is running, a field is wrong, or (with `wait`) nothing of it could be built.
        """
        if self.running:
            raise InvalidInput("run: a sweep is running; stop it first, or wait for its end")
        if self.source.value != LIVE:
            raise InvalidInput("run: recorded results are shown; choose live as the source to run")
        sweep = self.modes.check()
        plan(sweep, find_device(sweep.base.device))
        self.bar.say_error(None)
        self.runs.start(sweep, results_folder(sweep.name, self._root))
        return self.result(timeout_s) if wait else None

    def stop(self) -> None:
        """Ask the sweep that is running to end; what was measured is kept. Returns at once."""
        if self.runs.stop():
            self.bar.set_state("stopping")
            self.bar.stop.disabled = True

    def result(self, timeout_s: float | None = None) -> Results:
        """Wait for the sweep that is running, if any, and give the results; raises again what made it fail.

        Raises:
            InvalidInput: nothing was run yet.
            TimeoutError: it was still running after `timeout_s`.
        """
        return self.runs.wait(timeout_s)

    def run_to_end(self, *, timeout_s: float | None = None) -> Results:
        """Run, wait, export, and give the results; for a notebook without a screen.

        Raises:
            RuntimeError: no point could be measured. Whatever `run` raises.
        """
        results = self.run(wait=True, timeout_s=timeout_s)
        assert results is not None
        self.export()
        if not any(record.status.measured for record in results.records):
            raise RuntimeError(f"the sweep measured nothing: {results.totals()}")
        return results

    def freeze(self) -> Frozen:
        """What is shown, as a static value; as the last one of a cell it stays readable in the saved notebook."""
        notes = list(self.results.notes) if self.results is not None else []
        if self.running:
            notes.insert(0, "Frozen while the sweep was running.")
        if self.source.value != LIVE:
            notes.insert(0, self.source.value)
        sweep = self.runs.sweep if self.source.value == LIVE else None
        code, command = (self.code, self.cli) if sweep is None else (code_cell(sweep), sweep.command)
        frame, baseline = timed(self._frame, self.figures.timing), self.figures.chosen_baseline
        return Frozen(
            frame,
            code=code,
            command=command,
            baseline=baseline,
            axes=self._axes(),
            notes=notes,
            profile=self.profile.record,
        )

    def export(self, out: str | Path | None = None) -> dict[str, Path]:
        """Write the results in every format; gives name -> path.

        Args:
            out: the folder; default that of the sweep, else a new one in `results`.

        Raises:
            InvalidInput: there is nothing to export, or the folder cannot be written.
        """
        results = self.results
        if results is None:
            raise InvalidInput("export: there are no results yet; run a sweep first")
        folder = Path(out) if out is not None else results.folder
        if folder is None:
            folder = results_folder(f"{self.sweep_spec.name}-export", self._root)
        return export_files(results, folder)

    def close(self) -> None:
        """Stop what runs, end the panel's own worker, and close every widget. Closing twice does nothing."""
        if self._closed:
            return
        self._closed = True
        live.forget(self)
        self.runs.close()
        with self.runs.lock:
            live.close_tree(self, keep=self.figures.figures)
            self.figures.release()
        self.keep.handles = []

    # --- making ------------------------------------------------------------------------------------------------

    def _prefers_recorded(self) -> bool:
        return self._device.type == "cpu" and not is_headless()

    def _sources(self, results: Results | None) -> dict[str, Results]:
        if results is not None:
            return {f"given results ({len(results.records):,} records)": results}
        found = recordings()
        names = dict.fromkeys(record.environment.device_name for record in found.records)
        return {f"recorded on {name}": found.filter(device_name=name) for name in names}

    def _make(self) -> None:
        self.bar = RunBar()
        self.figures = FigureArea(self._guard)
        self.profile = ProfileArea(self._guard)
        self.keep = KeepRow(self._guard, self._freeze_here, self._export_here)
        self.source = ipywidgets.Dropdown(
            options=[(f"live, on {self._device.name}", LIVE), *((name, name) for name in self._recorded)],
            value=LIVE,
            layout=ipywidgets.Layout(width="380px"),
        )
        self.preset = ipywidgets.Dropdown(
            options=[("choose a preset sweep", ""), *((name, name) for name in PRESETS)],
            layout=ipywidgets.Layout(width="200px"),
        )
        self._plan_text = look.text(css="moewb-plan", width="100%")
        self._strip = look.text(width="100%")
        self.bar.run.on_click(lambda _: self._guard(self.run))
        self.bar.stop.on_click(lambda _: self._guard(self.stop))
        self.source.observe(lambda _: self._guard(self._source_changed), names="value")
        self.preset.observe(lambda _: self._guard(self._preset_chosen), names="value")

    def _arrange(self) -> list[Any]:
        return [
            look.text(look.CSS, display="none"),
            row(look.label("source"), self.source, look.label("start from"), self.preset),
            self.modes,
            look.rule(),
            self._plan_text,
            self.bar.view,
            self.bar.error_view,
            self.figures.view,
            self.profile.view,
            self._strip,
            self.keep.view,
            self.keep.frozen_view,
        ]

    def _ipython_display_(self) -> None:
        """Show the panel and, below it, two empty outputs of the cell that Freeze fills: a callback cannot print."""
        from IPython.display import display

        display(self._repr_mimebundle_(), raw=True)
        self.keep.handles = [display({"text/html": "", "text/plain": ""}, raw=True, display_id=True) for _ in range(2)]

    # --- callbacks ---------------------------------------------------------------------------------------------

    def _guard(self, action: Any) -> None:
        """Run a callback's action; what it raises goes to the error panel, not to a log that nobody reads."""
        try:
            action()
        except Exception as error:
            self.bar.say_error(error)

    def _modes_changed(self, _: Mapping[str, Any]) -> None:
        self._guard(self._replan)

    def _filter_changed(self, _: Mapping[str, Any]) -> None:
        self._guard(self._replan)
        self._guard(self._draw)

    def _preset_chosen(self) -> None:
        name = self.preset.value
        if name:
            self.source.value = LIVE
            self.modes.sweep_spec = preset(name, self._device)
            self.preset.value = ""

    def _source_changed(self) -> None:
        recorded = self.source.value != LIVE
        self.modes.offer(self._recorded[self.source.value].frame() if recorded else None)
        self._buttons()
        self._replan()
        self._draw()

    def _freeze_here(self) -> tuple[Frozen, Path]:
        frozen = self.freeze()
        if not len(frozen.frame):
            raise InvalidInput("freeze: there are no results yet; run a sweep first")
        self.bar.say_error(None)
        folder = self.results.folder if self.results is not None else None
        path = frozen.save((folder or results_folder(f"{self.sweep_spec.name}-frozen", self._root)) / "freeze.html")
        return frozen, path

    def _export_here(self) -> dict[str, Path]:
        files = self.export()
        self.bar.say_error(None)
        return files

    # --- the run -----------------------------------------------------------------------------------------------

    def _run_began(self) -> None:
        self.keep.say("")
        self.bar.set_state("starting")
        self._buttons()
        self._draw()

    def _run_moved(self, job: SweepJob, snapshot: Snapshot) -> None:
        if not job.finished.is_set() and not job.stopping:
            self.bar.set_state(snapshot.state)
        if snapshot.progress is not None:
            self.bar.show_progress(snapshot.progress)
        if self.source.value == LIVE and len(snapshot.records) != len(self._frame):
            self._guard(self._draw)

    def _run_ended(self, job: SweepJob) -> None:
        self.bar.say_error(job.error)
        if job.results is not None:
            self.bar.say(job.results.totals())
            self.keep.say(f"Records are in <b>{html.escape(str(job.results.folder))}</b>.")
        self._buttons()
        if self.source.value == LIVE:
            self._guard(self._draw)
        self._guard(self._mark_stale)
        self.bar.set_state(job.end_state())  # last: who waits for it finds everything in place

    # --- showing -----------------------------------------------------------------------------------------------

    def _buttons(self) -> None:
        self.bar.run.disabled = self.source.value != LIVE
        self.bar.run.tooltip = "recorded results are shown; choose live as the source to run" * (
            self.source.value != LIVE
        )
        self.bar.stop.disabled = not self.running

    def _replan(self) -> None:
        """Say what Run would do, before it is pressed."""
        self._strip.value = look.copyable(self.code) + look.copyable(self.cli)
        self._mark_stale()
        if self.source.value != LIVE:
            count = len(self._recorded[self.source.value].records)
            self._plan_text.value = f"{count:,} recorded results; {RECORDED}"
            return
        try:
            sweep = self.modes.check()
            made = plan(sweep, find_device(sweep.base.device))
        except InvalidInput as error:
            self._plan_text.value = f'<span style="color:#a61b12">{html.escape(str(error))}</span>'
            return
        self._plan_text.value = plan_line(made)

    def _mark_stale(self) -> None:
        shown = self.runs.sweep
        now = self.modes.sweep_spec
        stale = shown is not None and self.source.value == LIVE and list(shown.points()) != list(now.points())
        self.bar.mark_stale(stale)

    def _axes(self) -> list[str] | None:
        """The axes that name a line: fixed from the start, so that names do not change while points come in."""
        if self.source.value != LIVE or self.runs.sweep is None:
            return None
        return self.runs.sweep.varying

    def _draw(self) -> None:
        """Show the results in both figures."""
        with self.runs.lock:
            results = self.results
            frame = pd.DataFrame() if results is None else results.frame()
            if self.source.value != LIVE:
                frame = choose(frame, {k: v for k, v in self.modes.selection().items() if k in frame})
            self._frame = frame
            self.figures.draw(frame, self._axes())
            keys = set(frame["key"]) if "key" in frame else set()
            shown = [] if results is None else [record for record in results.points if record.profile]
            self.profile.show([record for record in shown if record.key in keys])


def Workbench(spec: RunSpec | SweepSpec | str | None = None, **options: Any) -> SweepPanel:  # noqa: N802 - reads as a class
    """The workbench's panel; `options` as of `SweepPanel`."""
    return SweepPanel(spec, **options)
