"""The commands. Each prints for people on standard output and progress on standard error."""

from __future__ import annotations

import shlex
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from workbench.cli.environment import kept_read_rate
from workbench.cli.options import word
from workbench.cli.screen import Progressing, print_results, print_table, say
from workbench.cli.step import capture_table, profile_tables, step_rows
from workbench.devices import DeviceInfo, find_device
from workbench.errors import InvalidInput
from workbench.modes import (
    ATTENTION_BACKENDS,
    BACKENDS,
    GROUP_SIZES,
    ActivationScale,
    Compile,
    CompileScope,
    Fusion,
    Graph,
    Mla,
    Quant,
    Reduction,
    RoutingKind,
    Subject,
)
from workbench.record import Status
from workbench.report.compare import parse_baseline
from workbench.report.one_batch import one_batch_lines
from workbench.report.table import FROM_IDLE
from workbench.spec import RunSpec
from workbench.support import find_reasons
from workbench.sweeps.planner import plan
from workbench.sweeps.presets import PRESETS, preset
from workbench.sweeps.results import WRITERS
from workbench.sweeps.spec import SweepSpec, parse_axes
from workbench.sweeps.store import SWEEP
from workbench.units import microseconds

Texts = Optional[list[str]]  # noqa: UP045 - typer reads these at run time
Text = Optional[str]  # noqa: UP045
File = Optional[Path]  # noqa: UP045
TOGGLES: dict[str, tuple[Any, ...]] = {
    "subject": tuple(Subject),
    "compile": tuple(Compile),
    "compile_scope": tuple(CompileScope),
    "graph": tuple(Graph),
    "fusion": tuple(Fusion),
    "quant": tuple(Quant),
    "group_size": GROUP_SIZES,
    "zero_points": (False, True),
    "activation_scale": tuple(ActivationScale),
    "moe_backend": BACKENDS,
    "split_k": (None, 1, 2, 4, 8),
    "reduction": tuple(Reduction),
    "routing": tuple(RoutingKind),
    "attention_backend": ATTENTION_BACKENDS,
    "mla_prefill": tuple(Mla),
    "mla_decode": tuple(Mla),
}


def modes(given: dict[str, Any]) -> None:
    """List every value of every mode axis for a base run: available, or unavailable and why."""
    base = RunSpec.from_flat(given)
    device = find_device(base.device)
    rows = []
    flat = base.flat()
    find_reasons(base, device)  # a base run that cannot be built is refused, rather than every value
    for axis, values in TOGGLES.items():
        if axis not in flat:
            continue
        own = flat[axis]
        for value in (*values, *(() if own in values else (own,))):
            why = _why_not(base, axis, value, device)
            mark = "*" if own == value else ""
            rows.append((axis, word(value) + mark, "unavailable" if why else "available", why))
    print_table(("axis", "value", "here", "why not"), rows)
    say(f"On {device.name}; * is the base run's own value: {base.command}")


def _why_not(base: RunSpec, axis: str, value: Any, device: DeviceInfo) -> str:
    """Why the base run cannot have this value; empty where it can."""
    try:
        reasons = find_reasons(base.replace(**{axis: value}), device)
    except InvalidInput as error:  # as another subject, the model cannot be built
        return f"{error}."
    return " ".join(dict.fromkeys(reason.sentence for reason in reasons))


