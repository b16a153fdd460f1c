"""The check of a step: every layer against itself in float32, and the logits against a whole float32 run.

Each layer's oracle is the same layer in float32 from the dequantised weights, made when it is its turn and dropped
afterwards. It is run on what the layer really got, so that an error is found where it is made, and once more on what
the oracles before it gave, for logits that are float32 from end to end. An error is measured on what a layer adds to
its input: the input passes through it unchanged, and would hide it. Activations are not quantised in the oracle; what
that costs is in the budget, through plain code that does quantise them.

Shapes: C checked sequences, R their rows, D model, V tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from moe_kernels import Routing

from workbench.check.budget import FACTOR, kernel_budget, rounding_band
from workbench.check.difference import difference
from workbench.check.step_trace import PassTrace, StepTrace
from workbench.models.network.attention import Attention
from workbench.models.network.batch import Batch, decode_batch, prefill_batch
from workbench.models.network.layer import DecoderLayer
from workbench.models.network.linear import Linear
from workbench.models.network.mla import LatentAttention
from workbench.models.network.moe import MoE
from workbench.record import Correctness, Difference, StepCheck
from workbench.runtime.kv_cache import KVCache
from workbench.runtime.step import StepRunner

# Another page size than any run's, so that the oracle's pages share no fault with them.
ORACLE_PAGE = 7
MAX_FLIPS = 0.5
"""Share of rows whose experts may differ from the oracle's: near ties fall either way, a wrong gate is wrong always."""


@dataclass(slots=True)
class _Sum:
    """Squares of errors and of what is added, of one layer in one phase."""

    error: float = 0.0
    plain: float = 0.0
    added: float = 0.0
    rows: int = 0
    flips: int = 0

    def relative(self, squares: float) -> float:
        """The root of a share of what is added; 0 where nothing is."""
        return (squares / self.added) ** 0.5 if self.added else 0.0


@dataclass(frozen=True, slots=True)
class _Verdict:
    """One layer in one phase."""

    layer: int
    phase: str
    error: float
    budget: float
    flipped: float

    @property
    def ratio(self) -> float:
        return self.error / self.budget


def check_step(runner: StepRunner, trace: StepTrace, check: Callable[[], None]) -> Correctness:
    """Judge what a step gave.

    Args:
        runner: that gave it.
        trace: what it gave.
        check: called between layers; may raise to stop.
    """
    network, passes = runner.network, trace.passes
    rows = runner.batch_size * runner.output_len
    seen = sum(one.logits_CV.shape[0] for one in passes)
    if reason := _unwritten(trace):
        return _refused(reason, len(network.layers), rows)
    chain = [network.embed(one.tokens.flatten()).to(torch.float32) for one in passes]
    verdicts: list[_Verdict] = []
    flips = 0
    for index, layer in enumerate(network.layers):
        check()
        assert isinstance(layer, DecoderLayer)
        sums, chain = _check_layer(runner, trace, index, layer, chain)
        for phase, one in sums.items():
            if not one.rows:
                continue
            flips += one.flips
            terms = max(network.config.hidden_size, network.config.intermediate_size)
            budget = kernel_budget(one.relative(one.plain), network.dtype, terms)
            verdicts.append(_Verdict(index, phase, one.relative(one.error), budget, one.flips / one.rows))
    last = [_last(one, x) for one, x in zip(passes, chain, strict=True)]
    exact = torch.cat([network.exact_logits(x) for x in last])
    own = torch.cat([network.exact_logits(_last(one, one.states[-1]).to(torch.float32)) for one in passes])
    got = torch.cat([one.logits_CV for one in passes])
    head = difference(got, own)
    head_budget = FACTOR * 2 * rounding_band(network.dtype, network.config.hidden_size)
    return _judge(
        runner, verdicts, difference(got, exact), head, head_budget, _agreement(got, exact), flips, seen, rows
    )


