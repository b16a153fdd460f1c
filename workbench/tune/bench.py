"""Whole layers on a GPU: checked against float64, then timed in a CUDA graph with a cold cache.

Shapes: T tokens, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import torch
from moe_kernels import ExpertWeights, Routing, fused_experts
from moe_kernels.tuning.rows import Row

from workbench.check.difference import difference
from workbench.check.layer import poison
from workbench.check.truth import Problem, Truth, find_truth
from workbench.measure.cachelevel import Evictor
from workbench.measure.timer import SpinClock
from workbench.models.source import LayerSource
from workbench.modes import RoutingKind
from workbench.runtime.graph import CudaRecorder
from workbench.runtime.inputs import Inputs
from workbench.tune.search import DeviceLost, Wrong

# A replay's launch fits into it, so that the device finds it queued.
SPIN_S = 60e-6
ROUTINGS, FEW_ROUTINGS, MANY_TOKENS = 4, 2, 1024


class LayerBench:
    """A layer of one token count, see `search.Bench`.

    Its inputs rotate through a few routings of independent uniform choices, as a router's are in the mean.
    """

    def __init__(
        self,
        source: LayerSource,
        weights: ExpertWeights,
        num_tokens: int,
        verdict: Callable[[Row], str],
        expect: Callable[[list[Row]], None] = lambda configs: None,
    ) -> None:
        """Make the inputs and what they should give.

        Args:
            source: where hidden states and routings come from.
            weights: of all experts, in the format that is tuned.
            num_tokens: T.
            verdict: why a configuration cannot be compiled; empty where it can.
            expect: told which configurations come next.
        """
        self._weights, self._verdict, self.expect = weights, verdict, expect
        x_float32 = source.hidden_states(num_tokens)
        count = ROUTINGS if num_tokens <= MANY_TOKENS else FEW_ROUTINGS
        self.routings = source.routings(RoutingKind.UNIFORM, num_tokens, count)
        problem = Problem(x=x_float32.to(weights.dtype), x_float32=x_float32, routing=self.routings[0])
        self.truth: Truth = find_truth(source, weights, problem, source.seed)
        self.inputs = Inputs(problem.x, problem.routing)
        self.device = problem.x.device
        self.evict, self.clock = Evictor(self.device), SpinClock(self.device)

    def run(self, config: Row) -> torch.Tensor:
        """The layer on what the inputs hold."""
        routing = Routing(self.inputs.topk_weights, self.inputs.topk_ids)
        return fused_experts(self.inputs.x, self._weights, routing, impl="triton", config=config)

    def open(self, config: Row) -> _Captured:
        """See `search.Bench`: eager with memory full of NaN, then captured and replayed into an output full of NaN."""
        if why := self._verdict(config):
            raise Wrong(why)
        try:
            self.inputs.load(None, self.routings[0])
            poison(self.inputs, self.inputs.topk_ids.shape[1])
            self._judge(self.run(config), "")
            captured = _Captured(self, config)
            try:
                captured.output.fill_(float("nan"))
                captured.recorder.replay()
                self._judge(captured.output, " in a CUDA graph")
            except BaseException:
                captured.close()
                raise
        except Wrong:
            raise
        except Exception as error:
            why = _first_line(error)
            try:
                torch.cuda.synchronize(self.device)
            except Exception:
                raise DeviceLost(why) from None
            raise Wrong(f"cannot run: {why}") from None
        return captured

    def _judge(self, out: torch.Tensor, where: str) -> None:
        found = difference(out[self.truth.rows.to(out.device)].double().cpu(), self.truth.kernel).relative_l2
        if found is None or not bool(torch.isfinite(out).all()):
            raise Wrong(f"wrong{where}: NaN or infinity in the output")
        if found > self.truth.budget:
            raise Wrong(f"wrong{where}: error {found:.2e} above the budget of {self.truth.budget:.2e}")


class _Captured:
    """A captured configuration, see `search.Entry`."""

    def __init__(self, bench: LayerBench, config: Row) -> None:
        self._bench, self._turn = bench, 0
        self.recorder = CudaRecorder(bench.device)
        try:
            self.recorder.warm(lambda: bench.run(config), 1)
            self.output = self.recorder.capture(lambda: bench.run(config))
        except BaseException:
            self.recorder.release()
            raise

    def sample(self) -> float:
        """See `search.Entry`."""
        bench = self._bench
        bench.inputs.load(None, bench.routings[self._turn % len(bench.routings)])
        self._turn += 1
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        try:
            bench.evict()
            bench.clock.spin(SPIN_S)
            start.record()
            self.recorder.replay()
            end.record()
            end.synchronize()
        except Exception as error:  # it ran right before: the device is in no known state
            raise DeviceLost(_first_line(error)) from None
        return float(start.elapsed_time(end) * 1e3)

    def close(self) -> None:
        """See `search.Entry`."""
        self.output = torch.empty(0)
        with suppress(Exception):  # where the device is lost, nothing can be given back
            self.recorder.release()


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or ['no message'])[0][:200]}"
