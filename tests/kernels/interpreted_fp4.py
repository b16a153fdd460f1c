"""The Triton kernels of FP4 through Triton's interpreter; test_fp4_interpreted.py runs this file.

The interpreter (3.7) knows no products of FP4 with scales. One stands in here, written from what Triton says of
``tl.dot_scaled``: low nibbles are even columns, and a scale covers 16 (e4m3) or 32 (e8m0) columns in that order.
"""

import os

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from moe_kernels import Quant
from moe_kernels.experts.config import flatten_config, unflatten_config
from moe_kernels.experts.launch_fp4 import launch_experts_fp4
from moe_kernels.experts.layer import StoredLayer
from moe_kernels.quant.fp4 import quantize_fp4, quantize_fp4_reference
from moe_kernels.quant.triton_fp4 import launch_fp4
from moe_kernels.testing.oracle import error_budget, oracle, poison_allocator, random_problem, relative_error
from triton.language.semantic import TritonSemantic

assert os.environ.get("TRITON_INTERPRET") == "1"
INTERPRETER = triton.runtime.interpreter
FP4 = [Quant.NVFP4, Quant.MXFP4]
SWAPPED = {
    "BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 2, "num_warps": 4, "num_stages": 2,
    "SWAP_AB": True,
}  # fmt: skip
CONFIGS = {
    "swapped": SWAPPED,
    "inline": {**SWAPPED, "LAYOUT": "inline", "BLOCK_SIZE_K": 128},
    "upright": {**SWAPPED, "BLOCK_SIZE_M": 128, "BLOCK_SIZE_N": 32, "SWAP_AB": False},
}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float64)


def values(packed, scale, along):
    """float64 of a packed operand ``[R, K / 2]`` with scales ``[R, K / along]``."""
    nibbles = np.stack((packed & 15, packed >> 4), axis=-1).reshape(packed.shape[0], -1)
    numbers = E2M1[nibbles & 7] * np.where(nibbles & 8, -1.0, 1.0)
    return numbers * np.repeat(scale, along, axis=1)


def scales(handle):
    data = torch.from_numpy(np.ascontiguousarray(handle.data).view(np.uint8))
    if "fp8e4nv" in str(handle.dtype):
        return data.view(torch.float8_e4m3fn).double().numpy(), 16
    return np.where(data.numpy() == 255, np.nan, 2.0 ** (data.numpy().astype(np.float64) - 127)), 32


def create_dot_scaled(_, lhs, lhs_scale, lhs_kind, rhs, rhs_scale, rhs_kind, fast, lhs_pack, rhs_pack, acc):
    assert lhs_kind == rhs_kind
    assert lhs_pack
    assert rhs_pack
    left, right = scales(lhs_scale), scales(rhs_scale)
    assert left[1] == right[1]
    a = values(lhs.data.view(np.uint8), *left)
    b = values(np.ascontiguousarray(rhs.data.T).view(np.uint8), *right)
    return INTERPRETER.TensorHandle((acc.data + a @ b.T).astype(np.float32), acc.dtype.scalar)


@pytest.fixture(autouse=True)
def scaled_products(monkeypatch):
    assert not hasattr(INTERPRETER.InterpreterBuilder, "create_dot_scaled")
    monkeypatch.setattr(INTERPRETER.InterpreterBuilder, "create_dot_scaled", create_dot_scaled, raising=False)
    plain = TritonSemantic.dot_scaled

    def dot_scaled(self, *args):  # the compiler passes the formats' names as constants
        return plain(self, *(tl.constexpr(value) if isinstance(value, str) else value for value in args))

    monkeypatch.setattr(TritonSemantic, "dot_scaled", dot_scaled)


def rows(count, columns, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, columns, generator=generator)
    spread = 4.0 ** torch.randint(-6, 7, (count, -(-columns // 16)), generator=generator)
    return (x * spread.repeat_interleave(16, dim=1)[:, :columns]).clamp(-6e4, 6e4).to(dtype)


def same_bits(got, want):
    for mine, right in zip(got, want, strict=True):
        if right is None:
            assert mine is None
            continue
        assert (mine.dtype, mine.shape) == (right.dtype, right.shape)
        nan = right.float().isnan()
        assert torch.equal(mine.view(torch.uint8), right.view(torch.uint8)) or torch.equal(mine[~nan], right[~nan])
        assert torch.equal(mine.float().isnan(), nan)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 33), (5, 250), (2, 1100), (0, 40)], ids=str)