def _check_layer(
    runner: StepRunner, trace: StepTrace, index: int, layer: DecoderLayer, chain: list[torch.Tensor]
) -> tuple[dict[str, _Sum], list[torch.Tensor]]:
    """Every pass through one layer: `(errors by phase, the float32 run's states after it)`."""
    network = runner.network
    oracle = layer.upcast()
    caches = [_one_layer_cache(runner, trace, dtype) for dtype in (torch.float32, network.dtype, torch.float32)]
    sums = {"prefill": _Sum(), "decode": _Sum()}
    after = []
    for one, h_RD in zip(trace.passes, chain, strict=True):
        x_RD, y_RD = one.states[index], one.states[index + 1]
        forced = None if runner.routings is None else one.routing(index)
        want, wanted = _run(oracle, x_RD.to(torch.float32), _batch(one, caches[0], runner), caches[0], forced)
        with plain_backends(layer):
            plain, planned = _run(layer, x_RD, _batch(one, caches[1], runner), caches[1], forced)
        h_RD, _ = _run(oracle, h_RD, _batch(one, caches[2], runner), caches[2], forced)
        after.append(h_RD)
        flipped = _flipped(one.routing(index), wanted, x_RD)
        kept, plain_kept = ~flipped, ~(flipped | _flipped(planned, wanted, x_RD))
        tally = sums[one.phase]
        tally.rows += len(flipped)
        tally.flips += int(flipped.sum())
        tally.error += _squares((y_RD.to(torch.float32) - want)[kept])
        tally.added += _squares((want - x_RD.to(torch.float32))[kept])
        # Scaled to as many rows, where plain code had fewer to show.
        share = int(kept.sum()) / max(1, int(plain_kept.sum()))
        tally.plain += share * _squares((plain.to(torch.float32) - want)[plain_kept])
    return sums, after


def _run(
    layer: DecoderLayer, x_RD: torch.Tensor, batch: Batch, cache: KVCache, forced: Routing | None
) -> tuple[torch.Tensor, Routing | None]:
    """What the layer gives, and the routing that it took."""
    moe = layer.mlp if isinstance(layer.mlp, MoE) else None
    if moe is None:
        return layer(x_RD, batch, cache.layers[0]), None
    before = (moe.forced, moe.keep_routing)
    moe.forced, moe.keep_routing = forced, True
    try:
        return layer(x_RD, batch, cache.layers[0]), moe.last_routing
    finally:
        (moe.forced, moe.keep_routing), moe.last_routing = before, None


@contextmanager
def plain_backends(layer: DecoderLayer) -> Iterator[None]:
    """Run the layer's attention, projections and experts by their references, in its own dtype, for a while.

    Nothing is fused meanwhile.
    """
    changed: list[tuple[torch.nn.Module, str, object]] = []
    for module in layer.modules():
        if hasattr(module, "fused"):
            changed.append((module, "fused", module.fused))
            setattr(module, "fused", False)  # noqa: B010 - modules of several kinds have it
        name = "backend" if isinstance(module, MoE) else "impl"
        if isinstance(module, (MoE, Attention, LatentAttention, Linear)):
            changed.append((module, name, getattr(module, name)))
            setattr(module, name, "reference")
    try:
        yield
    finally:
        for module, name, value in changed:
            setattr(module, name, value)


def _one_layer_cache(runner: StepRunner, trace: StepTrace, dtype: torch.dtype) -> KVCache:
    network = runner.network
    return KVCache(
        replace(network.config, num_layers=1),
        len(trace.sequences),
        runner.input_len + len(trace.passes),
        ORACLE_PAGE,
        dtype,
        network.device,
        mla_decode=network.mla_decode,
    )


def _batch(one: PassTrace, cache: KVCache, runner: StepRunner) -> Batch:
    if one.step is None:
        return prefill_batch(one.tokens, cache)
    return decode_batch(one.tokens[:, 0], cache, runner.input_len + one.step)


def _last(one: PassTrace, x_RD: torch.Tensor) -> torch.Tensor:
    """Each sequence's last row, `[C, D]`."""
    last_CD: torch.Tensor = x_RD.unflatten(0, (one.tokens.shape[0], -1))[:, -1]
    return last_CD


