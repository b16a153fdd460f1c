"""The deep_gemm backend over a stand-in for the library; test_deep_gemm.py runs this in a process that interprets."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from moe_kernels import ExpertWeights, Routing
from moe_kernels.formats import FP8_MAX, SMALLEST_AMAX

sys.path.insert(0, str(Path(__file__).parent))
import stand_in_deep_gemm

from workbench.check.activations import quantized, roundings
from workbench.check.difference import difference
from workbench.check.oracle import dequantized, oracle
from workbench.peers import deep_gemm
from workbench.peers.deep_gemm_kernels import launch_gather_quantize, launch_silu_quantize

sys.modules["deep_gemm"] = stand_in_deep_gemm
LIMITS = (SMALLEST_AMAX, FP8_MAX)


def on_grid(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Numbers that e4m3 holds beside a scale of 1/64, the largest of every 128 of them 7 = 448/64.

    The interpreter's own conversion to e4m3 does not carry into the exponent; what needs no rounding it gets right.
    """
    generator = torch.Generator().manual_seed(seed)
    size = (rows, columns)
    mantissa = 1.0 + torch.randint(0, 8, size, generator=generator) / 8
    x = mantissa * 2.0 ** torch.randint(-8, 2, size, generator=generator)
    x *= 1 - 2 * torch.randint(0, 2, size, generator=generator)
    x[:, ::128] = 7.0
    return x.to(torch.bfloat16)


def problem(
    tokens: int, experts: int, hidden: int, ffn: int, top_k: int
) -> tuple[torch.Tensor, ExpertWeights, Routing]:
    """A layer in which nothing that a kernel here rounds is near a tie.

    Each token is 56 in one column of each 128, gate rows are 7/8 there and up rows 7/8 times a power of two that tells
    experts, rows and columns apart: so gate is 49 a block of columns, and so are its silu and, over a power, up.
    """
    generator = torch.Generator().manual_seed(tokens)
    x = torch.zeros(tokens, hidden)
    x[:, 5::128] = 56.0
    w1 = torch.full((experts, 2 * ffn, hidden), 0.875)
    w1[:, ffn:] *= 2.0 ** -torch.randint(0, 5, (experts, ffn, 1), generator=generator)
    w1[:, ffn::128] = 0.875  # the scale of each block of up rows
    w1[:, ffn:] *= 1 - 2 * torch.randint(0, 2, (experts, ffn, 1), generator=generator)
    w2 = torch.randn(experts, hidden, ffn, generator=generator) / ffn**0.5
    ids = torch.rand(tokens, experts, generator=generator).topk(top_k).indices.to(torch.int32)
    routing = Routing(torch.rand(tokens, top_k, generator=generator), ids)
    return x.to(torch.bfloat16), ExpertWeights.from_dense(w1, w2, "fp8_block"), routing


@pytest.mark.parametrize(("tokens", "experts", "hidden", "ffn", "top_k"), [(1, 3, 128, 256, 2), (7, 2, 256, 128, 1)])
def test_the_layer(tokens: int, experts: int, hidden: int, ffn: int, top_k: int) -> None:
    x, weights, routing = problem(tokens, experts, hidden, ffn, top_k)
    if tokens > 2:
        routing.topk_ids[1, 0] = -1
        routing.topk_ids[2, 0] = experts
    got = deep_gemm.deep_gemm_experts(x, weights, routing)
    want = oracle(x, routing, dequantized(weights), experts, roundings(weights))
    error = difference(got, want).relative_l2
    assert error is not None
    assert error < 2**-7  # bf16 of the products and of the output; the interpreter cuts instead of rounding
    if tokens > 2:
        assert not got[1:3].any()


def test_rows_are_quantised_to_the_bit_and_padding_is_zero() -> None:
    x = on_grid(5, 256, 1)
    x[3, 7], x[4, 200] = float("inf"), float("nan")
    x[2, :128] = 0.0
    routing = Routing(torch.ones(5, 2), torch.tensor([[0, 2], [2, 1], [0, 1], [1, 2], [-1, 2]], dtype=torch.int32))
    rows, experts, count = deep_gemm.moe_align(routing.topk_ids, 3, 128)
    q, scale, expert, place = launch_gather_quantize(x, rows, experts, count, 2, 128, LIMITS)
    finite = torch.where(torch.isfinite(x), x, 0)  # the others count for no scale; the interpreter's NaN is a number
    used = torch.zeros(int(count), dtype=torch.bool)
    for row, chosen in enumerate(routing.topk_ids.reshape(-1).tolist()):
        if chosen < 0:
            continue
        at, token = int(place[row]), row // 2
        used[at] = True
        assert int(expert[at]) == chosen
        got = q[at].double() * scale[at].double().repeat_interleave(128)
        want = quantized(finite[token : token + 1], "fp8", "block")[0]
        whole = torch.isfinite(x[token])
        assert torch.equal(got[whole], want[whole])
        assert torch.equal(want[whole], x[token, whole].double())
    assert not q[: int(count)][~used].float().any()
    assert (expert[: int(count)] >= 0).all()
    assert (expert[int(count) :] == -1).all()


def test_gate_and_up_meet_and_are_quantised_to_the_bit() -> None:
    # silu of 32 and more is the number itself in float32.
    gate = torch.full((128, 256), 32.0)
    h = torch.cat((gate, on_grid(128, 256, 2).float()), dim=1).to(torch.bfloat16)
    q, scale = launch_silu_quantize(h, torch.tensor([48], dtype=torch.int32), LIMITS)
    gate, up = h[:48].double().chunk(2, dim=-1)
    got = q[:48].double() * scale[:48].double().repeat_interleave(128, dim=1)
    assert torch.equal(got, gate * up)


def test_small_gates_too() -> None:
    h = torch.randn(16, 256, generator=torch.Generator().manual_seed(4)).to(torch.bfloat16)
    h[:, 0], h[:, 128] = 8.0, 56.0
    q, scale = launch_silu_quantize(h, torch.tensor([16], dtype=torch.int32), LIMITS)
    gate, up = h.double().chunk(2, dim=-1)
    want = torch.nn.functional.silu(gate) * up
    got = q.double() * scale.double()
    assert float((got - want).abs().max()) < 0.07 * 448  # half of what it is, where a carry is lost
    assert float(((got / want).median() - 1).abs()) < 0.02
