"""The gate and the preparation compile for compute capability 9.0 as they would be launched, with no GPU at hand."""

import pytest
import torch

pytest.importorskip("triton")

from moe_kernels.routing.triton import launch_prepare, launch_select
from moe_kernels.testing.offline import compile_only


def empty(*sizes, dtype=torch.float32):
    return torch.empty(*sizes, dtype=dtype, device="meta")


@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k", "groups", "kept", "group_score", "scoring", "biased"), [
    (1, 8, 2, 1, 1, "max", "softmax", False),
    (4096, 128, 8, 1, 1, "max", "softmax", False),
    (4096, 256, 8, 8, 4, "top2_sum", "sigmoid", True),
    (8, 160, 6, 8, 3, "max", "softmax", False),
    (4096, 1024, 1024, 1, 1, "max", "softmax", False),
    (17, 4096, 100, 16, 4, "top2_sum", "softmax", False),
    (9, 77, 77, 7, 7, "top2_sum", "sigmoid", True),
    (1, 1, 1, 1, 1, "max", "sigmoid", False),
])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gate(num_tokens, num_experts, top_k, groups, kept, group_score, scoring, biased, dtype):
    bias = empty(num_experts) if biased else None
    with compile_only(90) as kernels:
        launch_select(
            empty(num_tokens, num_experts, dtype=dtype), top_k, scoring, True, bias, groups, kept, group_score, 2.5
        )
    (kernel,) = kernels
    assert kernel.name == "gate_kernel"
    assert kernel.grid[0] >= min(num_tokens, 64)
    # The choice is a loop, so that the code does not grow with top_k.
    assert len(kernel.ptx) < 200_000


@pytest.mark.parametrize("mapped", [False, True])
def test_preparation(mapped):
    ids = empty(40, 6, dtype=torch.int32)
    with compile_only(90) as kernels:
        launch_prepare(empty(40, 6), ids, 64, 2, empty(128, dtype=torch.int32) if mapped else None)
    assert [kernel.name for kernel in kernels] == ["prepare_kernel"]


def test_no_tokens_compile_nothing():
    with compile_only(90) as kernels:
        launch_select(empty(0, 64), 8, "softmax", True, None, 1, 1, "max", 1.0)
        launch_prepare(empty(0, 8), empty(0, 8, dtype=torch.int32), 64, 1, None)
    assert kernels == []
