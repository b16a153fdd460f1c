"""Where a step's time goes: torch's profiler over one prefill and one decode step, added up by layer, part and kind.

Ranges with the names of the network's parts lie around every module's call. A kernel belongs to the range in which the
host launched it, and on a CPU an operator to the range in which it ran.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from workbench.measure.floor import SampleWork
from workbench.measure.kernel_kinds import Kind, kernel_kind
from workbench.measure.step_floor import Place
from workbench.models.network.network import Network
from workbench.record import ProfileRow
from workbench.runtime.step import StepRunner, next_tokens

PREFIX = "step|"
_RANGE = re.compile(r"^step\|(prefill|decode)\|(\d*)\|(\w+)$")
OUTSIDE = "other"
_KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")


@dataclass(frozen=True, slots=True)
class _Span:
    """A stretch of one thread's time."""

    start: float
    end: float
    phase: str
    layer: int | None
    part: str


def profile_step(
    runner: StepRunner,
    floors: Mapping[str, Mapping[Place, SampleWork]],
    path: Path | None = None,
    check: Callable[[], None] = lambda: None,
) -> tuple[ProfileRow, ...]:
    """Profile a prefill and, where there is one, the first decode step, both run once before.

    Args:
        runner: of a step that has been run.
        floors: of each phase, what each part must do at least.
        path: where the trace is written, as JSON that Perfetto and chrome://tracing open; None for nowhere.
        check: called between passes.
    """
    with TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json" if path is None else path
        record_trace(runner, trace, check)
        return summarize(json.loads(trace.read_text(encoding="utf-8"))["traceEvents"], floors)


def record_trace(runner: StepRunner, path: Path, check: Callable[[], None] = lambda: None) -> None:
    """Write the trace of one prefill and the first decode step, after one of each that is not traced."""
    cuda = runner.network.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    _both(runner, check, None)
    with profile(activities=activities, acc_events=False) as profiler:
        _both(runner, check, runner.network)
        if cuda:
            torch.cuda.synchronize(runner.network.device)
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))


def _both(runner: StepRunner, check: Callable[[], None], network: Network | None) -> None:
    ids: torch.Tensor | None = None
    for phase in ("prefill", "decode") if runner.decode_steps else ("prefill",):
        check()
        runner.prepare(None if ids is None else 0)
        with named_ranges(network, phase), record_function(f"{PREFIX}{phase}||{OUTSIDE}"):
            ids = next_tokens(runner.prefill() if ids is None else runner.decode(0, ids))
            if runner.network.device.type == "cuda":
                torch.cuda.synchronize(runner.network.device)


