"""What `workbench run` and `workbench profile` say of a step: how right it is, its graphs, where its time goes."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.cli.screen import print_table, say
from workbench.plots.profile import PHASES, profile_parts, profile_table
from workbench.record import ProfileRow, Record


def step_rows(record: Record) -> list[tuple[str, str]]:
    """Rows on a step's check and perplexity; none for a layer."""
    rows = []
    if record.correctness is not None and (check := record.correctness.step) is not None:
        logits = _error(check.logits_relative_l2)
        kl = "not finite" if check.kl is None else f"{check.kl:.1e} nats"
        rows.append(("logits", f"{logits} against float32; divergence {kl}"))
        rows.append(("top token", f"the same at {check.top1_agreement:.1%} of {check.positions} positions"))
        worst = f"worst layer {check.worst_layer} with {_error(check.worst_error)}, budget {check.budget:.1e}"
        bad = "all within budget" if check.first_bad_layer is None else f"first bad layer {check.first_bad_layer}"
        rows.append(("layers", f"{check.layers_checked} checked, {bad}; {worst}"))
        if check.routing_flips:
            rows.append(("routing", f"{check.routing_flips} tokens chose other experts than in float32"))
    perplexity = record.median("perplexity")
    if perplexity is not None:
        rows.append(("perplexity", f"{perplexity:.4g}"))
    return rows


def capture_table(record: Record) -> None:
    """Print what the graph of each batch size cost; nothing where none was captured."""
    if not record.captures:
        return
    mode = record.resolved.get("capture_error_mode")
    say("")
    say("Graphs, in the order of capture" + (f"; capture error mode {mode}" if mode else ""))
    rows = [
        (f"{one.size:,}", f"{one.capture_s:.2f}", f"{one.held_bytes / 2**20:,.1f}", _count(one.kernels))
        for one in record.captures
    ]
    if len(rows) > 1:
        seconds, held = sum(one.capture_s for one in record.captures), sum(one.held_bytes for one in record.captures)
        rows.append(("all", f"{seconds:.2f}", f"{held / 2**20:,.1f}", ""))
    print_table(("batch", "seconds", "MiB", "kernels"), rows, numbers=(0, 1, 2, 3))


def profile_tables(profile: Sequence[ProfileRow], read_rate: float | None) -> None:
    """Print the largest rows of each phase of a profile; nothing where there is none."""
    for phase in PHASES:
        header, rows = profile_table(profile, phase, read_rate)
        if rows:
            whole = sum(part.time_us for part in profile_parts(profile, phase))
            say("")
            say(f"Where the time of {'the prefill' if phase == 'prefill' else 'one decode step'} goes: {whole:,.1f} us")
            print_table(header, rows, numbers=(2, 3, 4, 5))


def _count(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def _error(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.1e}"
