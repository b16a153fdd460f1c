"""`workbench tune`: search tile configurations on this GPU, or check files of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from workbench.cli.screen import print_table, say
from workbench.devices import DeviceInfo, find_device
from workbench.errors import InvalidInput, choices
from workbench.modes import GROUP_SIZES, Quant
from workbench.spec import RunSpec, parse_value
from workbench.sweeps.planner import duration
from workbench.tune.check import check_path
from workbench.tune.run import (
    HOPPER_NAME,
    HOPPER_SHARED,
    TuneReport,
    TuneRequest,
    estimate_s,
    gpu_workshop,
    parse_tokens,
    plan_cells,
)
from workbench.tune.run import tune as run_tune

Text = Optional[str]  # noqa: UP045 - typer reads these at run time
File = Optional[Path]  # noqa: UP045
DRY_WORKERS = 14


def tune(
    model: Annotated[Text, typer.Option("--model", help="A preset, a config.json, a checkpoint or an id.")] = None,
    quant: Annotated[Text, typer.Option("--quant", help=f"Format: {choices(Quant)}.")] = None,
    tokens: Annotated[
        str, typer.Option("--tokens", help="Token counts, each a row of the files.")
    ] = "1,8,32,128,1024,4096",
    experts: Annotated[Text, typer.Option("--experts", help="Experts that a dense model's MLP is cut into.")] = None,
    top_k: Annotated[Text, typer.Option("--top-k", help="Experts per token; else the model's own.")] = None,
    tp_size: Annotated[Text, typer.Option("--tp-size", help="Tensor-parallel size; one rank's shape is tuned.")] = None,
    group_size: Annotated[
        Text, typer.Option("--group-size", help=f"Columns of one scale of int4: {choices(GROUP_SIZES)}.")
    ] = None,
    zero_points: Annotated[bool, typer.Option("--zero-points", help="int4 with zero points.")] = False,
    device: Annotated[Text, typer.Option("--device", help="auto, cuda or cuda:N.")] = None,
    out: Annotated[
        Path, typer.Option("--out", help="Folder; files go to triton_x_y_z in it, and faster rows that it has stay.")
    ] = Path("tuned"),
    seconds: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option("--seconds", help="Time to stay within; what is found is written after every token count."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Try only rows tuned for neighbouring formats, shapes and token counts.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List candidates and the time, and stop.")] = False,
    check: Annotated[
        File, typer.Option("--check", help="List the rows of a file or folder and which are legal.")
    ] = None,
) -> None:
    """Find the fastest tile configurations of the triton backend for a model, and keep them in files."""
    if check is not None:
        _check(check)
        return
    words = {"model": model, "quant": quant, "experts": experts, "top_k": top_k, "tp_size": tp_size}
    words |= {"group_size": group_size, "device": device}
    given = {name: parse_value(name, word) for name, word in words.items() if word is not None}
    spec = RunSpec.from_flat({**given, "zero_points": zero_points, "moe_backend": "triton"})
    if seconds is not None and not seconds > 0:
        raise InvalidInput(f"seconds: must be above 0, not {seconds:g}")
    request = TuneRequest(spec=spec, tokens=parse_tokens(tokens), out=out, seconds=seconds, quick=quick)
    found = find_device(spec.device)
    if dry_run:
        _dry_run(request, found)
        return
    report = run_tune(request, found, _shared_bytes(found), gpu_workshop, progress=lambda text: say(text, error=True))
    _print(report)


def _shared_bytes(device: DeviceInfo) -> int:
    """Shared memory that one block may take; a Hopper's where there is no GPU, to plan with."""
    if device.type != "cuda":
        return HOPPER_SHARED
    from moe_kernels.experts.config import target_of
    from torch import device as torch_device

    return target_of(torch_device(device.torch_device)).shared_bytes


def _dry_run(request: TuneRequest, device: DeviceInfo) -> None:
    cells = plan_cells(request, _shared_bytes(device), device.name if device.type == "cuda" else HOPPER_NAME)
    rows = []
    for cell in cells:
        for which, grid in (("up", cell.up), ("down", cell.down)):
            kinds: dict[str, int] = {}
            for row in grid.kept:
                kinds[row["LAYOUT"]] = kinds.get(row["LAYOUT"], 0) + 1
            what = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
            skipped = "; ".join(f"{count} {why}" for why, count in grid.skipped.items())
            rows.append((str(cell.problem.num_tokens), which, str(len(grid.kept)), what, skipped))
    print_table(("tokens", "GEMM", "candidates", "of them", "left out"), rows, numbers=(0, 2))
    seconds = estimate_s(cells, DRY_WORKERS)
    limit = f"; --seconds ends it after {duration(request.seconds)}" if request.seconds is not None else ""
    say(f"About {duration(seconds)} with nothing compiled yet and {DRY_WORKERS} processes that compile{limit}.")


def _check(path: Path) -> None:
    states = check_path(path)
    rows = [
        (str(state.path), state.row, "not legal" if state.fault else "legal", state.fault or state.remark)
        for state in states
    ]
    print_table(("file", "row", "state", "why"), rows)
    bad = sum(bool(state.fault) for state in states)
    say(f"{len(states) - bad} legal, {bad} not.")
    if bad:
        raise typer.Exit(1)


def _print(report: TuneReport) -> None:
    for line in report.lines:
        say(line)
    for path in report.written:
        say(f"{path}  {path.stat().st_size:,} bytes")
    if report.written:
        say("To use them: MOE_WORKBENCH_CONFIG_DIR=" + str(report.written[0].parent.parent))
    if not report.complete:
        raise typer.Exit(1)
