"""prepare_routing: shared experts as slots, maps from global to local ids, ids that name nothing."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_kernels import Routing, select_experts
from moe_kernels.routing.prepare import prepare_routing


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


def test_the_shared_slot_is_expert_e_with_weight_1():
    logits = torch.randn(9, 384, generator=torch.Generator().manual_seed(0))
    kinds = {"scoring": "sigmoid", "renormalize": True, "routed_scaling_factor": 2.5}
    routed = select_experts(logits, 6, **kinds)
    fused = prepare_routing(routed, 384, 1)
    assert fused.topk_ids.shape == fused.topk_weights.shape == (9, 7)
    assert bool((fused.topk_ids[:, 6] == 384).all())
    assert bool((fused.topk_weights[:, 6] == 1.0).all())
    # The other slots are the 6 best, scaled once.
    assert torch.equal(fused.topk_ids[:, :6], logits.topk(6).indices.int())
    torch.testing.assert_close(fused.topk_weights[:, :6].sum(dim=-1), torch.full((9,), 2.5))
    # Expert e gives e + 1: fused equals the routed part and the shared expert beside it.
    total = (fused.topk_weights.double() * (fused.topk_ids + 1)).sum(dim=-1)
    apart = (routed.topk_weights.double() * (routed.topk_ids + 1)).sum(dim=-1) + 385
    torch.testing.assert_close(total, apart)


@pytest.mark.parametrize("num_shared", [0, 1, 3])
def test_several_shared_experts_and_none(num_shared):
    routing = Routing(torch.tensor([[0.75, 0.25]]), int32([[2, 0]]))
    got = prepare_routing(routing, 3, num_shared)
    assert got.topk_ids.tolist() == [[2, 0, *range(3, 3 + num_shared)]]
    assert got.topk_weights.tolist() == [[0.75, 0.25, *[1.0] * num_shared]]
    got.topk_weights.zero_()  # never the tensors that came in
    got.topk_ids.zero_()
    assert routing.topk_ids.tolist() == [[2, 0]]
    assert routing.topk_weights.tolist() == [[0.75, 0.25]]


def test_ids_that_name_no_expert_held_here_become_minus_1():
    ids = int32([[0, 3, -1, 4], [-(2**31), 2**31 - 1, 2, 1]])
    assert prepare_routing(Routing(torch.ones(2, 4), ids), 3, 1).topk_ids.tolist() == [
        [0, -1, -1, -1, 3],
        [-1, -1, 2, 1, 3],
    ]


def test_a_map_names_local_experts_and_never_a_shared_one():
    mapping = int32([-1, 1, -1, 0, 2, 3, -9])  # 3 is the shared expert here, which no router may name
    ids = int32([[0, 1, 2, 3], [4, 5, 6, 7], [-1, -2, 1, 1]])
    got = prepare_routing(Routing(torch.full((3, 4), 0.25), ids), 3, 1, mapping)
    assert got.topk_ids.tolist() == [[-1, 1, -1, 0, 3], [2, -1, -1, -1, 3], [-1, -1, 1, 1, 3]]
    assert bool((got.topk_weights[:, :4] == 0.25).all())


def test_ranks_share_out_the_experts():
    ids = torch.randint(0, 10, (40, 3), generator=torch.Generator().manual_seed(0)).int()
    held = [[7, 2, 5], [0, 9, 1, 3], [8, 4, 6]]
    seen = torch.zeros(40, 3, dtype=torch.int64)
    for experts in held:
        mapping = torch.full((10,), -1, dtype=torch.int32)
        mapping[experts] = torch.arange(len(experts), dtype=torch.int32)
        local = prepare_routing(Routing(torch.ones(40, 3), ids), len(experts), 0, mapping).topk_ids
        mine = local >= 0
        assert torch.equal(torch.tensor(experts)[local[mine].long()], ids[mine].long())
        seen += mine
    assert bool((seen == 1).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_weights_of_other_dtypes_are_read_as_what_they_are(dtype):
    got = prepare_routing(Routing(torch.tensor([[0.5]], dtype=dtype), int32([[0]])), 1, 1)
    assert got.topk_weights.dtype == torch.float32
    assert got.topk_weights.tolist() == [[0.5, 1.0]]


@pytest.mark.parametrize("top_k", [1, 2, 6, 8])
def test_no_tokens(top_k):
    got = prepare_routing(Routing(torch.empty(0, top_k), torch.empty(0, top_k, dtype=torch.int32)), 8, 1)
    assert got.topk_ids.shape == got.topk_weights.shape == (0, top_k + 1)
    assert (got.topk_weights.dtype, got.topk_ids.dtype) == (torch.float32, torch.int32)


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(0, 5),
    top_k=st.integers(0, 5),
    num_routed=st.integers(0, 9),
    num_shared=st.integers(0, 3),
    mapping=st.none() | st.lists(st.integers(-2, 12), max_size=12),
    seed=st.integers(0, 2**31),
)
def test_equals_a_loop(tokens, top_k, num_routed, num_shared, mapping, seed):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-3, 14, (tokens, top_k), generator=generator).int()
    weights = torch.rand(tokens, top_k, generator=generator)
    got = prepare_routing(Routing(weights, ids), num_routed, num_shared, None if mapping is None else int32(mapping))

    def local(expert):
        if mapping is not None:
            expert = mapping[expert] if 0 <= expert < len(mapping) else -1
        return expert if 0 <= expert < num_routed else -1

    shared = [num_routed + s for s in range(num_shared)]
    assert got.topk_ids.tolist() == [[*map(local, row), *shared] for row in ids.tolist()]
    assert got.topk_weights.tolist() == [[*row, *[1.0] * num_shared] for row in weights.tolist()]


def test_opcheck_and_one_compiled_graph():
    op = torch.ops.moe_kernels.prepare_routing.default
    torch.library.opcheck(op, (torch.rand(3, 2), int32([[0, 1]] * 3), 4, 2, None))
    torch.library.opcheck(op, (torch.rand(3, 2), int32([[0, 1]] * 3), 4, 0, int32([1, 0, -1])))
    torch.library.opcheck(op, (torch.rand(0, 2), torch.empty(0, 2, dtype=torch.int32), 4, 1, None))
    compiled = torch.compile(lambda w, i: prepare_routing(Routing(w, i), 4, 1), fullgraph=True, backend="aot_eager")
    assert compiled(torch.ones(1, 2), int32([[3, 4]])).topk_ids.tolist() == [[3, -1, 4]]


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"ids": torch.zeros(2, 3, dtype=torch.int64)}, r"topk_ids must be int32 \[T, K\]; got torch.int64 \[2, 3\]\."),
        ({"ids": int32([0, 1, 2])}, r"topk_ids must be int32 \[T, K\]; got torch.int32 \[3\]\."),
        ({"weights": torch.ones(2, 4)}, r"topk_weights must be a floating-point tensor \[2, 3\]; got torch.float32"),
        ({"weights": torch.ones(2, 3, device="meta")}, "topk_weights must be on cpu, as topk_ids are; got meta"),
        ({"num_routed": -1}, "num_routed must be at least 0; got -1"),
        ({"num_shared": -1}, "num_shared must be at least 0, and ids must fit in int32; got -1"),
        ({"num_shared": 2**31}, "num_shared must be at least 0, and ids must fit in int32"),
        ({"expert_map": torch.zeros(4)}, r"expert_map must be int32 \[G\]; got torch.float32 \[4\]"),
        ({"expert_map": int32([[0]])}, r"expert_map must be int32 \[G\]; got torch.int32 \[1, 1\]"),
        ({"expert_map": torch.zeros(4, dtype=torch.int32, device="meta")}, "expert_map must be on cpu, as topk_ids"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_what_does_not_fit_is_one_sentence(values, sentence):
    given = {"weights": torch.ones(2, 3), "ids": torch.zeros(2, 3, dtype=torch.int32), "num_routed": 4} | values
    routing = Routing(given.pop("weights"), given.pop("ids"))
    with pytest.raises(ValueError, match=f"^{sentence}"):
        prepare_routing(routing, **given)
