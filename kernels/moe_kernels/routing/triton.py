"""The gate and the preparation of a routing in Triton: one launch each.

The gate ranks integers rather than floats: ``key`` rises with the value, has one zero and puts NaN on top, so that
what comes out is a choice of K different experts in range whatever the logits hold.

Shapes: T tokens, E experts, K experts per token, G groups of S experts; BT tokens per program; GP, SP and KP are
powers of two not below G, S and K.
"""

# Triton gives its decorator and its device functions no types.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from moe_kernels.routing.reference import SMALLEST_SUM

_PREPARE_BLOCK = 512
_LOADABLE = (torch.float32, torch.bfloat16, torch.float16)
# Below every key of a value: what is padding, left out, or chosen already.
_GONE = tl.constexpr(-(2**31))
_TINY = tl.constexpr(SMALLEST_SUM)


@triton.jit
def _key(value):
    """int32 that orders as the float32 ``value`` does, zeros alike and NaN highest."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(value != value, 0x7FFFFFFF, key)


@triton.jit
def _value(key):
    """The float32 that ``_key`` made ``key`` from."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _best(key, index):
    """Along the last axis, the largest key and the lowest ``index`` that has it."""
    largest = tl.max(key, axis=1)
    return largest, tl.min(tl.where(key == largest[:, None], index, 0x7FFFFFFF), axis=1)


@triton.jit
def _score(logit, largest, total, SOFTMAX: tl.constexpr):
    if SOFTMAX:
        return tl.div_rn(tl.exp(logit - largest), tl.broadcast_to(total, logit.shape))
    return tl.div_rn(tl.full(logit.shape, 1.0, tl.float32), 1.0 + tl.exp(-logit))


