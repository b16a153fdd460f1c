"""Decode steps replayed, on a stand-in recorder: the same tokens as without, at every size, whatever is padded."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "check"))
from step_cases import step_runner

from workbench.runtime.kv_cache import KVCache
from workbench.runtime.step import StepRunner
from workbench.runtime.step_decode import BufferedStepRunner


class Playback:
    """Records by keeping the call; a replay runs it again into the first output."""

    def __init__(self) -> None:
        self.call: Callable[[], torch.Tensor] | None = None
        self.output: torch.Tensor | None = None

    def warm(self, call: Callable[[], torch.Tensor], times: int) -> None:
        for _ in range(times):
            call()

    def capture(self, call: Callable[[], torch.Tensor]) -> torch.Tensor:
        self.call, self.output = call, call()
        return self.output

    def replay(self) -> None:
        assert self.call is not None
        assert self.output is not None
        self.output.copy_(self.call())

    def release(self) -> None:
        self.call = self.output = None

    def held_bytes(self) -> int:
        return 0


def captured(plain: StepRunner, room: int, sizes: tuple[int, ...] = ()) -> BufferedStepRunner:
    """The same step with graphs, in a cache of its own for `room` sequences."""
    cache = KVCache.for_network(plain.network, room, 20, 4)
    cache.reset()
    made = BufferedStepRunner(plain.network, cache, plain.prompts_BS, plain.output_len, plain.routings)
    made.capture(sizes, room, Playback)
    return made


@torch.no_grad()
@pytest.mark.parametrize("case", ["dense", "latent"])
@pytest.mark.parametrize(("room", "sizes", "size"), [(3, (), 3), (7, (), 7), (8, (1, 2, 4), 4)])
def test_the_same_tokens_and_logits(case: str, room: int, sizes: tuple[int, ...], size: int) -> None:
    plain = step_runner(case)
    made = captured(plain, room, sizes)
    assert torch.equal(made.run(), plain.run())
    assert made.graphs is not None
    assert made.graphs.last == ("graph", size)
    ids = torch.tensor([5, 6, 7])
    torch.testing.assert_close(made.decode(1, ids), plain.decode(1, ids))
    graphs = made.graphs
    made.close()
    with pytest.raises(RuntimeError, match="closed"):
        graphs.replay(1)
    assert torch.equal(made.run(), plain.run())  # without graphs again


@torch.no_grad()
@pytest.mark.parametrize("quant", ["fp8_tensor", "int8"])
def test_padding_changes_no_scale_of_a_batch(quant: str) -> None:
    """One scale covers all rows of fp8_tensor: a row of padding larger than every real one would change them all."""
    plain = step_runner("dense", quant=quant)
    plain.network.embed.weight[0] *= 1000  # token 0, which zeroed buffers would hold
    made = captured(plain, 8, (4,))
    plain.run()
    made.run()
    ids = torch.tensor([5, 6, 7])
    torch.testing.assert_close(made.decode(0, ids), plain.decode(0, ids), rtol=2**-6, atol=2**-6)


@torch.no_grad()
def test_padding_touches_no_other_sequence_and_no_other_expert() -> None:
    plain = step_runner("latent", batch_size=3)
    made = captured(plain, 8, (4,))
    made.prefill()
    before = [layer.latent.clone() for layer in made.cache.layers]  # type: ignore[union-attr]
    made.decode(0, torch.tensor([5, 6, 7]))
    table = made.cache.page_table
    own = {int(table[row, 11 // 4]) * 4 + 11 % 4 for row in range(3)}
    for old, layer in zip(before, made.cache.layers, strict=True):
        assert layer.latent is not None
        changed = (old.nan_to_num(1e9) != layer.latent.nan_to_num(1e9)).any(-1).flatten().nonzero()[:, 0].tolist()
        assert set(changed) == own
    moe = plain.network.layers[1].mlp
    moe.keep_routing = True
    made.decode(0, torch.tensor([5, 6, 7]))
    ids = moe.last_routing.topk_ids
    assert ids.shape[0] == 4
    assert torch.equal(ids[3], ids[0])


@torch.no_grad()
def test_a_run_after_a_longer_one_reads_nothing_of_it() -> None:
    plain = step_runner("dense")
    made = captured(plain, 4, (2,))
    expected = plain.run()
    first = made.run()
    made.buffers.token_ids_B.fill_(99)
    made.buffers.page_table_BP.fill_(0)
    assert torch.equal(made.run(), expected)
    assert torch.equal(first, expected)


@torch.no_grad()
@pytest.mark.parametrize(("room", "sizes"), [(3, ()), (8, (4,))])
def test_given_routings_change_from_step_to_step_in_a_graph(room: int, sizes: tuple[int, ...]) -> None:
    plain = step_runner("latent", routing="uniform", output_len=5)
    made = captured(plain, room, sizes)
    assert torch.equal(made.run(), plain.run())
    ids = torch.tensor([5, 6, 7])
    outs = []
    for runner in (made, plain):
        runner.prepare(None)
        runner.prefill()
        outs.append([])
        for step in range(4):
            runner.prepare(step)
            outs[-1].append(runner.decode(step, ids))
    for got, want in zip(*outs, strict=True):
        torch.testing.assert_close(got, want)


@torch.no_grad()
def test_a_batch_above_the_largest_graph_runs_eager() -> None:
    plain = step_runner("dense")
    cache = KVCache.for_network(plain.network, 3, 20, 4)
    made = BufferedStepRunner(plain.network, cache, plain.prompts_BS, plain.output_len)
    graphs = made.capture((1,), 2, Playback)
    assert graphs.sizes == [1, 2]
    assert torch.equal(made.run(), plain.run())
    assert graphs.last == ("eager", 3)
    assert made.size == 3
