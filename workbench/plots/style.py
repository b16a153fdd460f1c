"""How every figure looks: one white template, one colour-blind-safe palette, short names, units in axis titles."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

# Okabe and Ito's palette without its yellow (too light on white) and black; order puts the strongest contrasts first.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#6A3D9A", "#555555")
DASHES = ("solid", "dash", "dot")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "star", "hexagon", "pentagon")
SLOTS = len(PALETTE) * len(DASHES)
"""Lines that a figure holds; more cannot be told apart, so a figure says how many it left out."""

INK, MUTED, GRID, GAP = "#222222", "#666666", "#E6E6E6", "#F4F4F4"
FONT = "Helvetica Neue, Helvetica, Arial, sans-serif"
# Brown (slower) - white - blue (faster): told apart by every kind of colour vision.
DIVERGING = ((0.0, "#B35806"), (0.25, "#F1A340"), (0.5, "#FFFFFF"), (0.75, "#74ADD1"), (1.0, "#2166AC"))

MODE_AXES = (
    *("moe_backend", "split_k", "reduction", "quant", "group_size", "zero_points", "activation_scale"),
    *("attention_backend", "mla_prefill", "mla_decode", "fusion"),
    *("compile", "compile_scope", "max_compile_batch", "dynamic", "graph", "max_capture_batch"),
)
"""What one chooses when serving: a matrix compares these, everything else being equal."""
_WHAT = ("device_name", "subject", "model", "experts", "top_k", "num_layers", "tp_size")
_WHERE = (
    *("input_len", "output_len", "page_size", "perplexity_tokens"),
    *("routing", "zipf_exponent", "l2", "cache", "seed"),
)
PROBLEM_AXES = (*_WHAT, *_WHERE)
AXES = (*_WHAT, *MODE_AXES, *_WHERE)

# What goes without saying where all rows have it: these mean nothing beside most choices of the others.
UNSAID = {
    "split_k": None,
    "reduction": "deterministic",
    "group_size": 128,
    "zero_points": False,
    "activation_scale": "dynamic",
    "mla_prefill": "expanded",
    "mla_decode": "absorbed",
    "fusion": "off",
    "compile_scope": "all",
    "max_compile_batch": None,
    "max_capture_batch": None,
}

_SHORT: dict[tuple[str, Any], str] = {
    ("moe_backend", "torch_grouped_mm"): "grouped_mm",
    ("compile", "none"): "eager",
    ("compile", "default"): "compile",
    ("compile", "max-autotune-no-cudagraphs"): "max-autotune-no-cg",
    ("graph", "disabled"): "",
    ("graph", "full"): "graph",
    ("fusion", "off"): "",
    ("fusion", "on"): "fused",
    ("compile_scope", "all"): "",
    ("compile_scope", "skip_moe"): "without MoE",
    ("dynamic", False): "",
    ("dynamic", True): "dynamic",
    ("zero_points", False): "",
    ("zero_points", True): "zero points",
    ("activation_scale", "dynamic"): "dynamic scale",
    ("activation_scale", "static"): "fixed scale",
    ("subject", "moe_layer"): "MoE layer",
    ("subject", "step"): "step",
}
_PREFIX = {
    "split_k": "split ",
    "group_size": "g",
    "experts": "E",
    "top_k": "top-",
    "tp_size": "TP",
    "seed": "seed ",
    "zipf_exponent": "s=",
    "l2": "L2 ",
    "mla_prefill": "prefill ",
    "mla_decode": "decode ",
    "batch_size": "batch ",
    "max_compile_batch": "compiled up to ",
    "max_capture_batch": "captured up to ",
    "input_len": "input ",
    "output_len": "output ",
    "page_size": "page ",
    "perplexity_tokens": "perplexity of ",
}
_SWITCHES = ("dynamic", "zero_points")
_SUFFIX = {"cache": " cache", "num_tokens": " tokens", "num_layers": " layers", "attention_backend": " attention"}


def missing(value: object) -> bool:
    """Whether a cell holds nothing: None, NaN or pandas' NA."""
    return value is None or type(value).__name__ == "NAType" or value != value


def number(value: object) -> float | None:
    """A finite float, or None; what figures and tables may print."""
    if missing(value) or isinstance(value, str):
        return None
    result = float(value)  # type: ignore[arg-type]
    return result if math.isfinite(result) else None


