"""The three-part check of a layer: total, kernel, mode.

Shapes: T tokens, D model, K experts per token, R rows looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from workbench.check.difference import difference
from workbench.check.truth import CUT_LIMIT, Problem, Truth
from workbench.record import Correctness, Difference
from workbench.runtime.inputs import Inputs

Run = Callable[[], torch.Tensor]
"""Runs the layer on what the inputs hold; the result may be overwritten by the next run."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Variant:
    """The callable under test and what it is held against.

    Attributes:
        run: as it will be timed.
        eager: the same backend, eager.
        uncaptured: the same callable without the graph around it (compiled or eager); None where there is no graph.
        output: a graph's static output, filled with NaN before every replay; None where there is none.
        compiled: whether `torch.compile` is in it.
        repeatable: whether each run of the same inputs gives the same bits; False where atomics add up in any order.
    """

    run: Run
    eager: Run
    uncaptured: Run | None = None
    output: torch.Tensor | None = None
    compiled: bool = False
    repeatable: bool = True

    @property
    def plain(self) -> bool:
        """Whether it is the eager run itself."""
        return self.uncaptured is None and not self.compiled


def check_layer(
    variant: Variant, inputs: Inputs, problems: tuple[Problem, Problem], truth: Truth, check: Callable[[], None]
) -> tuple[Correctness, torch.Tensor | None]:
    """Run the first problem, then the second, and judge. `truth` belongs to the first.

    Returns:
        The verdict, and the first problem's output at `truth.rows`, float64 on the CPU; None where it is malformed.
    """
    first, second = problems
    rows = first.x.shape[0]
    outs: list[torch.Tensor] = []
    for problem in (first, second) if not variant.plain else (first,):
        check()
        inputs.load(problem.x, problem.routing)
        poison(inputs, problem.routing.topk_ids.shape[1])
        if variant.output is not None:
            variant.output.fill_(float("nan"))
        out = variant.run()
        fault = _form_fault(out, problem)
        if fault is None and not inputs.untouched(problem.x, problem.routing):
            fault = "the backend wrote to its inputs"
        if fault is not None:
            return _refused(fault, truth, rows), None
        outs.append(out.clone())
    at = truth.rows.to(outs[0].device)
    got = outs[0][at].double().cpu()
    total, kernel = difference(got, truth.total), difference(got, truth.kernel)
    why = _number_fault(outs, kernel, truth)
    mode, bitwise, mode_why = (
        (None, None, "") if variant.plain else _mode(variant, inputs, problems, outs, truth, check)
    )
    worst = [kernel.relative_l2] + ([mode.relative_l2] if mode is not None else [])
    ratio = None if any(w is None for w in worst) else max(w for w in worst if w is not None) / truth.budget
    reason = why or mode_why
    return (
        Correctness(
            total=total,
            kernel=kernel,
            mode=mode,
            bitwise=bitwise,
            kernel_budget=truth.budget,
            mode_budget=None if variant.plain else truth.budget,
            ratio=ratio,
            rows_checked=len(truth.rows),
            rows=rows,
            passed=not reason,
            reason=reason,
        ),
        got,
    )


def _form_fault(out: object, problem: Problem) -> str | None:
    if not isinstance(out, torch.Tensor):
        return f"the backend returned {type(out).__name__}, not a tensor"
    if out.shape != problem.x.shape:
        return f"the output is {list(out.shape)}, not {list(problem.x.shape)}"
    if out.dtype != problem.x.dtype:
        return f"the output is {out.dtype}, not {problem.x.dtype}"
    return None


def _number_fault(outs: list[torch.Tensor], kernel: Difference, truth: Truth) -> str:
    for out in outs:
        if bad := int((~torch.isfinite(out).all(dim=-1)).sum()):
            return f"{bad} of {out.shape[0]} rows hold NaN or infinity: not written, or out of the format's range"
    if truth.complete and (truth.cut_error is None or truth.cut_error > CUT_LIMIT):
        apart = "a value that is not finite" if truth.cut_error is None else f"{truth.cut_error:.2e}"
        return f"the cut experts do not add up to the whole MLP: they differ by {apart}"
    if kernel.relative_l2 is None or kernel.relative_l2 > truth.budget:
        error = "not finite" if kernel.relative_l2 is None else f"{kernel.relative_l2:.2e}"
        return f"the error against the dequantised weights is {error}, above the budget of {truth.budget:.2e}"
    return ""


def _mode(
    variant: Variant,
    inputs: Inputs,
    problems: tuple[Problem, Problem],
    outs: list[torch.Tensor],
    truth: Truth,
    check: Callable[[], None],
) -> tuple[Difference, bool | None, str]:
    """Both problems once more, eager at the same size: `(worst difference, bit for bit, why not)`."""
    worst: Difference | None = None
    bitwise = None if variant.uncaptured is None or not variant.repeatable else True
    for problem, out in zip(problems, outs, strict=True):
        check()
        inputs.load(problem.x, problem.routing)
        found = difference(out, variant.eager())
        if worst is None or found.relative_l2 is None or (worst.relative_l2 or 0.0) < found.relative_l2:
            worst = found
        if variant.uncaptured is None or bitwise is not True:
            continue
        again = variant.uncaptured()
        if not _same(out, again):
            # A callable that does not repeat itself cannot be repeated by a graph; its budget still holds.
            bitwise = None if not _same(again.clone(), variant.uncaptured()) else False
    assert worst is not None
    if bitwise is False:
        return worst, bitwise, "a graph replay differs from the run without the graph at the same size"
    if worst.relative_l2 is None or worst.relative_l2 > truth.budget:
        error = "not finite" if worst.relative_l2 is None else f"{worst.relative_l2:.2e}"
        return worst, bitwise, f"the difference to the eager run is {error}, above the budget of {truth.budget:.2e}"
    return worst, bitwise, ""


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def _refused(why: str, truth: Truth, rows: int) -> Correctness:
    nothing = Difference(relative_l2=None, max_over_rms=None, dissimilarity=None)
    return Correctness(
        total=nothing,
        kernel=nothing,
        kernel_budget=truth.budget,
        ratio=None,
        rows_checked=0,
        rows=rows,
        passed=False,
        reason=why,
    )


def distinct_outputs(run: Run, times: int) -> int:
    """How many different results, bit for bit, `times` runs on the same inputs give."""
    found: list[torch.Tensor] = []
    for _ in range(times):
        out = run()
        if not any(_same(out, other) for other in found):
            found.append(out.clone())
    return len(found)


def poison(inputs: Inputs, top_k: int) -> None:
    """Fill blocks of the sizes that a layer allocates with NaN and free them, so that unwritten memory shows.

    Blocks that would not fit easily are left out.
    """
    x = inputs.x
    free = torch.cuda.mem_get_info(x.device)[0] if x.device.type == "cuda" else 2**30
    numbers = x.shape[0] * x.shape[1]
    blocks = []
    for count in (numbers, numbers * top_k, 2 * numbers * top_k):
        for dtype in {x.dtype, torch.float32}:
            need = count * dtype.itemsize
            if need < free // 8:
                free -= need
                blocks.append(torch.full((count,), float("nan"), dtype=dtype, device=x.device))
    del blocks
