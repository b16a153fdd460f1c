"""What a step gave on its way, kept for the check: states between layers, routings, logits.

Shapes: S rows, B sequences, C checked sequences, R their rows, D model, V tokens, K experts a token.
"""

from __future__ import annotations

# ruff: noqa: N815  (fields carry shape suffixes, as every tensor name does)
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from moe_kernels import Routing
from torch import nn

from workbench.models.network.batch import Batch
from workbench.models.network.layer import Passed
from workbench.models.network.moe import MoE
from workbench.models.network.network import Network
from workbench.runtime.step import StepRunner, next_tokens

MAX_ROWS = {"cuda": 2048, "cpu": 256}
MAX_STEPS = 4


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PassTrace:
    """One pass, for the checked sequences.

    Attributes:
        step: None for the prefill, else the decode step, from 0.
        tokens: int64 `[C, S]` or `[C, 1]`.
        states: before the first layer and after each: `[R, D]` each, in the compute dtype.
        logits_CV: float32.
        routings: of each layer, all rows of the batch; None for a layer without experts.
        rows: int64 `[R]`, the checked rows of the batch.
        finite: whether every value of every sequence was.
    """

    step: int | None
    tokens: torch.Tensor
    states: list[torch.Tensor]
    logits_CV: torch.Tensor
    routings: list[Routing | None]
    rows: torch.Tensor
    finite: bool

    @property
    def phase(self) -> str:
        """`prefill` or `decode`."""
        return "prefill" if self.step is None else "decode"

    def routing(self, layer: int) -> Routing | None:
        """That of the checked rows."""
        whole = self.routings[layer]
        return None if whole is None else Routing(whole.topk_weights[self.rows], whole.topk_ids[self.rows])


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepTrace:
    """A step's prefill and its first few decode steps.

    Attributes:
        passes: in order.
        sequences: int64 `[C]`, which are checked.
        tokens: int64 `[n, B]` on the CPU, chosen in these passes.
    """

    passes: list[PassTrace]
    sequences: torch.Tensor
    tokens: torch.Tensor


def trace_step(runner: StepRunner, check: Callable[[], None]) -> StepTrace:
    """Run the prefill and up to 4 decode steps from an empty cache, and keep what the check looks at.

    The cache, and memory that the allocator is about to give, hold NaN at first, so that what is read without having
    been written shows.
    """
    runner.cache.reset()
    _poison(runner.network, runner.batch_size * runner.input_len)
    device = runner.network.device
    sequences = checked_sequences(runner.batch_size, runner.input_len, MAX_ROWS[device.type]).to(device)
    passes, chosen = [], []
    ids: torch.Tensor | None = None
    for step in (None, *range(min(MAX_STEPS, runner.decode_steps))):
        check()
        runner.prepare(step)
        if ids is None or step is None:
            batch, tokens = runner.prefill_batch(), runner.prompts_BS[sequences]
        else:
            batch, tokens = runner.decode_batch(step, ids), ids[sequences, None]
        one = _trace(runner, batch, step, tokens, sequences)
        passes.append(one[0])
        ids = next_tokens(one[1])
        chosen.append(ids.cpu())
    return StepTrace(passes=passes, sequences=sequences, tokens=torch.stack(chosen))


def checked_sequences(batch_size: int, input_len: int, max_rows: int) -> torch.Tensor:
    """Which sequences are looked at, int64: the first, the last, and between them as many as `max_rows` allows.

    At least one, however long. 8 sequences of 4 tokens and 12 rows: 0, 4, 7.
    """
    count = min(batch_size, max(1, max_rows // input_len))
    return torch.linspace(0, batch_size - 1, count).round().to(torch.int64)


def _trace(
    runner: StepRunner, batch: Batch, step: int | None, tokens: torch.Tensor, sequences: torch.Tensor
) -> tuple[PassTrace, torch.Tensor]:
    network = runner.network
    each = batch.token_ids_S.shape[0] // runner.batch_size
    rows = (sequences[:, None] * each + torch.arange(each, device=sequences.device)).flatten()
    states: list[torch.Tensor] = []
    finite = torch.ones((), dtype=torch.bool, device=network.device)

    def keep(x_SD: torch.Tensor) -> None:
        finite.logical_and_(torch.isfinite(x_SD).all())
        states.append(x_SD[rows])

    with _hooked(network, keep), _kept_routings(network) as moes:
        logits_BV = network(batch, runner.cache)
        finite.logical_and_(torch.isfinite(logits_BV).all())
        routings = [None if moe is None else moe.last_routing for moe in moes]
    made = PassTrace(
        step=step,
        tokens=tokens,
        states=states,
        logits_CV=logits_BV[sequences],
        routings=routings,
        rows=rows,
        finite=bool(finite),
    )
    return made, logits_BV


@contextmanager
def _hooked(network: Network, keep: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Call `keep` with what goes into the first layer, and with what comes out of each."""

    def before(_layer: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        keep(args[0])

    def after(_layer: nn.Module, _args: object, out: torch.Tensor | Passed) -> None:
        keep(out.sum_SD if isinstance(out, Passed) else out)

    handles = [network.layers[0].register_forward_pre_hook(before)]
    handles += [layer.register_forward_hook(after) for layer in network.layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _kept_routings(network: Network) -> Iterator[list[MoE | None]]:
    moes = [layer.mlp if isinstance(layer.mlp, MoE) else None for layer in network.layers]
    for moe in moes:
        if moe is not None:
            moe.keep_routing = True
    try:
        yield moes
    finally:
        for moe in moes:
            if moe is not None:
                moe.keep_routing, moe.last_routing = False, None


def _poison(network: Network, rows: int) -> None:
    """Fill blocks of the sizes that a layer allocates with NaN and free them."""
    width = network.config.hidden_size
    for dtype in {network.dtype, torch.float32}:
        torch.full((rows * width,), float("nan"), dtype=dtype, device=network.device)
