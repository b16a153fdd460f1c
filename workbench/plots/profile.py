"""Where a step's time goes: by part of the model and by layer, with the least time that its bytes need beside it."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from workbench.plots.style import FONT, INK, MUTED, PALETTE, duration
from workbench.record import ProfileRow, Record

Phase = Literal["prefill", "decode"]
PHASES: tuple[Phase, ...] = ("prefill", "decode")
KINDS = ("gemm", "moe", "attention", "norm", "elementwise", "memory", "other")
COLOURS = dict(zip(KINDS, PALETTE, strict=False))
WIDTH, LEFT, RIGHT, BAR, GAP = 960, 130, 190, 18, 8
LAYER_HEIGHT = 90
FLOOR_WORDS = "black line: the least time that its bytes need at this device's measured read rate"


@dataclass(slots=True)
class Part:
    """Time of one part of the model, or of one layer, in one pass.

    Attributes:
        name: of the part, or the layer's number.
        kinds: kind of kernel -> microseconds.
        count: kernels.
        floor_bytes: bytes that must be moved at least; None where no row says.
    """

    name: str
    kinds: dict[str, float] = field(default_factory=dict)
    count: int = 0
    floor_bytes: int | None = None

    @property
    def time_us(self) -> float:
        """Microseconds of all kinds together."""
        return sum(self.kinds.values())

    def take(self, row: ProfileRow) -> None:
        """Add a row."""
        self.kinds[row.kind] = self.kinds.get(row.kind, 0.0) + row.time_us
        self.count += row.count
        if row.floor_bytes is not None:
            self.floor_bytes = (self.floor_bytes or 0) + row.floor_bytes


def profile_parts(rows: Iterable[ProfileRow], phase: Phase) -> list[Part]:
    """The parts of the model over all layers, the one that takes longest first."""
    found: dict[str, Part] = {}
    for row in rows:
        if row.phase == phase:
            found.setdefault(row.part, Part(row.part)).take(row)
    return sorted(found.values(), key=lambda part: -part.time_us)


def profile_layers(rows: Iterable[ProfileRow], phase: Phase) -> list[Part]:
    """The layers in their order, all parts of each together; what lies outside the layers is left out."""
    found: dict[int, Part] = {}
    for row in rows:
        if row.phase == phase and row.layer is not None:
            found.setdefault(row.layer, Part(str(row.layer))).take(row)
    return [found[layer] for layer in sorted(found)]


def floor_us(part: Part, read_rate: float | None) -> float | None:
    """The least microseconds that a part's bytes need at `read_rate` bytes a second; None where either is unknown."""
    return part.floor_bytes / read_rate * 1e6 if part.floor_bytes is not None and read_rate else None


