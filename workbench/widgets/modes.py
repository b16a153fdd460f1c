"""`ModePanel`: every axis as a row of controls over one frozen description of the sweep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ipywidgets
import traitlets

from workbench.devices import DeviceInfo, find_device
from workbench.errors import InvalidInput
from workbench.modes import Subject
from workbench.plots import subjects
from workbench.plots.style import SLOTS, missing
from workbench.spec import DEFAULTS, SIZE_FIELD, RunSpec, check_value
from workbench.sweeps.spec import SweepSpec
from workbench.widgets import look
from workbench.widgets.available import DEPENDENT, unavailable
from workbench.widgets.axes import (
    BESIDE,
    FIELDS,
    LINES,
    MODELS,
    PLAIN_AGAIN,
    SIZES,
    SUBJECTS,
    TITLES,
    VALUES,
    WORDS,
    has,
)
from workbench.widgets.controls import AxisRow, ListField

if TYPE_CHECKING:
    import pandas as pd


class ModePanel(ipywidgets.VBox):  # type: ignore[misc]  # ipywidgets ships no types
    """Controls for one run or one sweep: an axis with several values on is swept.

    Attributes:
        spec: `RunSpec`, read and write: the first value of every axis. Setting it moves the controls.
        sweep_spec: `SweepSpec`, read and write: every value that is on. Setting it moves the controls.
        problem: str: what is wrong with a typed field, one sentence; empty when all is well. The specs keep the last
            value that was right.
        filtered: int: grows with every change of the controls while they filter recorded results.
    """

    spec = traitlets.Instance(RunSpec)
    sweep_spec = traitlets.Instance(SweepSpec)
    problem = traitlets.Unicode("")
    filtered = traitlets.Int(0)

    def __init__(
        self, spec: RunSpec | None = None, *, sweep_spec: SweepSpec | None = None, device: DeviceInfo | None = None
    ) -> None:
        """Make the controls, showing `sweep_spec` or else `spec`; `device` decides what is available."""
        self._device = device or find_device((sweep_spec.base if sweep_spec else spec or RunSpec()).device)
        self._quiet = True
        self._recorded: dict[str, set[Any]] | None = None
        self._offered: pd.DataFrame | None = None
        self._arranged: Subject | None = None
        self._base = spec or RunSpec()
        models = dict.fromkeys(name for names in MODELS.values() for name in names)
        self.subject = ipywidgets.ToggleButtons(options=SUBJECTS, style={"button_width": "130px"})
        self.subject.add_class("moewb-switch")
        self.subject.observe(lambda _: None if self._quiet else self._subject_chosen(), names="value")
        self._path = self._adder("path or Hugging Face id", "200px", self._add_model)
        self._rows = {"model": AxisRow("model", models, self._read, extra=[self._path])}
        for axis, values in VALUES.items():
            self._rows[axis] = AxisRow(
                axis,
                values,
                self._read,
                words=lambda value, axis=axis: WORDS.get((axis, value), str(value)),  # type: ignore[misc]
                title=TITLES.get(axis),
                beside=axis in BESIDE,
            )
        self._more = {}
        for axis, sizes in SIZES.items():
            self._more[axis] = self._adder(
                "other count" if axis == "num_tokens" else "other batch",
                "100px",
                lambda change, axis=axis: self._add_size(axis, change),
            )
            self._rows[axis] = AxisRow(
                axis,
                sizes,
                self._read,
                words=lambda n: f"{n:,}",
                rank=lambda n: n,
                title=TITLES[axis],
                extra=[self._more[axis]],
            )
        self._fields = {
            name: ListField(name, self._read, title=title, hint=hint, width=width)
            for name, title, hint, width in FIELDS
        }
        super().__init__(children=self._arrange())
        self.observe(self._spec_set, names="spec")
        self.observe(self._sweep_set, names="sweep_spec")
        self._quiet = False
        self.sweep_spec = sweep_spec or self._around(self._base)

    @property
    def code(self) -> str:
        """Python that builds what is set: `eval` of it gives `sweep_spec`."""
        return str(self.sweep_spec.to_code())

    @property
    def cli(self) -> str:
        """The shell line that runs what is set."""
        return str(self.sweep_spec.command)

    @property
    def axes(self) -> Mapping[str, AxisRow]:
        """The rows of toggles by the short name of their axis."""
        return self._rows

    @property
    def fields(self) -> Mapping[str, ListField]:
        """The typed fields by their short name."""
        return self._fields

    def selection(self) -> dict[str, tuple[Any, ...]]:
        """Axis -> the values that are on, of the subject and of all its rows of toggles."""
        subject = self._subject
        return {"subject": (str(subject),)} | {n: row.selected for n, row in self._rows.items() if has(subject, n)}

    def offer(self, frame: pd.DataFrame | None) -> None:
        """Turn the controls into a filter of recorded results (what these do not hold is hidden), or back (None)."""
        self._offered = frame
        if frame is None:
            self._recorded = None
            self._show(self.sweep_spec)
        else:
            found = subjects(frame)
            self._take_subject(self._subject if not found or str(self._subject) in found else Subject(found[0]))
            self._filter(frame)
        for part in (self._numbers, self._path, *self._more.values()):
            look.show(part, frame is None)
        self._refuse()

    def _filter(self, frame: pd.DataFrame) -> None:
        """Turn on what recorded results of the subject hold; of many, those that one figure can show."""
        if "subject" in frame:
            frame = frame[frame["subject"] == str(self._subject)]
        rows = {n: row for n, row in self._rows.items() if n in frame and has(self._subject, n)}
        self._recorded = {name: _present(frame, name) for name in rows}
        lines = frame[[name for name in rows if name not in SIZES]]
        many = len(lines.drop_duplicates()) > SLOTS
        first = _best_covered(frame) if many else frame
        for name, row in rows.items():
            present = sorted(_present(first, name), key=_place(row.values))
            single = name in ("model", "routing", "l2", "cache")
            row.select(present[:1] if single else present[:2] if many and name == "compile" else present)

    def described(self) -> SweepSpec:
        """The sweep of what is on, also while the controls filter recorded results: it would measure the same here."""
        if self._recorded is None:
            result: SweepSpec = self.sweep_spec
            return result
        chosen = self.selection()
        single = {name: values[0] for name, values in chosen.items() if len(values) == 1 and name not in SIZES}
        axes = {name: values for name, values in chosen.items() if len(values) > 1 or name in SIZES}
        return SweepSpec(name="again", base=RunSpec().replace(**single), axes=axes)

    def check(self) -> SweepSpec:
        """The sweep that is set. Raises `InvalidInput` when a typed field is wrong."""
        if self.problem:
            raise InvalidInput(self.problem)
        result: SweepSpec = self.sweep_spec
        return result

    @property
    def _subject(self) -> Subject:
        return Subject(self.subject.value)

    def _controls(self) -> list[AxisRow | ListField]:
        """Those that the subject has."""
        return [control for control in self._every() if has(self._subject, control.name)]

    def _every(self) -> list[AxisRow | ListField]:
        return [*self._rows.values(), *self._fields.values()]

    def _take_subject(self, subject: Subject) -> None:
        """Show a subject and its controls; nothing is described anew."""
        quiet, self._quiet = self._quiet, True
        self.subject.value = str(subject)
        self._quiet = quiet
        if subject is not self._arranged:
            self._arranged = subject
            for control in self._every():
                look.show(control.view, has(subject, control.name))

    def _subject_chosen(self) -> None:
        """The user chose another subject: what both have is kept, but for what means something else there."""
        if self._offered is not None:
            self.offer(self._offered)
            self.filtered += 1
            return
        new = self._subject
        kept = {n: v for n, v in self.sweep_spec.axes.items() if has(new, n) and n not in PLAIN_AGAIN}
        plain = {name: DEFAULTS[new][name] for name in PLAIN_AGAIN}
        if not set(kept.get("model", (self.spec.model,))) & {*MODELS[new], *self._typed_models()}:
            kept.pop("model", None)
            plain["model"] = DEFAULTS[new]["model"]
        size = SIZE_FIELD[new]
        base = self.spec.replace(subject=new, **plain)
        self.sweep_spec = SweepSpec(name=self.sweep_spec.name, base=base, axes={**kept, size: (DEFAULTS[new][size],)})

    def _typed_models(self) -> set[str]:
        """Models that no subject offers by itself."""
        return set(self._rows["model"].values) - {name for names in MODELS.values() for name in names}

    def _arrange(self) -> list[Any]:
        flow = ipywidgets.Layout(flex_flow="row wrap", width="100%")
        lines = [ipywidgets.HBox([self._rows[name].view for name in line], layout=flow) for line in LINES]
        numbers = ipywidgets.HBox([field.view for field in self._fields.values()], layout=flow)
        self._numbers = ipywidgets.HBox([look.label("numbers"), numbers])
        return [ipywidgets.HBox([look.label("subject"), self.subject], layout=flow), *lines, self._numbers]

    def _adder(self, hint: str, width: str, added: Any) -> Any:
        box = ipywidgets.Text(
            placeholder=hint,
            continuous_update=False,
            layout=ipywidgets.Layout(width=width, min_width=width, margin="0"),
        )
        box.add_class("moewb-field")
        box.observe(added, names="value")
        return box

    def _add_model(self, change: Mapping[str, Any]) -> None:
        name = change["new"].strip()
        if name:
            self._rows["model"].select([name])
            change["owner"].value = ""
            self._read()

    def _add_size(self, axis: str, change: Mapping[str, Any]) -> None:
        word = change["new"].strip().replace(",", "")
        if not word:
            return
        row = self._rows[axis]
        try:
            value = check_value(axis, int(word) if word.isdigit() else word)
        except InvalidInput as error:
            self.problem = str(error)
            return
        row.select([*row.selected, value])
        change["owner"].value = ""
        self._read()

    def _around(self, spec: RunSpec) -> SweepSpec:
        return SweepSpec(base=spec, axes={SIZE_FIELD[spec.subject]: (spec.size,)})

    def _spec_set(self, change: Mapping[str, Any]) -> None:
        if not self._quiet:
            self._base = change["new"]
            self.sweep_spec = self._around(change["new"])

    def _sweep_set(self, change: Mapping[str, Any]) -> None:
        if not self._quiet:
            self._base = change["new"].base
            self._show(change["new"])
            self._refuse()

    def _show(self, sweep: SweepSpec) -> None:
        """Move the controls to a sweep."""
        first = next(iter(sweep.points()))
        flat = first.flat()
        self._take_subject(first.subject)
        for control in self._controls():
            control.select(sweep.axes.get(control.name, (flat[control.name],)))
        self._quiet = True
        self.spec = first
        self.problem = ""
        self._quiet = False

    def _read(self) -> None:
        """The user changed a control: describe what is set."""
        if self._recorded is not None:
            self._refuse()
            self.filtered += 1
            return
        try:
            chosen = {control.name: control.selected for control in self._controls()}
            sweep = self._describe(chosen)
        except InvalidInput as error:
            self.problem = str(error)
            return
        self.problem = ""
        self._quiet = True
        try:
            self._base = sweep.base
            self.spec = next(iter(sweep.points()))
            self.sweep_spec = sweep
        finally:
            self._quiet = False
        self._refuse()

    def _describe(self, chosen: Mapping[str, Sequence[Any]]) -> SweepSpec:
        current: SweepSpec = self.sweep_spec
        # An axis without a control (timeout_s, ...) is kept as it was set from code.
        axes = {name: values for name, values in current.axes.items() if name not in chosen}
        axes |= {n: tuple(sorted(v) if n in SIZES else v) for n, v in chosen.items() if len(v) > 1 or n in SIZES}
        single = {name: values[0] for name, values in chosen.items() if len(values) == 1 and name not in SIZES}
        return SweepSpec(name=current.name, base=current.base.replace(**single), axes=axes)

    def _refuse(self) -> None:
        """Disable what cannot be honoured."""
        subject = self._subject
        rows = {name: row for name, row in self._rows.items() if has(subject, name)}
        plain = DEFAULTS[subject]
        if self._recorded is not None:
            for name, row in rows.items():
                row.disable({})
                row.restrict(self._recorded.get(name, set()))
                if name in DEPENDENT:
                    look.show(row.view, bool(self._recorded.get(name, set()) - {plain[name]}))
            return
        for row in rows.values():
            row.restrict(None)
        shown = rows["model"].selected
        rows["model"].restrict({*MODELS[subject], *self._typed_models(), *shown})
        offered = {name: self._rows[name].values for name in VALUES if has(subject, name)}
        try:
            reasons = unavailable(self.spec, self._device, offered, self.selection())
        except InvalidInput:
            return  # the plan says what is wrong with the model; the modes are left as they were
        for name, row in rows.items():
            row.disable(reasons.get(name, {}))
            if name in DEPENDENT:  # a row that can only be left as it is would be a row to read for nothing
                open_values = {value for value in row.values if not row.reason(value)}
                look.show(row.view, bool((open_values | set(row.selected)) - {plain[name]}))


def _present(frame: pd.DataFrame, name: str) -> set[Any]:
    """The values of an axis that a frame holds, a missing one as None."""
    return {None if missing(value) else value for value in frame[name].unique().tolist()}


def _best_covered(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows to show first: one model, format, routing and cache state, each the one with most measured points."""
    rows = frame[frame["latency_us"].notna()]
    rows = frame if rows.empty else rows
    for name in ("quant", "routing", "l2", "cache", "model"):
        if name in rows and rows[name].nunique() > 1:
            rows = rows[rows[name] == rows[name].value_counts().idxmax()]
    return rows


def _place(values: Sequence[Any]) -> Any:
    order = {value: place for place, value in enumerate(values)}
    return lambda value: (order.get(value, len(order)), str(value))
