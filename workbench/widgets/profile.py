"""`ProfileArea`: where a step's time goes, for one of the points shown; nothing to see where none was profiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import ipywidgets

from workbench.plots.profile import PHASES, Phase, profile_svg
from workbench.plots.style import modes_label
from workbench.record import Record
from workbench.widgets import look


class ProfileArea:
    """A choice of point and phase over bars of time, with the byte floor beside. `view` is the widget."""

    def __init__(self, guard: Callable[[Callable[[], None]], None]) -> None:
        """Make the widgets; `guard` runs a callback's action and shows what it raises."""
        self._records: dict[str, Record] = {}
        self._quiet = False
        self.point = ipywidgets.Dropdown(options=[("", "")], layout=ipywidgets.Layout(width="420px"))
        self.phase = ipywidgets.ToggleButtons(options=list(PHASES), value="decode", style={"button_width": "90px"})
        self.phase.add_class("moewb-switch")
        self.bars = look.text(width="100%")
        for part in (self.point, self.phase):
            part.observe(lambda _: None if self._quiet else guard(self._draw), names="value")
        choice = ipywidgets.HBox(
            [look.label("time goes to"), self.point, self.phase],
            layout=ipywidgets.Layout(width="100%", align_items="center", flex_flow="row wrap"),
        )
        self.view = ipywidgets.VBox([choice, self.bars], layout=ipywidgets.Layout(width="100%", display="none"))

    @property
    def record(self) -> Record | None:
        """The record that is shown; None where no point was profiled."""
        return self._records.get(self.point.value)

    def show(self, records: Sequence[Record]) -> None:
        """Offer the records that have a profile; the one that is shown stays, else the last is."""
        found = {record.key: record for record in records if record.profile}
        if found == self._records:
            return
        self._records = found
        options = tuple((name_of(record), key) for key, record in found.items()) or (("", ""),)
        kept = self.point.value if self.point.value in found else options[-1][1]
        self._quiet = True
        self.point.options = options
        self.point.value = kept
        self._quiet = False
        look.show(self.view, bool(found))
        self._draw()

    def _draw(self) -> None:
        record = self.record
        phase: Phase = self.phase.value
        self.bars.value = "" if record is None else profile_svg(record, phase)


def name_of(record: Record) -> str:
    """A point in the words of the figures: model, modes, batch."""
    spec = record.spec
    return " · ".join(word for word in (spec.model, modes_label(spec.flat()), spec.size_label) if word)