def run_point(given: dict[str, Any]) -> None:
    """Run one point, check it and time it. Exit status 0 only where the result is right and measured.

    Of a step, the lines of SGLang's bench_one_batch come first, then its correctness and where its time goes.
    """
    import workbench

    spec = RunSpec.from_flat(given)
    record = workbench.run(spec, progress=lambda state, text: say(f"{state}: {text}", error=True))
    if spec.subject is Subject.STEP and record.status.measured:
        for line in one_batch_lines(record):
            say(line)
    rows = [("status", f"{record.status}" + (f": {record.reason}" if record.reason else ""))]
    for name, title in (("latency", "latency"), ("wall", FROM_IDLE)):
        metric = record.metrics.get(name)
        if metric is not None:
            band = f"p10 to p90: {microseconds(metric.p10)} to {microseconds(metric.p90)}, {metric.n} samples"
            rows.append((title, f"{microseconds(metric.median)} ({band})"))
    if record.work is not None and record.work.floor_share is not None:
        rows.append(("roof", f"{record.work.floor_share:.0%} of this device's measured roof ({record.work.bound})"))
    if record.correctness is not None:
        check = record.correctness
        ratio = "not finite" if check.ratio is None else f"{check.ratio:.2g} of its budget"
        total = "not finite" if check.total.relative_l2 is None else f"{check.total.relative_l2:.1e}"
        rows.append(("error", f"{ratio}; {total} against the unquantised model"))
    rows += step_rows(record)
    for name, seconds in record.startup.model_dump().items():
        if isinstance(seconds, float):
            rows.append((name.removesuffix("_s"), f"{seconds:.2f} s"))
    for name, size in record.memory.model_dump().items():
        if size is not None:
            rows.append((name.removesuffix("_bytes").replace("_", " "), f"{size / 2**20:,.1f} MiB"))
    rows += [("resolved", f"{name} = {value}") for name, value in record.resolved.items()]
    rows += [("note", note) for note in record.notes]
    print_table(("", ""), [*rows, ("again", spec.command)])
    capture_table(record)
    profile_tables(record.profile, record.environment.roofs.get("read"))
    if record.status is not Status.OK:
        raise typer.Exit(1)


def profile(
    given: dict[str, Any],
    out: Annotated[Path, typer.Option("--out", help="Trace to write; it opens in Perfetto (ui.perfetto.dev).")] = Path(
        "trace.json"
    ),
) -> None:
    """Say where the time of a step goes, by part of the model and kind of kernel, and write the whole trace."""
    spec = RunSpec.from_flat({"subject": Subject.STEP, **given})
    if spec.subject is not Subject.STEP:
        raise InvalidInput(f"subject: must be step for a profile, not {spec.subject}")
    device = find_device(spec.device)
    if reasons := find_reasons(spec, device):
        raise InvalidInput(f"{reasons[0].field}: {reasons[0].sentence.rstrip('.')}")
    from workbench.engines import run_profile

    say(f"starting: loading {spec.model} as {spec.modes.quant}", error=True)
    profile_tables(run_profile(spec, out), kept_read_rate(device))
    say(f"{out}  {out.stat().st_size:,} bytes; open it in Perfetto, https://ui.perfetto.dev")


def run_sweep(
    given: dict[str, Any],
    preset_name: Annotated[Text, typer.Option("--preset", help=f"A named sweep: {', '.join(PRESETS)}.")] = None,
    file: Annotated[File, typer.Option("--file", help="A sweep description (sweep.json of another sweep).")] = None,
    axis: Annotated[
        Texts, typer.Option("--axis", help="NAME=VALUE,VALUE,...; may be repeated. Replaces the preset's axis.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the points and the time, and stop.")] = False,
    out: Annotated[Path, typer.Option("--out", help="Folder that results folders are made in.")] = Path("results"),
    name: Annotated[
        Text, typer.Option("--name", help="Name of the results folder; else the sweep's and the time.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue NAME, or the newest results of this sweep; finished points stay.")
    ] = False,
) -> None:
    """Run every combination of axes, keeping each result at once; Ctrl-C keeps what there is."""
    import workbench

    described = preset_name is not None or file is not None or axis or given
    if resume and name is not None and not described:
        if not (out / name / SWEEP).is_file():
            raise InvalidInput(
                f"name: {out / name} holds no sweep to resume; describe it with --preset, --file or --axis"
            )
        spec = SweepSpec.from_file(out / name / SWEEP)
    else:
        spec = _sweep(given, preset_name, file, parse_axes(axis or []), name)
    planned = plan(spec, find_device(spec.base.device))
    if dry_run:
        print_table(*planned.to_table())
        say(planned.summary())
        return
    folder = _folder(spec, out, name, resume)
    say(planned.summary(), error=True)
    for reason, count in planned.why().items():
        say(f"  {count} cannot run: {reason}", error=True)
    with Progressing() as progress:
        results = workbench.sweep(spec, out=folder, resume=resume, progress=progress)
    print_results(results)
    if results.folder is not None:
        for path in sorted(results.folder.iterdir()):
            say(f"{path}  {path.stat().st_size:,} bytes")
    if results.interrupted:
        again = ""
        if results.folder is not None:  # not `out`, where a full disk moved the records elsewhere
            place = ["--out", str(results.folder.parent), "--name", results.folder.name]
            again = f"; to finish: {shlex.join(['workbench', 'sweep', '--resume', *place])}"
        say(f"Interrupted{again}", error=True)
        raise typer.Exit(130)
    if results.records and not any(record.status.measured for record in results.records):
        raise typer.Exit(1)


