"""Candidates are legal, hold every kind that makes sense, and say what was left out."""

import pytest
from moe_kernels.experts.config import flatten_config
from moe_kernels.names import Quant
from moe_kernels.tuning.names import Problem
from moe_kernels.tuning.rows import config_fault, reach_fault

from workbench.tune.candidates import MOST, candidates, compatible, partner

H200 = 232448
MODELS = {
    "mixtral": (8, 4096, 14336, 2),
    "qwen3": (128, 2048, 768, 8),
    "v3": (256, 7168, 2048, 8),
    "odd": (5, 40, 23, 3),
}


def make(model, quant, tokens):
    experts, hidden, ffn, top_k = MODELS[model]
    dtype = quant if quant in ("fp32", "fp16") else "bf16"
    return Problem(tokens, experts, hidden, ffn, top_k, quant, dtype, 128)


@pytest.mark.parametrize("tokens", [1, 8, 33, 128, 1024, 4096])
@pytest.mark.parametrize("quant", list(Quant))
@pytest.mark.parametrize("model", MODELS)
def test_every_candidate_can_be_launched_and_has_a_partner(model, quant, tokens):
    problem = make(model, quant, tokens)
    grids = {which: candidates(which, problem, H200) for which in ("up", "down")}
    for which, grid in grids.items():
        assert 1 <= len(grid.kept) <= MOST
        assert len({tuple(sorted(row.items())) for row in grid.kept}) == len(grid.kept)
        others = grids["down" if which == "up" else "up"].kept
        for row in grid.kept:
            other = partner(which, row, others)
            assert other is not None
            up, down = (row, other) if which == "up" else (other, row)
            assert compatible(up, down)
            config = {"up": up, "down": down, "PDL": False}
            assert config_fault(config, problem, H200) == ""
            assert reach_fault(config, tokens, problem) == ""
            flatten_config(config)


def test_kinds_where_they_make_sense():
    def kinds(tokens, quant="bf16", model="qwen3", which="up"):
        rows = candidates(which, make(model, quant, tokens), H200).kept
        return {
            *(row["LAYOUT"] for row in rows),
            *("swap" for row in rows if row["SWAP_AB"]),
            *("split" for row in rows if row["SPLIT_K"] > 1),
            *("tma" for row in rows if row["USE_TMA"]),
        }

    assert kinds(1) == {"token", "inline", "swap", "split"}
    assert kinds(8) == {"inline", "swap"}
    assert kinds(32) == {"inline", "sorted", "swap"}
    assert kinds(4096) == {"sorted", "tma"}
    assert kinds(1, "fp32") == {"token", "inline", "sorted"}
    assert "swap" in kinds(64, "int4", "mixtral", "down")


def test_tiles_of_block_scales_are_kept_out_beforehand():
    for tokens in (8, 128, 4096):
        grid = candidates("up", make("v3", "fp8_block", tokens), H200)
        assert {row["BLOCK_SIZE_K"] for row in grid.kept} == {64, 128}


def test_what_is_left_out_is_counted():
    problem = make("mixtral", "bf16", 4096)
    large, small = candidates("up", problem, H200, most=1000), candidates("up", problem, 101376, most=1000)
    assert large.skipped["too large for the shared memory"] < small.skipped["too large for the shared memory"]
    total = len(large.kept) + sum(large.skipped.values())
    assert total == len(small.kept) + sum(small.skipped.values())
    few = candidates("up", problem, H200, most=10)
    assert few.skipped["more than 10"] == len(large.kept) - 10
    assert all(row in large.kept for row in few.kept)


def test_a_choice_leaves_every_kind_in_and_is_seeded():
    problem = make("mixtral", "bf16", 1)
    first, again = candidates("up", problem, H200, most=12), candidates("up", problem, H200, most=12)
    other = candidates("up", problem, H200, most=12, seed=1)
    assert first == again
    assert first.kept != other.kept
    assert {row["LAYOUT"] for row in first.kept[:6]} == {"token", "inline"}
    assert any(row["SWAP_AB"] for row in first.kept)


def test_partners_are_the_same_for_a_kind_and_share_its_blocks():
    problem = make("qwen3", "bf16", 128)
    up, down = (candidates(which, problem, H200, most=1000).kept for which in ("up", "down"))
    by_kind = {}
    for row in up:
        other = partner("up", row, down)
        by_kind.setdefault((row["LAYOUT"], row["BLOCK_SIZE_M"]), []).append(other)
        assert (other["LAYOUT"], other["BLOCK_SIZE_M"]) == (row["LAYOUT"], row["BLOCK_SIZE_M"])
        assert not other["SWAP_AB"]
    assert all(other == others[0] for others in by_kind.values() for other in others)
    sorted32 = next(row for row in up if row["LAYOUT"] == "sorted" and row["BLOCK_SIZE_M"] == 32)
    only16 = [row for row in down if row["LAYOUT"] == "sorted" and row["BLOCK_SIZE_M"] == 16]
    assert partner("up", sorted32, only16) is None
