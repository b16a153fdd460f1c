"""The one kind of error that bad input gives: a sentence that names the field and what is allowed."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import ValidationError


class InvalidInput(ValueError):
    """Input that cannot be used; `str(error)` is one sentence naming the field and the allowed values."""


class DeviceBusy(RuntimeError):
    """Another process holds the device; `str(error)` says which, since when, and how much memory is free."""


def choices(values: Iterable[object]) -> str:
    """List allowed values as prose: `a, b or c`."""
    names = [str(value) for value in values]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def sentence(error: ValidationError, fields: Iterable[str] = ()) -> str:
    """Turn pydantic's report into one line, the field's dotted name first; `fields`: those of the outermost value."""
    known = list(fields)
    parts = []
    for item in error.errors(include_url=False):
        nested = item.get("ctx", {}).get("error")
        if isinstance(nested, InvalidInput):
            parts.append(str(nested))
            continue
        field = ".".join(str(step) for step in item["loc"]) or "input"
        if item["type"] == "extra_forbidden":
            there = f"; there are {choices(known)}" if known and len(item["loc"]) == 1 else ""
            parts.append(f"{field}: no such field{there}")
        elif item["type"] == "missing":
            parts.append(f"{field}: is missing")
        else:
            given = repr(item["input"])
            given = given if len(given) <= 60 else given[:57] + "..."
            text = item["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
            parts.append(
                f"{field}: must be {text}, not {given}" if text != item["msg"] else f"{field}: {text} (given {given})"
            )
    return "; ".join(parts)