def _flipped(got: Routing | None, want: Routing | None, x_RD: torch.Tensor) -> torch.Tensor:
    """bool `[R]`: rows whose set of experts is another; none where there are no experts."""
    if got is None or want is None:
        return torch.zeros(x_RD.shape[0], dtype=torch.bool, device=x_RD.device)
    different: torch.Tensor = (got.topk_ids.sort(-1).values != want.topk_ids.sort(-1).values).any(-1)
    return different


def _squares(x: torch.Tensor) -> float:
    return float(x.double().square().sum())


def _agreement(got_RV: torch.Tensor, want_RV: torch.Tensor) -> tuple[float, float]:
    """Share of rows with the same likeliest token, and the mean divergence from the oracle in nats."""
    top1 = float((got_RV.argmax(-1) == want_RV.argmax(-1)).double().mean())
    got, want = got_RV.double().log_softmax(-1), want_RV.double().log_softmax(-1)
    return top1, max(0.0, float((want.exp() * (want - got)).sum(-1).mean()))


def _unwritten(trace: StepTrace) -> str:
    for one in trace.passes:
        if not one.finite:
            where = "the prefill" if one.step is None else f"decode step {one.step + 1}"
            bad = [i for i, x in enumerate(one.states) if not bool(torch.isfinite(x).all())]
            after = "" if not bad else " after the embedding" if bad[0] == 0 else f" from layer {bad[0] - 1} on"
            return f"{where} gave NaN or infinity{after}: not written, or out of the format's range"
    return ""


def _judge(
    runner: StepRunner,
    verdicts: list[_Verdict],
    total: Difference,
    head: Difference,
    head_budget: float,
    agreement: tuple[float, float],
    flips: int,
    seen: int,
    rows: int,
) -> Correctness:
    worst = max(verdicts, key=lambda verdict: verdict.ratio)
    bad = [verdict for verdict in verdicts if verdict.ratio > 1]
    turned = [verdict for verdict in verdicts if verdict.flipped > MAX_FLIPS]
    layers = len(runner.network.layers)
    head_error = float("inf") if head.relative_l2 is None else head.relative_l2
    reason = ""
    if bad:
        first = bad[0]
        reason = (
            f"layer {first.layer} is off by {first.error:.2e} in {first.phase}, above its budget of {first.budget:.2e}"
        )
        if count := len({verdict.layer for verdict in bad}) - 1:
            reason += f"; {count} more layers are too"
    elif turned:
        first = turned[0]
        reason = f"layer {first.layer} chose other experts than its oracle for {first.flipped:.0%} of {first.phase}"
    elif head_error > head_budget:
        reason = f"the logits are off by {head_error:.2e} from the last layer's, above the budget of {head_budget:.2e}"
    of_layer = [max(v.error for v in verdicts if v.layer == index) for index in range(layers)]
    return Correctness(
        total=total,
        kernel=head,
        kernel_budget=head_budget,
        ratio=max(worst.ratio, head_error / head_budget) if head_error < float("inf") else None,
        routing_flips=flips if runner.network.config.moe is not None and runner.routings is None else None,
        rows_checked=seen,
        rows=rows,
        step=StepCheck(
            logits_relative_l2=total.relative_l2,
            top1_agreement=agreement[0],
            kl=agreement[1],
            first_bad_layer=min((verdict.layer for verdict in (*bad, *turned)), default=None),
            worst_layer=worst.layer,
            worst_error=worst.error,
            budget=worst.budget,
            layers_checked=layers,
            positions=seen,
            routing_flips=flips,
            layer_errors=tuple(of_layer),
        ),
        passed=not reason,
        reason=reason,
    )


def _refused(reason: str, layers: int, rows: int) -> Correctness:
    nothing = Difference(relative_l2=None, max_over_rms=None, dissimilarity=None)
    return Correctness(
        total=nothing,
        kernel=nothing,
        kernel_budget=0.0,
        ratio=None,
        rows_checked=0,
        rows=rows,
        passed=False,
        reason=reason,
    )
