"""The check of a whole step: right ones pass, and every broken part is found in the layer where it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from moe_kernels import Routing
from step_cases import step_runner

from workbench.check.step import check_step, plain_backends
from workbench.check.step_trace import checked_sequences, trace_step
from workbench.models.network.moe import MoE
from workbench.record import Correctness
from workbench.runtime.kv_cache import LayerCache
from workbench.runtime.step import StepRunner

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


def nothing() -> None:
    pass


@torch.no_grad()
def judged(runner: StepRunner) -> Correctness:
    return check_step(runner, trace_step(runner, nothing), nothing)


@pytest.mark.parametrize("quant", ["fp32", "bf16", "fp8_block", "int8", "int4"])
@pytest.mark.parametrize("case", ["dense", "latent"])
def test_a_right_step_passes(case: str, quant: str) -> None:
    found = judged(step_runner(case, quant=quant))
    assert found.passed, found.reason
    assert found.step is not None
    assert found.step.first_bad_layer is None
    assert found.step.layers_checked == len(found.step.layer_errors) == 3
    assert found.step.positions == found.rows_checked == 3 * 4
    assert found.rows == 12
    assert found.ratio is not None
    assert 0 < found.ratio <= 1
    if quant == "fp32":
        assert found.step.top1_agreement == 1
        assert found.step.kl is not None
        assert found.step.kl < 1e-9
        assert found.total.relative_l2 is not None
        assert found.total.relative_l2 < 1e-5
        assert found.routing_flips in (None, 0)


@pytest.mark.parametrize("prefill", ["absorbed", "expanded"])
@pytest.mark.parametrize("decode", ["absorbed", "expanded"])
def test_both_forms_of_latent_attention_pass(prefill: str, decode: str) -> None:
    found = judged(step_runner("latent", mla_prefill=prefill, mla_decode=decode))
    assert found.passed, found.reason


@pytest.mark.parametrize("routing", ["balanced", "single_expert", "zipf"])
def test_given_routings_are_the_oracles_too(routing: str) -> None:
    runner = step_runner("latent", routing=routing)
    found = judged(runner)
    assert found.passed, found.reason
    assert found.routing_flips is None
    moe = runner.network.layers[1].mlp
    assert isinstance(moe, MoE)
    assert moe.forced is not None


@pytest.mark.parametrize("quant", ["fp32", "bf16", "fp8_block"])
@pytest.mark.parametrize("case", ["dense", "latent"])
def test_a_fused_step_passes(case: str, quant: str) -> None:
    runner = step_runner(case, quant=quant, fused=True)
    found = judged(runner)
    assert found.passed, found.reason
    assert runner.network.layers[0].fused


Break = Callable[[StepRunner, pytest.MonkeyPatch], None]


def scale_attention(runner: StepRunner, patch: pytest.MonkeyPatch) -> None:
    """One layer's attention a fiftieth too large in what it does, in decode alone."""
    attention = runner.network.layers[1].attention
    forward = attention.forward

    def wrong(x: torch.Tensor, batch: Any, *rest: Any) -> torch.Tensor:
        out: torch.Tensor = forward(x, batch, *rest)
        return out * 1.02 if batch.kind == "decode" else out

    # The class's own is what the oracle and plain code run.
    patch.setattr(attention, "forward", wrong)


def lose_writes(runner: StepRunner, patch: pytest.MonkeyPatch) -> None:
    """The last layer's cache keeps a token's keys one slot off."""
    own = runner.cache.layers[2]

    def wrong(k: torch.Tensor, v: torch.Tensor | None, slots: torch.Tensor) -> None:
        LayerCache.write(own, k, v, slots.roll(1))

    patch.setattr(own, "write", wrong)


def forget_positions(runner: StepRunner, patch: pytest.MonkeyPatch) -> None:
    """Decode believes that it is one token further on than it is."""
    decode = runner.decode_batch

    def wrong(step: int, ids: torch.Tensor) -> Any:
        return decode(step + 1, ids)

    patch.setattr(runner, "decode_batch", wrong)


def scale_head(runner: StepRunner, patch: pytest.MonkeyPatch) -> None:
    head = runner.network.lm_head
    patch.setattr(head, "forward", lambda x: torch.nn.functional.linear(x, head.weight) * 1.001)


