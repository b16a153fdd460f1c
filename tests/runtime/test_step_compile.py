"""Compiled decode steps, traced and not lowered: the same as eager, whole or with the experts left out."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "check"))
from step_cases import step_runner

from workbench.models.network.moe import MoE
from workbench.modes import Compile
from workbench.runtime import step_compile
from workbench.runtime.kv_cache import KVCache
from workbench.runtime.step import StepRunner
from workbench.runtime.step_compile import CompiledDecode
from workbench.runtime.step_decode import BufferedStepRunner

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.fx.GraphModule]]:
    """Graphs that dynamo makes, run as they are."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _inputs: object) -> Any:
        graphs.append(graph)
        return graph.forward

    real = torch.compile
    monkeypatch.setattr(
        step_compile.torch, "compile", lambda function, mode, **how: real(function, backend=keep, **how)
    )
    torch._dynamo.reset()
    yield graphs
    torch._dynamo.reset()


def compiled(plain: StepRunner, **how: Any) -> tuple[BufferedStepRunner, CompiledDecode]:
    cache = KVCache.for_network(plain.network, plain.batch_size, 20, 4)
    decode = CompiledDecode(plain.network, cache, Compile.DEFAULT, **how)
    made = BufferedStepRunner(
        plain.network, cache, plain.prompts_BS, plain.output_len, plain.routings, pick=decode.pick
    )
    return made, decode


def ops(graph: torch.fx.GraphModule) -> list[str]:
    return [str(node.target) for node in graph.graph.nodes]


@torch.no_grad()
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("case", "skip"), [("dense", False), ("latent", False), ("latent", True)])
def test_the_same_tokens(traced: list[torch.fx.GraphModule], case: str, skip: bool, fused: bool) -> None:
    plain = step_runner(case, fused=fused, batch_size=2)
    made, _ = compiled(plain, skip_moe=skip)
    assert torch.equal(made.run(), plain.run())
    ids = torch.tensor([5, 6])
    torch.testing.assert_close(made.decode(1, ids), plain.decode(1, ids))
    assert len(traced) == 1  # no break, and no other form for a later step
    apart = sum("moe_apart" in name for name in ops(traced[0]))
    assert apart == (2 if skip else 0)


@torch.no_grad()
def test_one_form_a_batch_size_and_none_above_the_largest(traced: list[torch.fx.GraphModule]) -> None:
    plain = step_runner("dense", batch_size=4)
    made, decode = compiled(plain, max_batch=2)
    assert [decode.compiles(size) for size in (1, 2, 3)] == [True, True, False]
    assert decode.pick(3) is decode.plain
    for size in (1, 2, 1, 2, 3, 4):
        made.buffers.load(size, size)
        made.buffers.call(size)
    assert len(traced) == 2


@torch.no_grad()
def test_nothing_stays_changed(traced: list[torch.fx.GraphModule]) -> None:
    plain = step_runner("latent", fused=True)
    before = plain.run()
    made, _ = compiled(plain, skip_moe=True)
    made.run()
    moes = [layer.mlp for layer in plain.network.layers if isinstance(layer.mlp, MoE)]
    assert all(moe.apart is None and moe.fused for moe in moes)
    assert torch.equal(plain.run(), before)


@torch.no_grad()
def test_given_routings_are_read_anew(traced: list[torch.fx.GraphModule]) -> None:
    plain = step_runner("latent", routing="uniform", output_len=5)
    made, _ = compiled(plain)
    assert torch.equal(made.run(), plain.run())
    assert len(traced) == 1


def test_without_compile_the_plain_function_runs() -> None:
    plain = step_runner("dense")
    decode = CompiledDecode(plain.network, plain.cache, Compile.NONE)
    assert decode.pick(1) is decode.plain
    assert not decode.compiles(1)
