"""Does a step's mode change what it gives: compiled and replayed decode steps against eager ones.

Shapes: B sequences, C of them checked, V tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from workbench.check.budget import FACTOR, rounding_band
from workbench.check.difference import difference
from workbench.check.step_trace import StepTrace
from workbench.record import Correctness, Difference
from workbench.runtime.step_decode import BufferedStepRunner


def check_mode(
    runner: BufferedStepRunner, trace: StepTrace, eager: Correctness, check: Callable[[], None]
) -> Correctness:
    """Add the third part to what the eager run of the same step was found to be.

    The same tokens go through the runner. A replay must equal the run without the graph at the same, padded size bit
    for bit; and what eager gave at the size itself within twice what eager is off from float32, and a few roundings:
    both are that close to the truth.

    Args:
        runner: whose decode steps are compiled, replayed, or both.
        trace: of the same step, eager.
        eager: the verdict on it.
        check: called between steps.
    """
    decodes = [one for one in trace.passes if one.step is not None]
    network = runner.network
    if not decodes or not eager.passed:
        return eager
    runner.cache.reset()
    runner.prepare(None)
    runner.prefill()
    worst: Difference | None = None
    bitwise: bool | None = None if runner.graphs is None else True
    for number, one in enumerate(decodes):
        check()
        ids = trace.tokens[number].to(network.device)
        runner.prepare(number)
        logits_BV = runner.decode(number, ids)
        found = difference(logits_BV[trace.sequences], one.logits_CV)
        if worst is None or found.relative_l2 is None or found.relative_l2 > (worst.relative_l2 or 0.0):
            worst = found
        if bitwise:
            bitwise = _repeats(runner, logits_BV)
    assert worst is not None
    budget = FACTOR * ((eager.total.relative_l2 or 0.0) + rounding_band(network.dtype, network.config.hidden_size))
    reason = ""
    if bitwise is False:
        reason = "a replayed decode step differs from the run without the graph at the same size"
    elif worst.relative_l2 is None or worst.relative_l2 > budget:
        error = "not finite" if worst.relative_l2 is None else f"{worst.relative_l2:.2e}"
        reason = f"decode steps are off from eager ones by {error}, above the budget of {budget:.2e}"
    ratio = None if worst.relative_l2 is None or eager.ratio is None else max(eager.ratio, worst.relative_l2 / budget)
    return eager.model_copy(
        update={
            "mode": worst,
            "bitwise": bitwise,
            "mode_budget": budget,
            "ratio": ratio,
            "passed": not reason,
            "reason": reason,
        }
    )


def _repeats(runner: BufferedStepRunner, replayed_BV: torch.Tensor) -> bool | None:
    """Whether the step without its graph gives the same bits; None where it does not repeat itself either."""
    first, second = (runner.uncaptured() for _ in range(2))
    if _same(first[: runner.batch_size], replayed_BV):
        return True
    return False if _same(first, second) else None


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
