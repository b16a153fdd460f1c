"""One step from its spec to its record: load, warm, check, time, profile."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from workbench.arithmetic import describe
from workbench.check.step import check_step
from workbench.check.step_mode import check_mode
from workbench.check.step_trace import StepTrace, trace_step
from workbench.devices import DeviceInfo
from workbench.engines.backends import prepare_backend
from workbench.engines.draft import Draft
from workbench.engines.faults import Unsupported
from workbench.engines.rates import peak_rates
from workbench.engines.session import PointSession, peak_bytes, reset_peak, used_bytes
from workbench.engines.step_modes import StepModes
from workbench.measure.floor import SampleWork, implausible_reason, weigh
from workbench.measure.profile import profile_step
from workbench.measure.step_floor import Pass, Place, pass_work, total_work
from workbench.measure.step_timer import METHOD, StepTimes, repeats, time_step
from workbench.models.network.files import find_network
from workbench.models.network.load import Loaded
from workbench.models.network.perplexity import perplexity
from workbench.models.network.tokens import load_tokenizer, topic_tokens
from workbench.modes import BACKENDS, L2, Compile, Graph
from workbench.record import Metric, Status
from workbench.runtime.compile import compile_count
from workbench.runtime.kv_cache import KVCache
from workbench.runtime.step import StepRunner, random_prompts, step_routings
from workbench.runtime.step_compile import room_for_sizes
from workbench.runtime.step_decode import BufferedStepRunner
from workbench.spec import RunSpec
from workbench.support import find_reasons

Progress = Callable[[str, str], None]
SECOND = 1e6


@dataclass(slots=True)
class StepRun:
    """A step on its way to a record.

    Attributes:
        spec: what to run.
        device: where.
        session: what earlier points left.
        progress: told a state and a sentence at every phase.
        check: called between passes; raises to end.
        draft: what is known so far.
        stack: closes what the point opens.
    """

    spec: RunSpec
    device: DeviceInfo
    session: PointSession
    progress: Progress
    check: Callable[[], None]
    draft: Draft
    stack: ExitStack

    def work(self) -> None:
        """Everything, in order; stops after the check where it is failed."""
        runner, loaded = self.prepare()
        trace = self._check(runner)
        if self.draft.status is not Status.OK:
            return
        floors = step_floors(runner, trace)
        timed = self._in_its_modes(runner)
        if timed is not runner and not self._check_modes(timed, trace):
            return
        if self._time(timed, trace, floors) is None:
            return
        self.progress("measuring", "profile")
        self.draft.profile = profile_step(runner, floors, check=self.check)
        if timed is not runner:
            self.draft.notes.append("The profile is of the eager step.")
        self._perplexity(loaded)

    def _in_its_modes(self, plain: StepRunner) -> StepRunner:
        """The same step compiled and captured as asked; `plain` itself where neither is."""
        self.draft.resolved |= {"fusion": self.spec.modes.fusion.value}
        if self.spec.modes.compile is Compile.NONE and self.spec.modes.graph is Graph.DISABLED:
            return plain
        self.stack.enter_context(room_for_sizes())
        modes = StepModes(self.spec, self.session.torch_device, self.progress, self.check, self.draft)
        made = modes.runner(plain)
        self.stack.callback(modes.close)
        return made

    def _check_modes(self, timed: StepRunner, trace: StepTrace) -> bool:
        draft = self.draft
        assert isinstance(timed, BufferedStepRunner)
        assert draft.correctness is not None
        self.progress("checking", "against the eager step")
        draft.correctness = check_mode(timed, trace, draft.correctness, self.check)
        if not draft.correctness.passed:
            draft.status, draft.reason = Status.INCORRECT, draft.correctness.reason
        return draft.correctness.passed

    def prepare(self) -> tuple[StepRunner, Loaded]:
        """Load the network and make everything that a step needs, warm.

        Raises:
            Unsupported: the spec cannot run here.
        """
        spec, draft = self.spec, self.draft
        if reasons := find_reasons(spec, self.device):
            raise Unsupported(" ".join(dict.fromkeys(reason.sentence for reason in reasons)))
        prepare_backend(spec.modes.moe_backend)
        loaded = self._load()
        network, point, place = loaded.network, spec.step_point, self.session.torch_device
        start = time.perf_counter()
        room = max(point.batch_size, spec.modes.max_capture_batch or 0)
        cache = KVCache.for_network(network, room, point.max_len, point.page_size)
        draft.memory |= {"kv_cache_bytes": cache.nbytes, "at_rest_bytes": used_bytes(place)}
        modes = spec.modes
        routings = step_routings(network.config, point, modes.routing, modes.zipf_exponent, spec.seed, place)
        prompts = random_prompts(network.config, point, spec.seed, place)
        runner = StepRunner(network, cache, prompts, point.output_len, routings)
        reset_peak(place)
        self.progress("warming", spec.size_label)
        before = compile_count()
        runner.run(self.check)
        self._wait()
        if made := compile_count().since(before):
            draft.startup["compile_s"] = time.perf_counter() - start
            draft.startup["compile_cache"] = spec.cache.value
            if made.kernels:
                draft.resolved["kernels_compiled"] = made.kernels
        draft.memory["peak_bytes"] = peak_bytes(place)
        if routings is not None:
            draft.notes.append(f"Routing {modes.routing} is given to every layer; the model's gates are not run.")
        return runner, loaded

    def _load(self) -> Loaded:
        spec, draft = self.spec, self.draft
        self.progress("starting", f"loading {spec.model} as {spec.modes.quant}")
        start = time.perf_counter()
        loaded = self.session.network(spec, lambda text: self.progress("starting", text))
        self._wait()
        draft.startup["load_s"] = time.perf_counter() - start
        network, config, modes = loaded.network, loaded.network.config, spec.modes
        draft.memory["weight_bytes"] = network.weight_bytes
        draft.resolved |= {
            "device": self.device.torch_device,
            "shape": config.source,
            "layers": config.num_layers,
            "hidden_size": config.hidden_size,
            "attention_backend": modes.attention_backend,
            "compile": modes.compile.value,
            "graph": modes.graph.value,
            **loaded.resolved,
        }
        if config.moe is not None:
            draft.resolved |= {
                "num_experts": config.moe.num_experts,
                "top_k": config.moe.top_k,
                "moe_backend": modes.moe_backend,
            }
        words = modes.moe_backend in BACKENDS and describe(
            modes.quant,
            group_size=modes.group_size,
            zero_points=modes.zero_points,
            device_type=self.device.type,
            capability=self.device.capability,
            emulated=self.device.type == "cpu",
        )
        if words:
            draft.resolved["arithmetic"] = words
        draft.notes += loaded.notes
        self.check()
        return loaded

    def _check(self, runner: StepRunner) -> StepTrace:
        self.check()
        layers = len(runner.network.layers)
        self.progress("checking", f"{layers} layers against float32")
        trace = trace_step(runner, self.check)
        correctness = check_step(runner, trace, self.check)
        self.draft.correctness = correctness
        if not correctness.passed:
            self.draft.status, self.draft.reason = Status.INCORRECT, correctness.reason
        return trace

    def _time(
        self, runner: StepRunner, trace: StepTrace, floors: dict[str, dict[Place, SampleWork]]
    ) -> StepTimes | None:
        spec, draft, point = self.spec, self.draft, self.spec.step_point
        count = repeats(spec.samples, runner.decode_steps)
        self.progress("measuring", f"{count} times {spec.size_label}")
        reset_peak(self.session.torch_device)
        times = time_step(runner, count, compiles=compile_count, check=self.check)
        peak, later = draft.memory["peak_bytes"], peak_bytes(self.session.torch_device)
        if peak is not None and later is not None:
            draft.memory["peak_bytes"] = max(peak, later - times.evictor_bytes)
        known = len(trace.tokens)
        other = sum(not torch.equal(chosen[:known], trace.tokens) for chosen in times.tokens)
        if other:
            draft.notes.append(f"In {other} of {count} repeats other tokens were chosen than in the checked run.")
        draft.resolved |= {
            "timer": METHOD,
            "repeats": count,
            "compiled_samples": len(times.compiled_in),
        }
        draft.notes += times.notes
        totals = {phase: total_work(work) for phase, work in floors.items()}
        series = {"prefill": times.prefill_us, "decode": times.decode_us}
        sheet = peak_rates(self.device)
        for phase, taken in series.items():
            if taken and (
                why := implausible_reason([totals[phase]] * len(taken), taken, spec.modes.quant, sheet, L2.COLD)
            ):
                draft.status, draft.reason = Status.IMPLAUSIBLE, f"{phase}: {why}"
                return None
        main = "decode" if times.decode_us else "prefill"
        taken = series[main]
        draft.work = weigh([totals[main]] * len(taken), taken, spec.modes.quant, self.session.environment.roofs)
        tokens = point.batch_size * point.input_len
        draft.metrics |= _series("prefill", times.prefill_us, tokens)
        draft.metrics |= _series("decode", times.decode_us, point.batch_size)
        draft.metrics |= _series("total", times.total_us, tokens + point.batch_size * point.output_len)
        return times

    def _perplexity(self, loaded: Loaded) -> None:
        wanted = self.spec.step_point.perplexity_tokens
        if wanted is None:
            return
        self.progress("measuring", f"perplexity of {wanted} tokens")
        ids, bos = topic_tokens(load_tokenizer(self.spec.model), wanted)
        network = loaded.network
        window = min(1024, find_network(self.spec.model).config.max_position)
        found = perplexity(network, KVCache.for_network, ids, window, bos=bos, progress=lambda *_: self.check())
        self.draft.metrics["perplexity"] = Metric.from_samples([found.value], "")
        self.draft.resolved |= {"perplexity_tokens": found.tokens, "perplexity_window": window}

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.session.torch_device)


def _series(name: str, taken_us: tuple[float, ...], tokens: int) -> dict[str, Metric]:
    """A latency, and the tokens a second that it means; nothing where there is none."""
    if not taken_us:
        return {}
    rates = [tokens * SECOND / taken for taken in taken_us]
    return {
        name: Metric.from_samples(taken_us, "us"),
        f"{name}_throughput": Metric.from_samples(rates, "tokens/s"),
    }


def step_floors(runner: StepRunner, trace: StepTrace) -> dict[str, dict[Place, SampleWork]]:
    """What each part of each phase must do at least, with the experts that the checked run touched."""
    found = {}
    for phase in ("prefill", "decode"):
        passes = [one for one in trace.passes if one.phase == phase]
        if not passes:
            continue
        experts: dict[int, float] = {}
        slots: dict[int, float] = {}
        for layer in range(len(runner.network.layers)):
            ids = [one.routings[layer].topk_ids for one in passes if one.routings[layer] is not None]  # type: ignore[union-attr]
            if ids:
                experts[layer] = sum(int(each[each >= 0].unique().numel()) for each in ids) / len(ids)
                slots[layer] = sum(int((each >= 0).sum()) for each in ids) / len(ids)
        prefill = phase == "prefill"
        one = Pass(
            kind=phase,
            rows=runner.batch_size * (runner.input_len if prefill else 1),
            sequences=runner.batch_size,
            keys=runner.input_len if prefill else runner.input_len + max(1, runner.decode_steps // 2),
            experts=experts,
            slots=slots,
        )
        found[phase] = pass_work(runner.network, one)
    return found