def short(axis: str, value: object) -> str:
    """The value of an axis as it stands in a legend; empty for what goes without saying (no graph, static shapes)."""
    if missing(value):
        return "split as tuned" if axis == "split_k" else ""
    if isinstance(value, float) and value.is_integer():  # pandas widens whole numbers beside gaps
        value = int(value)
    if axis in _SWITCHES:
        value = bool(value)
    text = _SHORT.get((axis, value))
    if text is None:
        text = f"{_PREFIX.get(axis, '')}{value}{_SUFFIX.get(axis, '')}"
    return text if len(text) <= 40 else text[:18] + "..." + text[-19:]


def told(axis: str, value: object) -> bool:
    """Whether a value is worth saying where every row has it."""
    return axis not in UNSAID or not (missing(value) if UNSAID[axis] is None else value == UNSAID[axis])


def label(values: Mapping[str, object], axes: Sequence[str]) -> str:
    """A line's name: its values on the given axes, plain text (escape before it becomes markup)."""
    words = [short(axis, values.get(axis)) for axis in axes]
    return " · ".join(word for word in words if word)


def modes_label(values: Mapping[str, object]) -> str:
    """A set of modes in words, without what goes without saying; plain text."""
    return label(values, [axis for axis in MODE_AXES if told(axis, values.get(axis))])


def safe(text: object) -> str:
    """Text from a record as it may stand in plotly's small markup (hover, legend, title)."""
    return html.escape(str(text), quote=False)


def wrap(text: str, width: int = 60) -> str:
    """Break a long sentence for a hover box, escaped; plotly does not break lines by itself."""
    import textwrap

    lines = textwrap.wrap(text, width)[:8] or [""]
    return "<br>".join(safe(line) for line in lines)


def figures(value: float, digits: int = 3) -> str:
    """A number to three figures without an exponent: 0.123, 12.3, 1,230."""
    if value == 0:
        return "0"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{round(value, decimals):,.{min(decimals, 9)}f}"


def duration(us: float) -> str:
    """Microseconds in the unit that reads best: 870 ns, 12.3 us, 4.56 ms, 1.20 s."""
    for limit, factor, unit in ((1, 1e3, "ns"), (1e3, 1, "µs"), (1e6, 1e-3, "ms")):
        if us < limit:
            return f"{figures(us * factor)} {unit}"
    return f"{figures(us / 1e6)} s"


def log_ticks(low: float, high: float, most: int = 9) -> tuple[list[float], list[str]]:
    """Round tick values (1-2-5, thinned by decades) that cover `low` to `high`, both above 0, with plain labels."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for steps in ((1, 2, 5), (1, 3), (1,)):
        values = [step * 10.0**power for power in range(first, last + 1) for step in steps]
        values = [v for v in values if low / 2.6 <= v <= high * 2.6]
        if len(values) <= most:
            break
    return values, [f"{v:,.0f}" if v >= 1 else f"{v:g}" for v in values]


def axis(title: str) -> dict[str, Any]:
    """An axis with a line, outward ticks and a title that holds its unit."""
    return {
        "showline": True,
        "linecolor": "#999999",
        "ticks": "outside",
        "tickcolor": "#999999",
        "ticklen": 4,
        "gridcolor": GRID,
        "zeroline": False,
        "title": {"text": title, "standoff": 8, "font": {"size": 13}},
        "tickfont": {"size": 12},
    }


def set_height(figure: Any, pixels: int) -> None:
    """Give a figure its height; a live one only names it (`wanted_height`), for the box that it stands in.

    A height set in a live figure's layout would also fix its width, and it would no longer follow the page.
    """
    if type(figure).__name__ == "FigureWidget":
        figure.layout.meta = {"height": pixels}
    else:
        figure.layout.height = pixels


def wanted_height(figure: Any) -> int:
    """The height in pixels that `set_height` gave."""
    meta = figure.layout.meta
    return int(meta["height"] if meta else figure.layout.height)


def template() -> dict[str, Any]:
    """The layout that every figure starts from."""
    return {
        "template": "none",
        "paper_bgcolor": "white",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": FONT, "size": 13, "color": INK},
        "title": {
            "font": {"size": 13, "color": MUTED},
            "x": 0.0,
            "xref": "container",
            "xanchor": "left",
            "pad": {"l": 12},
            "y": 0.975,
            "yanchor": "top",
        },
        "margin": {"l": 72, "r": 16, "t": 40, "b": 52},
        "legend": {"orientation": "v", "x": 1.02, "y": 1.0, "font": {"size": 12}, "itemwidth": 40, "tracegroupgap": 0},
        "hoverlabel": {
            "align": "left",
            "bgcolor": "white",
            "bordercolor": "#999999",
            "font": {"size": 12, "color": INK},
        },
        "hovermode": "closest",
        "autosize": True,
    }