def _sweep(
    given: dict[str, Any], preset_name: str | None, file: Path | None, axes: dict[str, Any], name: str | None
) -> SweepSpec:
    if preset_name is not None and file is not None:
        raise InvalidInput("file: cannot be given together with preset")
    if preset_name is not None:
        start = preset(preset_name, find_device(str(given.get("device", "auto"))))
    else:
        start = SweepSpec.from_file(file) if file is not None else SweepSpec()
    merged = {**start.axes, **axes}
    for field in given:
        if field in axes:
            raise InvalidInput(f"{field}: is an axis of this sweep and cannot be given as an option, too")
        merged.pop(field, None)  # a single value, given as an option, replaces the preset's axis
    base = start.base.replace(**given)
    return SweepSpec(name=name or start.name, axes=merged, base=base)


def _folder(spec: SweepSpec, out: Path, name: str | None, resume: bool) -> Path:
    if name is not None:
        return out / name
    if not resume:
        return out / f"{spec.name}-{datetime.now():%Y%m%d-%H%M%S}"
    found = []
    for path in sorted(out.glob(f"*/{SWEEP}"), key=lambda path: path.stat().st_mtime, reverse=True):
        try:
            earlier = SweepSpec.from_file(path)
        except InvalidInput:  # of another version: not this sweep
            continue
        if (earlier.axes, earlier.base) == (spec.axes, spec.base):
            found.append(path.parent)
    if not found:
        raise InvalidInput(f"resume: {out} holds no results of this sweep; give --name or leave --resume away")
    return found[0]


def show(
    path: Annotated[str, typer.Argument(help="A results folder, a .jsonl or .parquet file, or a glob.")],
    baseline: Annotated[
        Texts, typer.Option("--baseline", help="AXIS=VALUE that speed-ups are against; may be repeated.")
    ] = None,
) -> None:
    """Print stored results: the table, what was not measured and why."""
    import workbench

    print_results(workbench.load(path), parse_baseline(baseline) if baseline else None)


def export(
    path: Annotated[str, typer.Argument(help="A results folder, a .jsonl or .parquet file, or a glob.")],
    kind: Annotated[str, typer.Option("--format", help=f"{', '.join(WRITERS)}.")],
    out: Annotated[Path, typer.Option("--out", help="File to write.")],
    baseline: Annotated[Texts, typer.Option("--baseline", help="AXIS=VALUE for md and html; may be repeated.")] = None,
    samples: Annotated[
        bool, typer.Option("--samples/--no-samples", help="Whether parquet keeps every single sample.")
    ] = True,
) -> None:
    """Write stored results in another format."""
    import workbench

    options: dict[str, Any] = {"baseline": parse_baseline(baseline)} if baseline else {}
    if baseline and kind not in ("md", "html"):
        raise InvalidInput("baseline: is for the formats md and html")
    if not samples:
        if kind != "parquet":
            raise InvalidInput("samples: can be left out of the format parquet only")
        options["samples"] = False
    written = workbench.load(path).write(out, kind, **options)
    say(f"{written}  {written.stat().st_size:,} bytes")


def env() -> None:
    """Say which devices and versions there are, and what is missing and why."""
    from workbench.cli.environment import rows

    print_table(("what", "here"), rows())


def lab(
    notebook: Annotated[
        File, typer.Option("--notebook", help="A notebook to open instead of the workbench's own.")
    ] = None,
    ip: Annotated[str, typer.Option("--ip", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[Optional[int], typer.Option("--port", help="Port; else the first free one from 8888.")] = None,  # noqa: UP045
    headless: Annotated[bool, typer.Option("--headless", help="Run the notebook to its end without a screen.")] = False,
) -> None:
    """Open JupyterLab on the workbench's notebook, or run that notebook without a screen."""
    if headless:
        if find_spec("nbclient") is None or find_spec("ipywidgets") is None:
            raise InvalidInput("headless: nbclient and ipywidgets are not installed; pip install 'moe-workbench[lab]'")
        from workbench.lab import notebook_path
        from workbench.widgets.headless import main as run_notebook

        raise typer.Exit(run_notebook([str(notebook_path(notebook))]))
    from workbench.lab import start_lab

    raise typer.Exit(start_lab(notebook, ip=ip, port=port))