@contextmanager
def named_ranges(network: Network | None, phase: str) -> Iterator[None]:
    """Lay a range around every call of a module that has a part's name; None for none."""
    handles: list[Any] = []
    opened: list[Any] = []

    def before(name: str) -> Callable[..., None]:
        def enter(*_: object) -> None:
            one = record_function(name)
            one.__enter__()
            opened.append(one)

        return enter

    def after(*_: object) -> None:
        opened.pop().__exit__(None, None, None)

    if network is not None:
        for module, layer in _named(network):
            name = f"{PREFIX}{phase}|{'' if layer is None else layer}|{module.part}"
            handles.append(module.register_forward_pre_hook(before(name)))
            handles.append(module.register_forward_hook(after, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _named(network: Network) -> Iterator[tuple[Any, int | None]]:
    """Modules with a part's name, each once, and their layer."""
    seen: set[int] = set()
    for index, layer in enumerate(network.layers):
        for module in layer.modules():
            if module is not network.rope and hasattr(module, "part") and id(module) not in seen:
                seen.add(id(module))
                yield module, index
    rest: list[nn.Module] = [network.embed, network.rope, network.norm, network.lm_head]
    yield from ((module, None) for module in rest)


def summarize(
    events: Iterable[Mapping[str, Any]], floors: Mapping[str, Mapping[Place, SampleWork]]
) -> tuple[ProfileRow, ...]:
    """Rows of a trace's events (Chrome's trace format, microseconds), in the order of phases, layers and parts.

    The floor of a part stands in the row of it that took longest.
    """
    complete = [event for event in events if event.get("ph") == "X"]
    spans = _spans(complete)
    times: dict[tuple[str, int | None, str, Kind], list[float]] = defaultdict(list)
    for span, name, taken in _kernels(complete, spans) or _operators(complete, spans):
        times[span.phase, span.layer, span.part, kernel_kind(name)].append(taken)
    longest: dict[tuple[str, int | None, str], tuple[float, str]] = {}
    for (phase, layer, part, kind), series in times.items():
        place = (phase, layer, part)
        longest[place] = max(longest.get(place, (0.0, "")), (sum(series), kind))
    rows = []
    for (phase, layer, part, kind), series in times.items():
        floor = floors.get(phase, {}).get((layer, part))
        own = floor is not None and longest[phase, layer, part][1] == kind
        rows.append(
            ProfileRow(
                phase="prefill" if phase == "prefill" else "decode",
                layer=layer,
                part=part,
                kind=kind,
                time_us=sum(series),
                count=len(series),
                floor_bytes=floor.bytes if floor is not None and own else None,
            )
        )
    rows.sort(key=lambda row: (row.phase != "prefill", -1 if row.layer is None else row.layer, row.part, row.kind))
    return tuple(rows)


def _spans(events: Sequence[Mapping[str, Any]]) -> dict[Any, list[_Span]]:
    """The named ranges of each thread, by their start."""
    found: dict[Any, list[_Span]] = defaultdict(list)
    for event in events:
        match = _RANGE.match(str(event.get("name", "")))
        if match and event.get("cat") in ("user_annotation", "cpu_op"):
            layer = int(match[2]) if match[2] else None
            start = float(event["ts"])
            found[event.get("tid")].append(_Span(start, start + float(event["dur"]), match[1], layer, match[3]))
    for spans in found.values():
        spans.sort(key=lambda span: (span.start, -span.end))
    return found


def _innermost(spans: Sequence[_Span], starts: Sequence[float], at: float) -> _Span | None:
    """The shortest range around a moment: the last to begin of those that have not ended."""
    index = bisect_right(starts, at) - 1
    while index >= 0:
        if spans[index].end >= at:
            return spans[index]
        index -= 1
    return None


def _kernels(
    events: Sequence[Mapping[str, Any]], spans: Mapping[Any, Sequence[_Span]]
) -> list[tuple[_Span, str, float]]:
    """Every kernel with the range that it was launched in; empty where the trace has none."""
    launched: dict[Any, _Span] = {}
    for tid, own in spans.items():
        starts = [span.start for span in own]
        for event in events:
            if event.get("cat") in _LAUNCHES and event.get("tid") == tid:
                span = _innermost(own, starts, float(event["ts"]))
                if span is not None:
                    launched[event.get("args", {}).get("correlation")] = span
    found = []
    for event in events:
        if event.get("cat") in _KERNELS:
            span = launched.get(event.get("args", {}).get("correlation"))
            if span is not None:
                found.append((span, str(event["name"]), float(event["dur"])))
    return found


def _operators(
    events: Sequence[Mapping[str, Any]], spans: Mapping[Any, Sequence[_Span]]
) -> list[tuple[_Span, str, float]]:
    """Every operator with the range that it ran in, and the time that was its own and not an inner one's."""
    found = []
    for tid, own in spans.items():
        starts = [span.start for span in own]
        ops = [e for e in events if e.get("cat") == "cpu_op" and e.get("tid") == tid and not _RANGE.match(e["name"])]
        ops.sort(key=lambda event: (float(event["ts"]), -float(event["dur"])))
        inner: list[float] = [0.0] * len(ops)
        stack: list[int] = []
        for index, event in enumerate(ops):
            while stack and float(ops[stack[-1]]["ts"]) + float(ops[stack[-1]]["dur"]) <= float(event["ts"]):
                stack.pop()
            if stack:
                inner[stack[-1]] += float(event["dur"])
            stack.append(index)
        for event, taken_inside in zip(ops, inner, strict=True):
            span = _innermost(own, starts, float(event["ts"]))
            if span is not None:
                found.append((span, str(event["name"]), max(0.0, float(event["dur"]) - taken_inside)))
    return found
