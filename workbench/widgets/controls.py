"""Rows of controls: an axis as toggles that can each be disabled with a reason, and a list typed as text."""

from __future__ import annotations

import html
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import ipywidgets

from workbench.errors import InvalidInput
from workbench.spec import OPTIONAL, parse_value
from workbench.widgets import look


class AxisRow:
    """One axis: a toggle per value, several may be on, at least one is.

    A value that cannot be used stays visible, is disabled, and its reason stands under the row and in its tooltip.
    `view` is the widget.
    """

    def __init__(
        self,
        name: str,
        values: Iterable[Any],
        changed: Callable[[], None],
        *,
        words: Callable[[Any], str] = str,
        rank: Callable[[Any], Any] | None = None,
        title: str | None = None,
        beside: bool = False,
        extra: Sequence[Any] = (),
    ) -> None:
        """Make the row.

        Args:
            name, values: the axis, and the values that get a toggle.
            changed: called when the user changes it.
            words: what stands on a value's toggle.
            rank: sorts values that are added later.
            title: stands before the row; default the name.
            beside: whether the row stands right of another, with a label no wider than its words.
            extra: widgets that follow the toggles.
        """
        self.name = name
        self._words, self._rank, self._changed = words, rank, changed
        self._buttons: dict[Any, Any] = {}
        self._reasons: dict[Any, str] = {}
        self._quiet = False
        self._extra = tuple(extra)
        self._box = ipywidgets.HBox()
        self._box.add_class("moewb-toggles")
        self._why = look.text(css="moewb-why", display="none", padding="0 0 3px 2px")
        column = ipywidgets.VBox([self._box, self._why], layout=ipywidgets.Layout(min_width="0"))
        self.view = ipywidgets.HBox([look.label(title or name, None if beside else look.LABEL_WIDTH), column])
        self.view.add_class("moewb-row")
        self._add(values)

    @property
    def values(self) -> tuple[Any, ...]:
        """Every value that has a button, in order."""
        return tuple(self._buttons)

    @property
    def selected(self) -> tuple[Any, ...]:
        """The values that are on."""
        return tuple(value for value, button in self._buttons.items() if button.value)

    def button(self, value: Any) -> Any:
        """The `ToggleButton` of a value."""
        return self._buttons[value]

    def select(self, values: Sequence[Any]) -> None:
        """Turn exactly these on, adding a button for one that has none; does not call `changed`."""
        self._add(value for value in values if value not in self._buttons)
        self._quiet = True
        try:
            for value, button in self._buttons.items():
                button.value = value in values
        finally:
            self._quiet = False
        self._refresh()

    def disable(self, reasons: Mapping[Any, str]) -> None:
        """Disable the values that have a reason (a sentence), enable the others."""
        self._reasons = {value: reason for value, reason in reasons.items() if reason}
        self._refresh()

    def restrict(self, values: Collection[Any] | None) -> None:
        """Show only these values, with None all; used where results are looked at and the others are not there."""
        for value, button in self._buttons.items():
            look.show(button, values is None or value in values)

    def reason(self, value: Any) -> str:
        """Why a value cannot be used here; empty where it can."""
        return self._reasons.get(value, "")

    def _add(self, values: Iterable[Any]) -> None:
        for value in values:
            button = ipywidgets.ToggleButton(description=self._words(value), layout=ipywidgets.Layout(width="auto"))
            button.observe(self._pressed, names="value")
            self._buttons[value] = button
        if self._rank is not None:
            self._buttons = dict(sorted(self._buttons.items(), key=lambda item: self._rank(item[0])))  # type: ignore[misc]
        self._box.children = (*self._buttons.values(), *self._extra)

    def _pressed(self, change: Mapping[str, Any]) -> None:
        if self._quiet:
            return
        if not self.selected:  # an axis needs a value: the last one stays on
            self._quiet = True
            change["owner"].value = True
            self._quiet = False
            return
        self._refresh()
        self._changed()

    def _refresh(self) -> None:
        for value, button in self._buttons.items():
            reason = self.reason(value)
            # One that is on stays usable, so that it can be turned off.
            disabled = bool(reason) and not button.value
            if button.disabled != disabled:
                button.disabled = disabled
            if button.tooltip != (reason or None):
                button.tooltip = reason or None
        grouped: dict[str, list[str]] = {}
        for value, reason in self._reasons.items():
            if value in self._buttons:
                grouped.setdefault(reason, []).append(self._words(value))
        lines = [f"<b>{html.escape(', '.join(names))}</b>: {html.escape(why)}" for why, names in grouped.items()]
        self._why.value = " &nbsp; ".join(f"<span>{line}</span>" for line in lines)
        look.show(self._why, bool(lines))


class ListField:
    """A field typed as text: one value, or several with commas between. `view` is the widget."""

    def __init__(self, name: str, changed: Callable[[], None], *, title: str, hint: str, width: str = "96px") -> None:
        """Make the field; `changed` is called when the user leaves it or presses Enter."""
        self.name = name
        self._changed = changed
        self._quiet = False
        self.text = ipywidgets.Text(
            placeholder=hint, continuous_update=False, layout=ipywidgets.Layout(width=width, margin="0 14px 0 4px")
        )
        self.text.add_class("moewb-field")
        self.text.observe(self._typed, names="value")
        self.view = ipywidgets.HBox([look.text(html.escape(title), padding="3px 0 0 0"), self.text])

    @property
    def selected(self) -> tuple[Any, ...]:
        """The values. Raises `InvalidInput` for a text that is none."""
        words = [word.strip() for word in self.text.value.split(",") if word.strip()]
        values = [parse_value(self.name, word) for word in words]
        if not values and self.name not in OPTIONAL:
            raise InvalidInput(f"{self.name}: must be given")
        return tuple(dict.fromkeys(values)) or (None,)

    def select(self, values: Sequence[Any]) -> None:
        """Show these values; does not call `changed`."""
        self._quiet = True
        shown = "" if tuple(values) == (None,) else ", ".join("none" if v is None else f"{v:g}" for v in values)
        self.text.value = shown
        self._quiet = False

    def _typed(self, _: Mapping[str, Any]) -> None:
        if not self._quiet:
            self._changed()
