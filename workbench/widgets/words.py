"""What the panel says as text or code, and the small choices that do not touch a widget."""

from __future__ import annotations

import html
import os

from workbench.devices import DeviceInfo
from workbench.errors import InvalidInput
from workbench.spec import SIZE_FIELD, RunSpec
from workbench.sweeps.planner import Plan
from workbench.sweeps.presets import preset
from workbench.sweeps.spec import SweepSpec

HEADLESS = "MOE_WORKBENCH_HEADLESS"


def is_headless() -> bool:
    """Whether the notebook is run to its end without a screen (`MOE_WORKBENCH_HEADLESS=1`)."""
    return os.environ.get(HEADLESS, "0") not in ("", "0")


def starting_sweep(spec: RunSpec | SweepSpec | str | None, device: DeviceInfo) -> SweepSpec:
    """The sweep that a panel starts with: of a run, the run alone; of a name (default `quick`), that preset."""
    if isinstance(spec, SweepSpec):
        return spec
    if isinstance(spec, RunSpec):
        return SweepSpec(base=spec, axes={SIZE_FIELD[spec.subject]: (spec.size,)})
    if spec is None or isinstance(spec, str):
        return preset(spec or "quick", device)
    raise InvalidInput(f"spec: must be a RunSpec, a SweepSpec or the name of a preset, not {type(spec).__name__}")


RECORDED = "the controls choose which are shown. To measure here, choose live as the source."


def plan_line(made: Plan) -> str:
    """The plan as HTML: its summary, then every reason why points cannot run, with their number."""
    lines = [f"<b>Plan:</b> {html.escape(made.summary())}"]
    why = list(made.why().items())
    for reason, count in why[:4]:
        lines.append(f'<span style="color:#8a4b00">{count} skipped: {html.escape(reason)}</span>')
    if len(why) > 4:
        lines.append(f'<span style="color:#8a4b00">and {len(why) - 4} more reasons</span>')
    return "<br>".join(lines)


def code_cell(sweep: SweepSpec) -> str:
    """Python that runs a sweep, one axis a line."""
    axes = "".join(f"        {name!r}: {values!r},\n" for name, values in sweep.axes.items())
    base = sweep.base.to_code()
    names = [name for name in ("LayerPoint", "Modes", "RunSpec", "StepPoint") if f"{name}(" in base]
    return (
        f"import workbench\nfrom workbench import {', '.join([*names, 'SweepSpec'])}\n\n"
        f"sweep = SweepSpec(\n    name={sweep.name!r},\n    axes={{\n{axes}    }},\n    base={base},\n)\n"
        "results = workbench.sweep(sweep)"
    )
