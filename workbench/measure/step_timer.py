"""Time whole steps as a server feels them: the host's clock, the device idle before and after each pass."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from workbench.measure.cachelevel import Evictor
from workbench.measure.timer import nothing
from workbench.runtime.step import StepRunner, next_tokens

MIN_REPEATS, MAX_REPEATS = 3, 20
METHOD = "host clock around each prefill and each decode step, the device idle before and after, argmax included"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """Series of whole steps.

    Attributes:
        prefill_us: of each repeat.
        decode_us: of each decode step of each repeat, in order.
        total_us: of each repeat: its prefill and all its decode steps.
        tokens: int64 `[output_len, B]` on the CPU, chosen in each repeat.
        compiled_in: repeats during which something was compiled.
        evictor_bytes: memory that the timer itself held.
        notes: sentences to show beside the result.
    """

    prefill_us: tuple[float, ...]
    decode_us: tuple[float, ...]
    total_us: tuple[float, ...]
    tokens: tuple[torch.Tensor, ...]
    compiled_in: tuple[int, ...] = ()
    evictor_bytes: int = 0
    notes: tuple[str, ...] = ()


def repeats(samples: int, decode_steps: int) -> int:
    """How often a step is run so that there are `samples` decode steps; never fewer than 3 or more than 20.

    Where there are no decode steps, `samples` prefills, within the same bounds.
    """
    wanted = -(-samples // decode_steps) if decode_steps else samples
    return min(MAX_REPEATS, max(MIN_REPEATS, wanted))


def time_step(
    runner: StepRunner,
    count: int,
    *,
    compiles: Callable[[], Any] = nothing,
    check: Callable[[], None] = nothing,
) -> StepTimes:
    """Run everything `count` times. Where something was compiled meanwhile, it is all done once more.

    The last-level cache is emptied before each prefill; decode steps find it as the pass before left it.
    """
    device = runner.network.device
    evict = Evictor(device)
    timed = _series(runner, count, evict, compiles, check)
    if timed.compiled_in:
        first = len(timed.compiled_in)
        timed = _series(runner, count, evict, compiles, check)
        still = len(timed.compiled_in)
        words = f"{still} of {count} repeats, also when repeated." if still else f"{first} of {count} repeats; all were"
        end = "" if still else " run again, without."
        timed = replace(timed, notes=(f"Something was compiled during {words}{end}",))
    if device.type == "cpu":
        timed = replace(timed, notes=(*timed.notes, "On a CPU: Python's own cost is in every figure."))
    return replace(timed, evictor_bytes=evict.nbytes)


def _series(
    runner: StepRunner, count: int, evict: Evictor, compiles: Callable[[], Any], check: Callable[[], None]
) -> StepTimes:
    device = runner.network.device
    prefills, decodes, totals, tokens, compiled = [], [], [], [], []
    for repeat in range(count):
        check()
        runner.prepare(None)
        evict()
        before = compiles()
        taken, chosen = _timed(lambda: next_tokens(runner.prefill()), device)
        prefills.append(taken)
        kept = [chosen]
        for step in range(runner.decode_steps):
            check()
            runner.prepare(step)
            taken, chosen = _timed(partial(runner.decode_tokens, step, chosen), device)
            decodes.append(taken)
            kept.append(chosen.clone())
        if compiles() != before:
            compiled.append(repeat)
        totals.append(prefills[-1] + sum(decodes[len(decodes) - runner.decode_steps :]))
        tokens.append(torch.stack(kept).cpu())
    return StepTimes(
        prefill_us=tuple(prefills),
        decode_us=tuple(decodes),
        total_us=tuple(totals),
        tokens=tuple(tokens),
        compiled_in=tuple(compiled),
    )


def _timed(call: Callable[[], torch.Tensor], device: torch.device) -> tuple[float, torch.Tensor]:
    """Microseconds, and what the call gave."""
    _wait(device)
    start = time.perf_counter_ns()
    out = call()
    _wait(device)
    return (time.perf_counter_ns() - start) / 1e3, out


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
