"""Replayed steps against eager ones: right ones pass, stale and padded ones are found."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from step_cases import step_runner

sys.path.insert(0, str(Path(__file__).parent.parent / "runtime"))
from test_step_decode import Playback, captured

from workbench.check.step import check_step
from workbench.check.step_mode import check_mode
from workbench.check.step_trace import trace_step
from workbench.record import Correctness


def nothing() -> None:
    pass


@torch.no_grad()
def judged(room: int, quant: str = "fp32", case: str = "dense", change: Any = None) -> Correctness:
    plain = step_runner(case, quant=quant)
    trace = trace_step(plain, nothing)
    eager = check_step(plain, trace, nothing)
    assert eager.passed, eager.reason
    made = captured(plain, room)
    if change is not None:
        change(made)
    return check_mode(made, trace, eager, nothing)


@pytest.mark.parametrize("case", ["dense", "latent"])
@pytest.mark.parametrize("quant", ["fp32", "bf16", "fp8_tensor"])
@pytest.mark.parametrize("room", [3, 5])
def test_a_right_replay_passes(room: int, quant: str, case: str) -> None:
    found = judged(room, quant, case)
    assert found.passed, found.reason
    assert found.bitwise is True
    assert found.mode is not None
    assert found.mode_budget is not None
    assert found.mode.relative_l2 is not None
    assert found.mode.relative_l2 <= found.mode_budget


def test_a_replay_that_reads_old_tokens_is_found() -> None:
    def stale(made: Any) -> None:
        fill = made.buffers.fill
        made.buffers.fill = lambda ids, position: fill(torch.full_like(ids, 3), position)

    found = judged(3, change=stale)
    assert not found.passed
    assert "off from eager ones" in found.reason


def test_a_replay_of_other_bits_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def another(self: Playback) -> None:
        assert self.call is not None
        assert self.output is not None
        self.output.copy_(self.call())
        for logits in self.made.buffers.logits.values():  # type: ignore[attr-defined]
            logits[0, 0] += 1e-6

    def change(made: Any) -> None:
        Playback.made = made  # type: ignore[attr-defined]

    monkeypatch.setattr(Playback, "replay", another)
    found = judged(3, change=change)
    assert not found.passed
    assert found.bitwise is False
    assert found.reason == "a replayed decode step differs from the run without the graph at the same size"


def test_nothing_is_added_where_nothing_is_replayed() -> None:
    with torch.no_grad():
        plain = step_runner("dense", output_len=1)
        trace = trace_step(plain, nothing)
        eager = check_step(plain, trace, nothing)
        assert check_mode(captured(plain, 3), trace, eager, nothing) is eager