def profile_table(
    profile: Sequence[ProfileRow], phase: Phase, read_rate: float | None = None, *, most: int = 12
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Header and rows: the largest pairs of part and kind over all layers, and how long their bytes need at least.

    A floor is of the part, all kinds together, and stands in the part's largest row.
    """
    parts = profile_parts(profile, phase)
    whole = sum(part.time_us for part in parts)
    counts: dict[tuple[str, str], int] = {}
    for row in profile:
        if row.phase == phase:
            counts[row.part, row.kind] = counts.get((row.part, row.kind), 0) + row.count
    rows = []
    for part in parts:
        least = floor_us(part, read_rate)
        for place, (kind, time) in enumerate(sorted(part.kinds.items(), key=lambda item: -item[1])):
            floor = duration(least) if least and not place else ""
            share = f"{time / whole:.0%}" if whole else ""
            rows.append((time, (part.name, kind, duration(time), share, str(counts[part.name, kind]), floor)))
    rows.sort(key=lambda item: -item[0])
    return ("part", "kernels", "time", "share", "count", "floor of the part"), [cells for _, cells in rows[:most]]


def profile_svg(record: Record, phase: Phase) -> str:
    """The profile as one `<svg>` element: a bar for each part, split by kind of kernel, and below one for each layer.

    Beside each bar a black line marks the byte floor. A sentence where the record has no profile of that phase.
    """
    parts = profile_parts(record.profile, phase)
    if not parts or not any(part.time_us for part in parts):
        return f'<p style="color:{MUTED}">no profile of the {phase} here</p>'
    read = record.environment.roofs.get("read")
    layers = profile_layers(record.profile, phase)
    longest = max(max(part.time_us, floor_us(part, read) or 0.0) for part in parts)
    whole = sum(part.time_us for part in parts)
    shown = [kind for kind in KINDS if any(kind in part.kinds for part in parts)]
    pieces, top = _legend(shown), 34
    for part in parts:
        pieces += _bar(part, top, (WIDTH - LEFT - RIGHT) / longest, whole, floor_us(part, read))
        top += BAR + GAP
    if len(layers) > 1:
        pieces += _layers(layers, top + 6, read)
        top += LAYER_HEIGHT + 46
    if read and any(part.floor_bytes is not None for part in parts):
        pieces.append(f'<text x="{LEFT}" y="{top + 12}" fill="{MUTED}" font-size="11">{FLOOR_WORDS}</text>')
        top += 18
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top + 8}" width="100%" role="img" '
        f'style="max-width:{WIDTH}px;background:white" font-family="{FONT}" font-size="12" '
        f'aria-label="time of the {phase} by part of the model">{"".join(pieces)}</svg>'
    )


def _legend(kinds: Sequence[str]) -> list[str]:
    pieces, left = [], LEFT
    for kind in kinds:
        pieces.append(f'<rect x="{left}" y="8" width="12" height="12" fill="{COLOURS[kind]}"/>')
        pieces.append(f'<text x="{left + 17}" y="18" fill="{INK}">{kind}</text>')
        left += 40 + 7 * len(kind)
    return pieces


def _bar(part: Part, top: float, scale: float, whole: float, least: float | None) -> list[str]:
    pieces = [f'<text x="{LEFT - 8}" y="{top + 13}" text-anchor="end" fill="{INK}">{html.escape(part.name)}</text>']
    left = float(LEFT)
    for kind in KINDS:
        time = part.kinds.get(kind, 0.0)
        if time:
            said = f"{html.escape(part.name)}, {kind}: {duration(time)}, {time / whole:.1%} of the pass"
            pieces.append(
                f'<rect x="{left:.1f}" y="{top}" width="{max(0.5, time * scale):.1f}" height="{BAR}" '
                f'fill="{COLOURS[kind]}"><title>{said}</title></rect>'
            )
            left += time * scale
    words = f"{duration(part.time_us)} ({part.time_us / whole:.0%})"
    right = max(left, LEFT + (least or 0.0) * scale)
    if least is not None:
        at = LEFT + least * scale
        pieces.append(f'<path d="M{at:.1f} {top - 3}v{BAR + 6}" stroke="{INK}" stroke-width="2"/>')
        words += f", floor {duration(least)}"
    pieces.append(f'<text x="{right + 8:.1f}" y="{top + 13}" fill="{INK}">{words}</text>')
    return pieces


def _layers(layers: Sequence[Part], top: float, read: float | None) -> list[str]:
    """Columns, one a layer, as tall as its time."""
    width = (WIDTH - LEFT - RIGHT) / len(layers)
    longest = max(max(layer.time_us, floor_us(layer, read) or 0.0) for layer in layers) or 1.0
    base = top + 16 + LAYER_HEIGHT
    pieces = [f'<text x="{LEFT}" y="{top + 8}" fill="{MUTED}">by layer, up to {duration(longest)}</text>']
    for place, layer in enumerate(layers):
        left, low = LEFT + place * width, base
        for kind in KINDS:
            time = layer.kinds.get(kind, 0.0)
            if not time:
                continue
            high = time / longest * LAYER_HEIGHT
            low -= high
            pieces.append(
                f'<rect x="{left + width * 0.1:.1f}" y="{low:.1f}" width="{width * 0.8:.1f}" height="{high:.2f}" '
                f'fill="{COLOURS[kind]}"><title>layer {layer.name}, {kind}: {duration(time)}</title></rect>'
            )
        least = floor_us(layer, read)
        if least is not None:
            at = base - least / longest * LAYER_HEIGHT
            pieces.append(f'<path d="M{left:.1f} {at:.1f}h{width:.1f}" stroke="{INK}" stroke-width="2"/>')
        if place % max(1, -(-len(layers) // 24)) == 0:
            middle = left + width / 2
            pieces.append(
                f'<text x="{middle:.1f}" y="{base + 14}" text-anchor="middle" fill="{INK}" font-size="11">'
                f"{layer.name}</text>"
            )
    return pieces
