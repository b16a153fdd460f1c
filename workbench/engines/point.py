"""One point from its spec to its record: load, compile, capture, check, time.

Shapes: T tokens, D model, E experts, K experts per token.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from moe_kernels import ExpertWeights, Routing, resolve_config, resolve_impl

from workbench.check.difference import difference
from workbench.check.layer import Variant, check_layer, distinct_outputs
from workbench.check.truth import Problem, Truth
from workbench.devices import DeviceInfo
from workbench.engines.backends import prepare_backend
from workbench.engines.draft import Draft
from workbench.engines.faults import Fault, Unsupported, describe
from workbench.engines.rates import peak_rates
from workbench.engines.resolved import arithmetic, layer_work, routing_flips, split_in_force
from workbench.engines.session import PointSession, peak_bytes, release_memory, reset_peak, used_bytes
from workbench.engines.step_point import StepRun
from workbench.measure.floor import implausible_reason, weigh
from workbench.measure.timer import Timer, nothing
from workbench.models.layer import LayerSource
from workbench.models.source import CALIBRATION_ROWS
from workbench.modes import ActivationScale, Cache, Compile, Graph, Reduction, RoutingKind, Subject
from workbench.record import Metric, Record, Status
from workbench.runtime.compile import CompileCount, cold_caches, compile_count, strict_recompiles
from workbench.runtime.graph import CAPTURE_MODE, CudaRecorder, FullGraph
from workbench.runtime.inputs import Inputs, LayerFunction, layer_function
from workbench.spec import RunSpec
from workbench.support import find_reasons

Progress = Callable[[str, str], None]
MAX_ROUTINGS = 32
ROUTING_BYTES = 2**28
# One call compiles, one settles; inductor's own graphs need one to warm up, one to record and one to replay.
WARM_CALLS, WARM_CALLS_OF_INDUCTORS_GRAPHS = 2, 3
REPEATS = 8  # runs that show whether a split K loop gives the same bits again


def run_point(
    spec: RunSpec,
    device: DeviceInfo,
    session: PointSession,
    progress: Progress,
    check: Callable[[], None] = nothing,
) -> Record:
    """Run `spec` on `device` and give its record, whatever happens.

    Args:
        spec: what to run.
        device: where, as this process names it.
        session: what earlier points left; `session.poisoned` is set where this process must end.
        progress: told a state and a sentence at every phase.
        check: called between phases and samples; raises `Cancelled` to end the point.
    """
    draft = Draft()
    fault: Fault | None = None
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(strict_recompiles())
            if spec.cache is Cache.COLD:
                session.drop_compiled()
                stack.callback(session.drop_compiled)
                stack.enter_context(cold_caches())
            if spec.subject is Subject.STEP:
                StepRun(spec, device, session, progress, check, draft, stack).work()
            else:
                _Run(spec, device, session, progress, check, draft, stack).work()
    except Exception as error:
        fault = describe(error, device.type)
    if fault is not None:
        # Out of the handler, so that nothing holds the traceback while memory is given back.
        draft.status, draft.reason, draft.detail = fault.status, fault.reason, fault.detail
        draft.metrics = {}
        session.poisoned = fault.poisoned
        if not fault.poisoned:
            if fault.status is not Status.UNSUPPORTED:
                session.drop_compiled()
            release_memory(session.torch_device)
    record = draft.record(spec, session)
    progress("done" if record.status.measured else str(_state(record.status)), record.reason or "measured and right")
    return record


def _state(status: Status) -> str:
    return status.value if status in (Status.CANCELLED, Status.TIMED_OUT) else "failed"


@dataclass(slots=True)
class _Run:
    spec: RunSpec
    device: DeviceInfo
    session: PointSession
    progress: Progress
    check: Callable[[], None]
    draft: Draft
    stack: ExitStack

    def work(self) -> None:
        spec, draft, session = self.spec, self.draft, self.session
        if reasons := find_reasons(spec, self.device):
            raise Unsupported(" ".join(dict.fromkeys(reason.sentence for reason in reasons)))
        prepare_backend(spec.modes.moe_backend)
        source, weights = self._load()
        problems, routings = self._problems(source, weights.dtype)
        self._resolve(weights, problems[0])
        inputs = Inputs(problems[0].x, problems[0].routing)
        modes = spec.modes
        base = layer_function(weights, modes.moe_backend, split_k=modes.split_k, reduction=modes.reduction)
        reset_peak(session.torch_device)
        function = self._warm(inputs, base)
        graph = self._capture(inputs, function)
        peak = peak_bytes(session.torch_device)
        self._check(source, weights, inputs, problems, base, function, graph)
        if draft.status is not Status.OK:
            return
        inputs.load(problems[0].x, problems[0].routing)
        self._time(source, inputs, routings, function, graph, peak)

    def _load(self) -> tuple[LayerSource, ExpertWeights]:
        spec, draft = self.spec, self.draft
        self.progress("starting", f"loading {spec.model} as {spec.modes.quant}")
        start = time.perf_counter()
        source = self.session.source(spec)
        weights = self.session.weights(spec, source)
        self._synchronize()
        draft.startup["load_s"] = time.perf_counter() - start
        draft.memory |= {"weight_bytes": weights.nbytes, "at_rest_bytes": used_bytes(self.session.torch_device)}
        draft.resolved |= {
            "device": self.device.torch_device,
            "shape": source.shape.source,
            "num_experts": source.shape.num_experts,
            "top_k": source.shape.top_k,
            "hidden_size": source.shape.hidden_size,
            "intermediate_size": source.shape.intermediate_size,
            **source.resolved,
            **arithmetic(spec, self.device),
        }
        draft.notes += source.notes
        if spec.modes.activation_scale is ActivationScale.STATIC:
            draft.notes.append(
                f"Activation scales are fixed by the first {CALIBRATION_ROWS} rows of inputs, each run through every "
                "expert."
            )
        self.check()
        return source, weights

    def _problems(self, source: LayerSource, dtype: torch.dtype) -> tuple[tuple[Problem, Problem], list[Routing]]:
        """Two problems of the same size for the check, and the routings that samples go through in turn."""
        spec, tokens = self.spec, self.spec.num_tokens
        bytes_each = 8 * tokens * source.shape.top_k
        count = max(2, min(spec.samples, MAX_ROUTINGS, ROUTING_BYTES // bytes_each))
        routings = source.routings(spec.modes.routing, tokens, count, spec.modes.zipf_exponent)
        hidden = source.hidden_states(tokens + 1)
        first, second = (
            Problem(x=part.to(dtype), x_float32=part, routing=routing)
            for part, routing in ((hidden[:tokens], routings[0]), (hidden[1:], routings[1]))
        )
        self.draft.resolved["routings"] = len(routings)
        return (first, second), routings

    def _resolve(self, weights: ExpertWeights, problem: Problem) -> None:
        spec, resolved = self.spec, self.draft.resolved
        try:
            resolved["moe_backend"] = resolve_impl(problem.x, weights, problem.routing, spec.modes.moe_backend)
        except NotImplementedError as error:
            raise Unsupported(str(error)) from None
        if resolved["moe_backend"] in ("triton", "triton_fp4"):
            config, source = resolve_config(
                num_tokens=problem.x.shape[0],
                num_experts=weights.num_experts,
                hidden_size=weights.hidden_size,
                intermediate_size=weights.intermediate_size,
                top_k=problem.routing.topk_ids.shape[1],
                dtype=problem.x.dtype,
                quant=weights.quant.value,
                group_size=weights.group_size,
                device=problem.x.device,
                impl=resolved["moe_backend"],
            )
            resolved |= {"kernel_config": json.dumps(config), "kernel_config_source": source}
        if resolved["moe_backend"] == "triton":
            resolved["split_k"] = split_in_force(spec.modes.split_k, config)
            resolved["reduction"] = spec.modes.reduction.value

    def _warm(self, inputs: Inputs, base: LayerFunction) -> LayerFunction:
        """Compile and warm with the very shape; seconds and counts of what was compiled go to the draft."""
        spec, draft = self.spec, self.draft
        asked = spec.modes.compile is not Compile.NONE
        self.progress("compiling" if asked else "warming", f"{spec.num_tokens} tokens, compile {spec.modes.compile}")
        kept = self.session.has_compiled(spec)
        function = self.session.compiled(spec, base)
        if spec.modes.compile.owns_graphs:
            function = _stepping(function)
        before = compile_count()
        start = time.perf_counter()
        inputs.call(function)
        self._synchronize()
        made = compile_count().since(before)
        if made:
            draft.startup["compile_s"] = time.perf_counter() - start
            draft.startup["compile_cache"] = spec.cache.value
        self.progress("warming", f"{spec.num_tokens} tokens")
        calls = WARM_CALLS_OF_INDUCTORS_GRAPHS if spec.modes.compile.owns_graphs else WARM_CALLS
        for _ in range(calls - 1):
            self.check()
            inputs.call(function)
        self._synchronize()
        self._count(asked, kept, made, compile_count().since(before))
        return function

    def _count(self, asked: bool, kept: bool, first: CompileCount, made: CompileCount) -> None:
        resolved, notes = self.draft.resolved, self.draft.notes
        resolved["compile"] = self.spec.modes.compile.value
        if asked:
            resolved |= {
                "graphs_compiled": made.graphs,
                "graph_breaks": made.graph_breaks,
                "recompiles": max(0, made.graphs - (0 if kept else 1)),
            }
            if kept and not made.graphs:
                notes.append("Compiled code of an earlier size was used; nothing was compiled for this point.")
        if made.kernels:
            resolved["kernels_compiled"] = made.kernels
        if made.graphs > first.graphs:
            notes.append("The second call with the same shape compiled again.")

    def _capture(self, inputs: Inputs, function: LayerFunction) -> FullGraph | None:
        if self.spec.modes.graph is not Graph.FULL:
            return None
        self.check()
        self.progress("compiling", "capturing the graph")
        start = time.perf_counter()
        graph = FullGraph(function, inputs, CudaRecorder(self.session.torch_device))
        self.stack.callback(graph.close)
        self._synchronize()
        self.draft.startup["capture_s"] = time.perf_counter() - start
        self.draft.memory["graph_bytes"] = graph.held_bytes
        self.draft.resolved |= {
            "graph": "full",
            "captured_tokens": inputs.num_tokens,
            "capture_error_mode": CAPTURE_MODE,
        }
        return graph

    def _check(
        self,
        source: LayerSource,
        weights: ExpertWeights,
        inputs: Inputs,
        problems: tuple[Problem, Problem],
        base: LayerFunction,
        function: LayerFunction,
        graph: FullGraph | None,
    ) -> None:
        spec, draft, modes = self.spec, self.draft, self.spec.modes
        self.check()
        self.progress("checking", f"{spec.num_tokens} tokens against float64")
        session = self.session
        made = (session.source_key(spec), session.weights_key(spec))
        key = (*made, modes.routing, modes.zipf_exponent, spec.num_tokens)
        truth = self.session.truths.find(key, source, weights, problems[0], spec.seed, modes.moe_backend)
        variant = Variant(
            run=graph.replay if graph else lambda: inputs.call(function),
            eager=lambda: inputs.call(base),
            uncaptured=(lambda: inputs.call(function)) if graph else None,
            output=graph.output if graph else None,
            compiled=modes.compile is not Compile.NONE,
            repeatable=not (modes.reduction is Reduction.ATOMIC and self._is_split()),
        )
        correctness, got = check_layer(variant, inputs, problems, truth, self.check)
        if flips := routing_flips(source, problems[0], spec):
            correctness = correctness.model_copy(update=flips)
        draft.correctness = correctness
        if not correctness.passed:
            draft.status, draft.reason = Status.INCORRECT, correctness.reason
        self._compare_dense(truth, got)
        if correctness.passed and self._is_split():
            inputs.load(problems[0].x, problems[0].routing)
            draft.resolved["distinct_outputs"] = distinct_outputs(variant.run, REPEATS)

    def _is_split(self) -> bool:
        """Whether a K loop is split, by what is in force."""
        return self.draft.resolved.get("split_k", 1) != 1

    def _compare_dense(self, truth: Truth, got: torch.Tensor | None) -> None:
        """Against the whole MLP, where experts are cut from one: this output, or what leaving experts out costs."""
        if truth.dense is None or got is None:
            return
        if truth.complete:
            self.draft.resolved["trained_mlp_error"] = difference(got, truth.dense).relative_l2
        elif self.spec.modes.routing is RoutingKind.MODEL:
            # A property of the exact layer under the oracle's choice, not of this backend.
            error = difference(truth.total, truth.dense).relative_l2
            self.draft.resolved["sparsity_error"] = error
            if error is not None:
                self.draft.notes.append(
                    f"Against the whole MLP this sparse layer's exact output is off by {error:.1%}."
                )

    def _time(
        self,
        source: LayerSource,
        inputs: Inputs,
        routings: list[Routing],
        function: LayerFunction,
        graph: FullGraph | None,
        peak: int | None,
    ) -> None:
        spec, draft, session = self.spec, self.draft, self.session
        self.progress("measuring", f"{spec.samples} samples of {spec.num_tokens} tokens")
        reset_peak(session.torch_device)
        timer = Timer(
            device=session.torch_device,
            call=graph.replay if graph else lambda: inputs.call(function),
            prepare=lambda index: inputs.load(routing=routings[index % len(routings)]),
            l2=spec.l2,
            replay=graph is not None,
            compiles=compile_count,
            check=self.check,
        )
        timed = timer.run(spec.samples)
        later = peak_bytes(session.torch_device)
        if peak is not None and later is not None:
            draft.memory["peak_bytes"] = max(peak, later - timed.evictor_bytes)
        each = [layer_work(source, spec, routing) for routing in routings]
        works = [each[index % len(each)] for index in range(spec.samples)]
        sheet = peak_rates(self.device)
        impossible = implausible_reason(
            works, timed.samples_us, spec.modes.quant, sheet, spec.l2, backend=spec.modes.moe_backend
        )
        roofs = session.environment.roofs
        draft.work = weigh(
            works,
            timed.samples_us,
            spec.modes.quant,
            roofs,
            implausible=impossible is not None,
            backend=spec.modes.moe_backend,
        )
        draft.resolved |= {
            "timer": timed.method,
            "l2": spec.l2.value,
            "cold_method": timed.cold_method or None,
            "compiled_samples": len(timed.compiled_in),
        }
        draft.notes += timed.notes
        if draft.work.at_roof and self.device.type == "cpu":
            draft.notes.append("A CPU's roofs are rough: small products measured once, whatever else was running then.")
        if impossible is not None:
            draft.status, draft.reason = Status.IMPLAUSIBLE, impossible
        else:
            draft.metrics["latency"] = Metric.from_samples(timed.samples_us, "us")
            if timed.wall_us:
                draft.metrics["wall"] = Metric.from_samples(timed.wall_us, "us")

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.session.torch_device)


def _stepping(function: LayerFunction) -> LayerFunction:
    """Tell inductor's own graphs that the outputs of the call before are done with."""

    def call(x_TD: torch.Tensor, topk_weights_TK: torch.Tensor, topk_ids_TK: torch.Tensor) -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return function(x_TD, topk_weights_TK, topk_ids_TK)

    return call
