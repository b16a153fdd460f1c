"""Every weight format, layout and split through Triton's interpreter; test_interpreted.py runs this file.

The interpreter multiplies bf16 wrongly, so activations are float32 or float16 here.
"""

import pytest
import torch
from moe_kernels import Routing, fused_experts
from moe_kernels.testing.oracle import (
    error_budget,
    oracle,
    poison_allocator,
    random_problem,
    relative_error,
    tag_expected,
    tag_problem,
)

TILES = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 16, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 2, "num_warps": 4, "num_stages": 2}
LAYOUTS = {
    "sorted": TILES,
    "inline": {**TILES, "LAYOUT": "inline", "BLOCK_SIZE_K": 128},
    "token": {**TILES, "LAYOUT": "token", "BLOCK_SIZE_M": 1, "BLOCK_SIZE_N": 4, "BLOCK_SIZE_K": 128},
    "swapped": {**TILES, "SWAP_AB": True, "BLOCK_SIZE_N": 64},
    "blocks": {"up": {**TILES, "BLOCK_SIZE_N": 128}, "down": TILES},
    "split": {**TILES, "SPLIT_K": 3},
}
FORMATS = {
    "fp8_tensor": {"quant": "fp8_tensor"},
    "fp8_channel": {"quant": "fp8_channel"},
    "fp8_block": {"quant": "fp8_block"},
    "int8": {"quant": "int8"},
    "int8_weight": {"quant": "int8_weight"},
    "int4-32": {"quant": "int4", "group_size": 32},
    "int4-128-zeros": {"quant": "int4", "group_size": 128, "zero_points": True},
    "nvfp4": {"quant": "nvfp4"},
    "mxfp4": {"quant": "mxfp4"},
}

# Gate and up swapped would be 20 % off.
TAG_RTOL = {"nvfp4": 0.1, "int4-32": 0.1}


# The interpreter takes seconds a case: every format with one layout each of rows and tiles, all of them on a GPU.
CASES = [
    *((form, layout) for form, layout in zip(FORMATS, [*LAYOUTS, *LAYOUTS], strict=False)),
    ("fp8_block", "blocks"),
    ("fp8_block", "swapped"),
    *((form, "token") for form in ("int8", "nvfp4", "int4-32")),
    ("mxfp4", "inline"),
]


@pytest.mark.parametrize(("form", "layout"), CASES)
def test_within_budget(form, layout):
    # Tails everywhere: neither D nor F is a multiple of 16, 32 or 128, and gate and up part inside a block of 128.
    problem = random_problem(4, 3, 136, 40, 2, dtype=torch.float16, **FORMATS[form])
    problem[2].topk_ids[0, 1], problem[2].topk_ids[2] = -1, problem[2].topk_ids[2, 0].clone()
    before = problem[0].clone()
    poison_allocator("cpu", 8 * 80 * 4, 8 * 136 * 4, 8 * 40 * 2, 8 * 136 * 2, 4 * 136 * 2)
    out = fused_experts(*problem, impl="triton", config=LAYOUTS[layout])
    assert torch.equal(problem[0], before)
    assert relative_error(out, oracle(*problem)) <= error_budget(*problem)


@pytest.mark.parametrize("form", ["fp8_tensor", "fp8_block"])
def test_rows_that_nobody_wrote_may_hold_a_signalling_nan(form):
    problem = random_problem(4, 3, 136, 40, 2, dtype=torch.float16, **FORMATS[form])
    problem[2].topk_ids[0, 1], problem[2].topk_ids[2] = -1, problem[2].topk_ids[2, 0].clone()
    poison_allocator("cpu", *(8 * 80 * 4, 8 * 136 * 4, 8 * 40 * 2, 8 * 136 * 2) * 3, value=0x7D01, dtype=torch.int16)
    out = fused_experts(*problem, impl="triton", config=LAYOUTS["inline"])
    assert relative_error(out, oracle(*problem)) <= error_budget(*problem)


@pytest.mark.parametrize("form", ["fp8_block", "int8", "int4-32", "nvfp4", "mxfp4"])
def test_tag_tells_gate_from_up(form):
    x, weights = tag_problem(3, 5, 128, 64, dtype=torch.float32, **FORMATS[form])
    ids = torch.tensor([[4, 0], [-1, 2], [5, 5]]).int()
    routing = Routing(torch.tensor([[0.5, 0.25]] * 3), ids)
    out = fused_experts(x, weights, routing, impl="triton", config=LAYOUTS["sorted"])
    want = tag_expected(routing, 5)[:, None].expand(out.shape)
    if form == "mxfp4":  # a scale that is a power of two puts a constant 20 % off: as stored, then
        want = oracle(x, weights, routing)
    torch.testing.assert_close(out.double(), want, rtol=TAG_RTOL.get(form, 0.05), atol=0)


@pytest.mark.parametrize(
    ("layout", "split_k", "reduction"),
    [
        ("sorted", 2, "deterministic"),
        ("sorted", 3, "atomic"),
        ("inline", 5, "deterministic"),
        ("inline", 8, "atomic"),
        ("swapped", 16, "deterministic"),
    ],
)
def test_splits_of_any_number(layout, split_k, reduction):
    problem = random_problem(4, 3, 136, 40, 2, dtype=torch.float16, quant="fp16")
    config = {**LAYOUTS[layout], "BLOCK_SIZE_K": 32}
    for _ in range(2):
        poison_allocator("cpu", 8 * 80 * 4, split_k * 8 * 80 * 4, split_k * 8 * 136 * 4, 4 * 136 * 4, value=1e30)
        out = fused_experts(*problem, impl="triton", config=config, split_k=split_k, reduction=reduction)
        assert relative_error(out, oracle(*problem)) <= error_budget(*problem)


@pytest.mark.parametrize(("form", "columns", "split_k"), [("fp8_block", 1000, 2), ("nvfp4", 1408, 8)])
def test_split_of_columns_that_are_no_multiple(form, columns, split_k):
    problem = random_problem(1, 2, columns, 32, 1, dtype=torch.float16, **FORMATS[form])
    out = fused_experts(*problem, impl="triton", split_k=split_k)
    assert relative_error(out, oracle(*problem)) <= error_budget(*problem)


@pytest.mark.parametrize("layout", ["sorted", "token"])
@pytest.mark.parametrize("form", [None, "fp8_block", "nvfp4"])
def test_router_weight_on_the_input(form, layout):
    options = FORMATS[form] if form else {"quant": "fp32"}
    x, weights = tag_problem(3, 4, 128, 64, **({"dtype": torch.float32} if form else {}), **options)
    routing = Routing(torch.full((3, 1), 0.5), torch.tensor([[0], [3], [-1]]).int())
    config = {**LAYOUTS[layout]}
    on_input = fused_experts(x, weights, routing, impl="triton", config=config, router_weight_on_input=True)
    on_output = fused_experts(x, weights, routing, impl="triton", config=config)
    tags = torch.tensor([1.0, 15.0, 0.0])[:, None].expand(3, 128)  # tag_value(0) and tag_value(3)
    tolerance = {None: 1e-5, "fp8_block": 0.05, "nvfp4": 0.1}[form]
    torch.testing.assert_close(on_input, 0.311230 * tags, rtol=tolerance, atol=1e-5)
    torch.testing.assert_close(on_output, 0.731059 * tags, rtol=tolerance, atol=1e-5)