@triton.jit
def _in_best_groups(
    key, sum_key, column, token_rows,
    G: tl.constexpr, S: tl.constexpr, GP: tl.constexpr, SP: tl.constexpr, KEPT: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """``key`` with ``_GONE`` outside of each token's best groups."""
    BT: tl.constexpr = key.shape[0]
    ranked = tl.reshape(sum_key, [BT * GP, SP])
    first, first_at = _best(ranked, tl.reshape(column, [BT * GP, SP]))
    if SUM and S > 1:
        rest = tl.where(tl.reshape(column, [BT * GP, SP]) == first_at[:, None], _GONE, ranked)
        first = _key(_value(first) + _value(tl.max(rest, axis=1)))
    group = tl.arange(0, GP)[None, :]
    left = tl.where(group < G, tl.reshape(first, [BT, GP]), _GONE)
    kept = tl.zeros([BT, GP], dtype=tl.int32)
    for _ in range(KEPT):
        _, chosen = _best(left, group + token_rows[:, None] * 0)
        kept = tl.where(group == chosen[:, None], 1, kept)
        left = tl.where(group == chosen[:, None], _GONE, left)
    kept_wide = tl.reshape(tl.broadcast_to(kept[:, :, None], [BT, GP, SP]), [BT, GP * SP])
    return tl.where(kept_wide != 0, key, _GONE)


@triton.jit(do_not_specialize=["num_tokens"])
def gate_kernel(
    logits_ptr, bias_ptr, weights_ptr, ids_ptr, num_tokens, stride_t, stride_e, stride_bias, scaling,
    K: tl.constexpr, KP: tl.constexpr, G: tl.constexpr, S: tl.constexpr, GP: tl.constexpr, SP: tl.constexpr,
    KEPT: tl.constexpr, SUM: tl.constexpr, SOFTMAX: tl.constexpr, RENORMALIZE: tl.constexpr, BIAS: tl.constexpr,
    BT: tl.constexpr,
):  # fmt: skip
    """Scores, choice and weights of BT tokens."""
    rows = tl.arange(0, BT)
    token = tl.program_id(0).to(tl.int64) * BT + rows
    there = (token < num_tokens)[:, None]
    row_ptr = logits_ptr + (token * stride_t)[:, None]

    place = tl.arange(0, GP * SP)[None, :]
    group, member = place // SP, place % SP
    expert = group * S + member
    real = (group < G) & (member < S)
    # Tokens past the end get zeros: real numbers, and nothing of theirs is stored.
    logit = tl.load(row_ptr + expert.to(tl.int64) * stride_e, mask=there & real, other=0.0).to(tl.float32)
    largest = tl.zeros([BT], dtype=tl.float32)
    total = largest
    if SOFTMAX:
        largest = tl.max(tl.where(real, logit, float("-inf")), axis=1)
        total = tl.sum(tl.where(real, tl.exp(logit - largest[:, None]), 0.0), axis=1)
    if BIAS:
        bias = tl.load(bias_ptr + expert.to(tl.int64) * stride_bias, mask=real, other=0.0).to(tl.float32)
        key = _key(_score(logit, largest[:, None], total[:, None], SOFTMAX) + bias)
    else:
        key = _key(logit)
    key = tl.where(real, key, _GONE)
    column = expert + rows[:, None] * 0
    if G > 1:
        sum_key = key
        if SUM and not BIAS:
            sum_key = tl.where(real, _key(_score(logit, largest[:, None], total[:, None], SOFTMAX)), _GONE)
        key = _in_best_groups(key, sum_key, column, rows, G, S, GP, SP, KEPT, SUM)

    slot = tl.arange(0, KP)[None, :]
    ids = tl.zeros([BT, KP], dtype=tl.int32)
    for k in range(K):
        _, chosen = _best(key, tl.where(real, column, 0x7FFFFFFF))
        ids = tl.where(slot == k, chosen[:, None], ids)
        key = tl.where(column == chosen[:, None], _GONE, key)

    # Read again rather than carried along: the weights never see the bias, and the lines are still in the cache.
    filled = there & (slot < K)
    chosen_logit = tl.load(row_ptr + ids.to(tl.int64) * stride_e, mask=filled, other=0.0).to(tl.float32)
    weights = _score(chosen_logit, largest[:, None], total[:, None], SOFTMAX)
    if RENORMALIZE:
        weights_sum = tl.sum(tl.where(slot < K, weights, 0.0), axis=1)
        # Not tl.maximum, which may drop a NaN.
        weights_sum = tl.where(weights_sum < _TINY, _TINY, weights_sum)
        weights = tl.div_rn(weights, tl.broadcast_to(weights_sum[:, None], [BT, KP]))
    weights *= scaling
    out = token[:, None] * K + slot
    tl.store(weights_ptr + out, weights, mask=filled)
    tl.store(ids_ptr + out, ids, mask=filled)


def launch_select(
    logits_TE: torch.Tensor,
    top_k: int,
    scoring: str,
    renormalize: bool,
    bias_E: torch.Tensor | None,
    num_groups: int,
    topk_group: int,
    group_score: str,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (weights, ids) as ``select_experts`` describes them."""
    num_tokens, num_experts = logits_TE.shape
    weights = logits_TE.new_empty((num_tokens, top_k), dtype=torch.float32)
    ids = logits_TE.new_empty((num_tokens, top_k), dtype=torch.int32)
    if num_tokens == 0:
        return weights, ids
    if logits_TE.dtype not in _LOADABLE:
        logits_TE = logits_TE.float()
    bias = logits_TE if bias_E is None else bias_E if bias_E.dtype in _LOADABLE else bias_E.float()
    size = num_experts // num_groups
    groups_padded, size_padded = triton.next_power_of_2(num_groups), triton.next_power_of_2(size)
    width = groups_padded * size_padded
    # A row stays within one warp, four logits a lane where there are that many, so that its reductions are shuffles.
    # Few tokens are spread over as many programs as there are.
    warps = 4 if width <= 128 and num_tokens > 512 else 1 if width <= 1024 else 4
    tokens = max(1, 128 // width) * warps if num_tokens > 512 else 1
    gate_kernel[(triton.cdiv(num_tokens, tokens),)](
        logits_TE, bias, weights, ids, num_tokens, logits_TE.stride(0), logits_TE.stride(1), bias.stride(-1), scaling,
        K=top_k, KP=triton.next_power_of_2(top_k), G=num_groups, S=size, GP=groups_padded, SP=size_padded,
        KEPT=topk_group, SUM=group_score == "top2_sum", SOFTMAX=scoring == "softmax", RENORMALIZE=renormalize,
        BIAS=bias_E is not None, BT=tokens, num_warps=warps,
    )  # fmt: skip
    return weights, ids


@triton.jit(do_not_specialize=["num_slots"])
def prepare_kernel(
    weights_in_ptr, ids_in_ptr, map_ptr, weights_ptr, ids_ptr, num_slots, num_routed, map_size,
    stride_wt, stride_wk, stride_it, stride_ik, stride_map,
    K: tl.constexpr, KN: tl.constexpr, MAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One element per slot of the result, whose rows are K routed slots and then KN - K shared ones."""
    out = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = out < num_slots
    token, slot = out // KN, out % KN
    routed = there & (slot < K)
    expert = tl.load(ids_in_ptr + token * stride_it + slot * stride_ik, mask=routed, other=-1)
    if MAPPED:
        known = routed & (expert >= 0) & (expert < map_size)
        expert = tl.load(map_ptr + expert.to(tl.int64) * stride_map, mask=known, other=-1)
    expert = tl.where((expert >= 0) & (expert < num_routed), expert, -1)
    weight = tl.load(weights_in_ptr + token * stride_wt + slot * stride_wk, mask=routed, other=1.0).to(tl.float32)
    tl.store(weights_ptr + out, tl.where(slot < K, weight, 1.0), mask=there)
    tl.store(ids_ptr + out, tl.where(slot < K, expert, num_routed + (slot - K).to(tl.int32)), mask=there)


def launch_prepare(
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    num_routed: int,
    num_shared: int,
    expert_map: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (weights, ids) as ``prepare_routing`` describes them."""
    num_tokens, top_k = topk_ids.shape
    slots = top_k + num_shared
    weights = topk_ids.new_empty((num_tokens, slots), dtype=torch.float32)
    ids = topk_ids.new_empty((num_tokens, slots))
    if ids.numel() == 0:
        return weights, ids
    if topk_weights.dtype not in _LOADABLE:
        topk_weights = topk_weights.float()
    mapping = topk_ids if expert_map is None else expert_map
    prepare_kernel[(triton.cdiv(ids.numel(), _PREPARE_BLOCK),)](
        topk_weights, topk_ids, mapping, weights, ids, ids.numel(), num_routed, mapping.shape[0],
        *topk_weights.stride(), *topk_ids.stride(), mapping.stride(-1),
        K=top_k, KN=slots, MAPPED=expert_map is not None, BLOCK=_PREPARE_BLOCK, num_warps=4,
    )  # fmt: skip
    return weights, ids