@pytest.mark.parametrize("quant", FP4)
def test_quantiser_gives_the_bits_of_the_specification(quant, shape, dtype):
    x = rows(*shape, dtype)
    poison_allocator("cpu", shape[0] * -(-shape[1] // 32) * 16, 4 * shape[0], shape[0] * -(-shape[1] // 32) * 2)
    same_bits(launch_fp4(x, quant), quantize_fp4_reference(x, quant))
    same_bits(quantize_fp4(x, quant), quantize_fp4_reference(x, quant))  # the op runs the kernel here


@pytest.mark.parametrize("quant", FP4)
def test_quantiser_on_hostile_rows(quant):
    x = rows(9, 140)
    x[0], x[1], x[2], x[3], x[4, 32:64] = 0.0, 1e-38, 1e-40, -0.0, 0.0
    x[5, 100], x[6, 3], x[7, 139], x[8, 0] = float("nan"), float("inf"), -float("inf"), 3e38
    same_bits(launch_fp4(x, quant), quantize_fp4_reference(x, quant))
    wide = torch.full((9, 300), float("nan"))
    wide[:, 150:290] = x
    same_bits(launch_fp4(wide[:, 150:290], quant), quantize_fp4_reference(x, quant))


@pytest.mark.parametrize("quant", FP4)
def test_quantiser_rounds_every_tie_as_the_specification(quant):
    x = torch.arange(-(2**15), 2**15, 17, dtype=torch.int32).to(torch.int16).view(torch.float16)
    x = x[torch.isfinite(x)][:3712].reshape(29, 128)
    same_bits(launch_fp4(x, quant), quantize_fp4_reference(x, quant))


def run(problem, config, **options):
    x, weights, routing = problem
    layer = StoredLayer(
        weights.w1, weights.w2, weights.w1_scale, weights.w2_scale, None, None, weights.w1_global, weights.w2_global,
        None, None, weights.quant, weights.intermediate_size, 0,
    )  # fmt: skip
    chosen = unflatten_config(tuple(flatten_config(config)))
    return launch_experts_fp4(x, layer, routing.topk_weights, routing.topk_ids, chosen, **options)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("quant", FP4)
def test_layer_within_budget(quant, name):
    # Tails everywhere: neither D nor F is a multiple of 16, 32 or 64. Some ids are dropped, one comes twice.
    problem = random_problem(4, 3, 136, 40, 2, quant, dtype=torch.float16)
    problem[2].topk_ids[0, 1], problem[2].topk_ids[2] = -1, problem[2].topk_ids[2, 0].clone()
    problem[2].topk_ids[3, 0] = 3
    before = problem[0].clone()
    poison_allocator("cpu", 8 * 40 * 2, 8 * 136 * 2, 4 * 136 * 2, 8 * 32, 4 * 80)
    out = run(problem, CONFIGS[name])
    assert torch.equal(problem[0], before)
    assert relative_error(out, oracle(*problem, impl="triton_fp4")) <= error_budget(*problem, impl="triton_fp4")
    assert relative_error(out, oracle(*problem)) > 0.03  # not the weight-only layer


@pytest.mark.parametrize("quant", FP4)
def test_rows_of_many_blocks_and_weights_on_the_input(quant):
    problem = random_problem(19, 2, 64, 33, 1, quant, dtype=torch.float32)
    for on_input in (False, True):
        options = {"router_weight_on_input": on_input}
        out = run(problem, SWAPPED, weight_on_input=on_input)
        want = oracle(*problem, impl="triton_fp4", **options)
        assert relative_error(out, want) <= error_budget(*problem, impl="triton_fp4", **options)


def test_no_tokens():
    problem = random_problem(0, 3, 64, 32, 2, "nvfp4")
    assert run(problem, SWAPPED).shape == (0, 64)
