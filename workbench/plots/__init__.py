"""Figures and tables as pure functions of a frame of results, the same for widget, frozen copy, report and test."""

from workbench.plots.correctness import correctness_figure
from workbench.plots.detail import VIEWS, View, detail_figure, update_detail
from workbench.plots.latency import latency_figure, update_latency
from workbench.plots.profile import PHASES, profile_layers, profile_parts, profile_svg, profile_table
from workbench.plots.select import (
    STEP_TIMINGS,
    TIMINGS,
    Series,
    Timing,
    choose,
    context,
    has_wall,
    of_steps,
    points,
    split,
    subjects,
    timed,
    timing_of,
    varying,
)
from workbench.plots.speedup import Matrix, baselines, speedup_figure, speedup_matrix
from workbench.plots.static import frozen_page, latency_svg
from workbench.plots.table import results_table, speedup_table

__all__ = [
    "PHASES",
    "STEP_TIMINGS",
    "TIMINGS",
    "VIEWS",
    "Matrix",
    "Series",
    "Timing",
    "View",
    "baselines",
    "choose",
    "context",
    "correctness_figure",
    "detail_figure",
    "frozen_page",
    "has_wall",
    "latency_figure",
    "latency_svg",
    "of_steps",
    "points",
    "profile_layers",
    "profile_parts",
    "profile_svg",
    "profile_table",
    "results_table",
    "speedup_figure",
    "speedup_matrix",
    "speedup_table",
    "split",
    "subjects",
    "timed",
    "timing_of",
    "update_detail",
    "update_latency",
    "varying",
]
