"""The specification of token alignment, against its worked example and a loop."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_kernels import moe_align


def align_by_loop(ids, num_experts, block_m, num_blocks):
    """(sorted_rows, block_experts, num_padded) as plain lists."""
    rows, experts, flat = [], [], ids.reshape(-1).tolist()
    for expert in range(num_experts):
        mine = [row for row, e in enumerate(flat) if e == expert]
        blocks = -(-len(mine) // block_m)
        rows += mine + [len(flat)] * (blocks * block_m - len(mine))
        experts += [expert] * blocks
    used = len(rows)
    rows += [len(flat)] * (num_blocks * block_m - used)
    return rows, experts + [-1] * (num_blocks - len(experts)), [used]


def test_worked_example():
    ids = torch.tensor([[2, 0], [2, 7], [0, 2]], dtype=torch.int32)
    rows, experts, padded = moe_align(ids, 3, 2)
    assert rows.tolist() == [1, 4, 0, 2, 5, 6, 6, 6]
    assert experts.tolist() == [0, 2, 2, -1]
    assert padded.tolist() == [6]


@settings(max_examples=60, deadline=None)
@given(
    num_tokens=st.sampled_from([0, 1, 5, 17, 40]),
    top_k=st.sampled_from([1, 3, 6, 9]),
    num_experts=st.sampled_from([1, 3, 5, 60, 513]),
    block_m=st.sampled_from([1, 2, 16, 64]),
    seed=st.integers(0, 3),
)
def test_equals_a_loop(num_tokens, top_k, num_experts, block_m, seed):
    generator = torch.Generator().manual_seed(seed)
    # Beyond both ends: below 0 and from E up are dropped.
    ids = torch.randint(-2, num_experts + 2, (num_tokens, top_k), generator=generator).int()
    result = moe_align(ids, num_experts, block_m)
    want = align_by_loop(ids, num_experts, block_m, result.block_experts.numel())
    assert [tensor.tolist() for tensor in result] == list(want)
    assert all(tensor.dtype == torch.int32 for tensor in result)


@pytest.mark.parametrize("expert", [0, 4])
def test_all_rows_to_one_expert(expert):
    rows, experts, padded = moe_align(torch.full((33, 1), expert, dtype=torch.int32), 5, 16)
    assert padded.tolist() == [48]
    assert experts.tolist()[:3] == [expert] * 3
    assert rows.tolist()[:33] == list(range(33))


def test_every_row_dropped():
    rows, experts, padded = moe_align(torch.full((4, 2), -1, dtype=torch.int32), 3, 4)
    assert padded.tolist() == [0]
    assert set(experts.tolist()) == {-1}
    assert set(rows.tolist()) == {8}


def test_arguments_are_refused_by_name():
    ids = torch.zeros(2, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"^topk_ids_TK must be int32"):
        moe_align(ids.long(), 3, 16)
    with pytest.raises(ValueError, match=r"^num_experts must be at least 1; got 0"):
        moe_align(ids, 0, 16)
    with pytest.raises(ValueError, match=r"^block_m must be a power of two; got 24"):
        moe_align(ids, 3, 24)


def test_op_passes_opcheck():
    ids = torch.tensor([[2, 0], [2, 7], [0, 2]], dtype=torch.int32)
    for args in ((ids, 3, 2), (ids[:0], 3, 2), (ids, 60, 16)):
        torch.library.opcheck(torch.ops.moe_kernels.moe_align.default, args)


def test_compiles_for_any_token_count():
    compiled = torch.compile(lambda ids: moe_align(ids, 5, 4), fullgraph=True, backend="aot_eager", dynamic=True)
    for num_tokens in (7, 3, 12):
        ids = torch.randint(0, 5, (num_tokens, 2), generator=torch.Generator().manual_seed(num_tokens)).int()
        for got, want in zip(compiled(ids), moe_align(ids, 5, 4), strict=True):
            assert torch.equal(got, want)