BREAKS: list[tuple[Break, int | None, str]] = [
    (scale_attention, 1, "layer 1 is off by .* in decode, above its budget"),
    (lose_writes, 2, "layer 2 is off by"),
    (forget_positions, 0, "NaN or infinity from layer 0 on|layer 0 is off by .* in decode"),
    (scale_head, None, "the logits are off by"),
]


@pytest.mark.parametrize("case", ["dense", "latent"])
@pytest.mark.parametrize(("wrong", "layer", "reason"), BREAKS, ids=lambda value: getattr(value, "__name__", None))
def test_a_broken_part_is_found_where_it_is(
    case: str, wrong: Break, layer: int | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import re

    runner = step_runner(case)
    wrong(runner, monkeypatch)
    with plain_of_class(runner, monkeypatch):
        found = judged(runner)
    assert not found.passed
    assert re.search(reason, found.reason), found.reason
    if found.step is not None:
        assert found.step.first_bad_layer == layer


class plain_of_class:  # noqa: N801 - reads as a context
    """Plain code must not run the broken instance: take its patch off while references are in force."""

    def __init__(self, runner: StepRunner, patch: pytest.MonkeyPatch) -> None:
        import workbench.check.step as module

        def without(layer: torch.nn.Module) -> Any:
            inner = plain_backends(layer)  # type: ignore[arg-type]

            class Both:
                def __enter__(self) -> None:
                    self.kept = {m: m.__dict__.pop("forward") for m in layer.modules() if "forward" in m.__dict__}
                    inner.__enter__()

                def __exit__(self, *error: Any) -> None:
                    inner.__exit__(*error)
                    for one, forward in self.kept.items():
                        one.__dict__["forward"] = forward

            return Both()

        patch.setattr(module, "plain_backends", without)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass


def test_a_wrong_gate_is_no_near_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = step_runner("latent")
    moe = runner.network.layers[1].mlp
    assert isinstance(moe, MoE)
    gate = moe.gate

    class Wrong(torch.nn.Module):
        shape = gate.shape

        def forward(self, x: torch.Tensor) -> Routing:
            routing = gate(x)
            return Routing(routing.topk_weights, (routing.topk_ids + 1) % gate.shape.num_experts)

    upcast = moe.upcast
    monkeypatch.setattr(moe, "upcast", lambda: _with_gate(upcast(), gate))
    moe.gate = Wrong()  # type: ignore[assignment]
    found = judged(runner)
    assert not found.passed
    assert "layer 1 chose other experts than its oracle for 100% of prefill" in found.reason
    assert found.routing_flips == 3 * 11 + 3 * 3
    assert found.step is not None
    assert found.step.first_bad_layer == 1


def _with_gate(moe: MoE, gate: Any) -> MoE:
    moe.gate = gate
    return moe


def test_values_that_were_never_written_show() -> None:
    runner = step_runner("dense")
    write = runner.cache.layers[0].write
    runner.cache.layers[0].write = lambda k, v, slots: write(k[1:], v[1:], slots[1:])  # type: ignore[method-assign, index]
    found = judged(runner)
    assert not found.passed
    assert found.reason.startswith("decode step 1 gave NaN or infinity from layer 0 on")
    assert found.step is None


@pytest.mark.parametrize(
    ("batch_size", "input_len", "rows", "expected"),
    [(8, 4, 12, [0, 4, 7]), (1, 100, 12, [0]), (5, 100, 12, [0]), (3, 1, 12, [0, 1, 2]), (2, 6, 12, [0, 1])],
)
def test_sequences_that_are_looked_at(batch_size: int, input_len: int, rows: int, expected: list[int]) -> None:
    assert checked_sequences(batch_size, input_len, rows).tolist() == expected


def test_plain_code_goes_by_references_and_back() -> None:
    layer = step_runner("latent", attention_backend="sdpa").network.layers[1]
    before = [(layer.attention.impl, layer.mlp.backend, layer.attention.out.impl)]
    with plain_backends(layer):
        inside = [(layer.attention.impl, layer.mlp.backend, layer.attention.out.impl)]
    after = [(layer.attention.impl, layer.mlp.backend, layer.attention.out.impl)]
    assert inside == [("reference", "reference", "reference")]
    assert before == after == [("sdpa", "reference", None)]


def test_only_some_sequences_of_a_large_batch_are_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workbench.check.step_trace.MAX_ROWS", {"cpu": 25})
    found = judged(step_runner("latent", batch_size=5))
    assert found.passed, found.reason
    assert found.rows_checked == 2 * 4
    assert found.rows == 20
