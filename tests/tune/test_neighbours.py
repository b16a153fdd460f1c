"""Candidates of a quick search."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from moe_kernels.tuning.folders import add_config_folder, remove_config_folder
from moe_kernels.tuning.names import Problem
from moe_kernels.tuning.rows import config_fault

from workbench.errors import InvalidInput
from workbench.modes import Quant
from workbench.spec import RunSpec
from workbench.tune.candidates import compatible, partner
from workbench.tune.neighbours import MOST_NEIGHBOURS, neighbours
from workbench.tune.run import HOPPER_NAME, HOPPER_SHARED, TuneRequest, plan_cells


def problem_of(quant: str, tokens: int) -> Problem:
    group = 128 if quant == "int4" else 0
    return Problem(tokens, 64, 2048, 1408, 6, quant, {"fp32": "fp32", "fp16": "fp16"}.get(quant, "bf16"), group)


@pytest.mark.parametrize("tokens", [1, 16, 128, 2048])
@pytest.mark.parametrize("quant", [quant.value for quant in Quant if quant is not Quant.FP32])
def test_every_neighbour_may_be_launched_and_some_pair_fits(quant: str, tokens: int) -> None:
    problem = problem_of(quant, tokens)
    ups, downs = (neighbours(which, problem, HOPPER_SHARED, HOPPER_NAME).kept for which in ("up", "down"))
    assert 0 < len(ups) <= MOST_NEIGHBOURS
    assert 0 < len(downs) <= MOST_NEIGHBOURS
    pairs = [(up, down) for up in ups for down in downs if compatible(up, down)]
    assert pairs
    assert any(partner("up", up, downs) for up in ups)  # rows of older files leave keys out
    for up, down in pairs:
        assert config_fault({"up": up, "down": down, "PDL": False}, problem, HOPPER_SHARED) == ""
        assert tokens * problem.top_k <= 1024 or "inline" not in (up["LAYOUT"], down["LAYOUT"])


def test_the_same_rows_an_expert_come_before_the_same_format(tmp_path: Path) -> None:
    row = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 32, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1, "num_warps": 1}
    row |= {"num_stages": 2, "LAYOUT": "sorted", "USE_TMA": False, "SWAP_AB": False, "SPLIT_K": 1}
    other = {**row, "BLOCK_SIZE_N": 16}
    for word, tokens, mine in (("", 4096, row), (",dtype=int8_w8a16", 64, other)):
        content = {str(tokens): {"up": mine, "down": mine, "PDL": False, "hidden_size": 2048, "top_k": 6}}
        (tmp_path / f"E=64,N=1408,device_name=Some_GPU{word}_modes.json").write_text(json.dumps(content))
    add_config_folder(tmp_path)
    try:
        few = neighbours("up", problem_of("bf16", 64), HOPPER_SHARED, "Some GPU").kept
        many = neighbours("up", problem_of("int8_weight", 4096), HOPPER_SHARED, "Some GPU").kept
    finally:
        remove_config_folder(tmp_path)
    assert few == [other, row]
    assert many == [row, other]


def test_a_device_without_rows_is_told(tmp_path: Path) -> None:
    spec = RunSpec(model="deepseek-v2-lite")
    request = TuneRequest(spec=spec, tokens=(16,), out=tmp_path, quick=True)
    with pytest.raises(InvalidInput, match="quick: no row tuned on Some GPU is near enough to 16 tokens of bf16"):
        plan_cells(request, HOPPER_SHARED, "Some GPU")
