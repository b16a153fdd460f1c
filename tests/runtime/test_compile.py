"""Compiled layers: counted, strict, cold on demand."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from moe_kernels import fused_experts
from moe_kernels.testing.oracle import random_problem

from workbench.modes import Compile
from workbench.runtime.compile import CompileCount, cold_caches, compile_count, compile_layer, strict_recompiles
from workbench.runtime.inputs import Inputs, layer_function

# torch's own, from inside inductor's first import.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with torch.no_grad():
        yield
    torch._dynamo.reset()


def test_none_is_the_function_itself() -> None:
    def layer(x: torch.Tensor, w: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return x

    assert compile_layer(layer, Compile.NONE, dynamic=False) is layer


def test_one_dynamic_graph_serves_every_size_and_is_right() -> None:
    x, weights, routing = random_problem(64, 4, 32, 16, 2, "bf16")
    function = compile_layer(layer_function(weights, "reference"), Compile.DEFAULT, dynamic=True)
    counts: list[CompileCount] = []
    for tokens in (3, 2, 64, 32):  # 2 is top_k, 32 the hidden size: sizes must not be taken for one another
        part = type(routing)(routing.topk_weights[:tokens].clone(), routing.topk_ids[:tokens].clone())
        before = compile_count()
        out = Inputs(x[:tokens], part).call(function)
        counts.append(compile_count().since(before))
        want = fused_experts(x[:tokens], weights, part, impl="reference")
        torch.testing.assert_close(out, want, rtol=0.02, atol=0.02)
    assert [count.graphs for count in counts] == [1, 0, 0, 0]
    assert counts[0]
    assert not counts[1]
    assert counts[0].graph_breaks == 0


def test_a_graph_break_is_an_error() -> None:
    def breaks(x: torch.Tensor, w: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x + 1

    with pytest.raises(torch._dynamo.exc.Unsupported):
        Inputs(torch.ones(2, 4), random_problem(2, 2, 4, 4, 1)[2]).call(
            compile_layer(breaks, Compile.DEFAULT, dynamic=False)
        )


def test_running_out_of_recompiles_is_an_error_inside_the_scope_alone() -> None:
    function = torch.compile(lambda x: x + 1, backend="eager", dynamic=False)

    def many() -> None:
        for size in range(2, 20):
            function(torch.ones(size))

    with strict_recompiles(), pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        many()
    assert torch._dynamo.config.fail_on_recompile_limit_hit is False


def test_cold_caches_are_empty_folders_and_the_old_ones_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/somewhere")
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    with cold_caches():
        inside = os.environ["TORCHINDUCTOR_CACHE_DIR"]
        assert inside != "/somewhere"
        assert os.listdir(inside) == []
        assert os.environ["TRITON_CACHE_DIR"].startswith(inside)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/somewhere"
    assert "TRITON_CACHE_DIR" not in os.environ
    assert not os.path.exists(inside)
