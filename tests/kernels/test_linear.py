"""`linear` in every weight format against the float64 product of what is stored."""

from __future__ import annotations

import pytest
import torch
from moe_kernels import LinearWeights, Quant, linear, resolve_linear_impl
from moe_kernels.formats import FORMATS
from moe_kernels.projections.reference import quantize

FORMS = [quant.value for quant in Quant]


def made(quant: str, rows: int, columns: int, tokens: int) -> tuple[torch.Tensor, LinearWeights, torch.Tensor]:
    make = torch.Generator().manual_seed(7)
    dense = torch.randn(rows, columns, generator=make) * columns**-0.5
    plain = not FORMATS[Quant(quant)].quantized
    weights = LinearWeights.from_dense(dense, quant, **({} if plain else {"dtype": torch.float32}))
    return torch.randn(tokens, columns, generator=make).to(weights.dtype), weights, dense


@pytest.mark.parametrize("quant", FORMS)
@pytest.mark.parametrize(("rows", "columns", "tokens"), [(1, 1, 1), (130, 257, 5), (64, 96, 0)])
def test_the_product_is_of_what_is_stored(quant, rows, columns, tokens):
    x, weights, _ = made(quant, rows, columns, tokens)
    got = linear(x, weights, impl="reference")
    assert got.shape == (tokens, rows)
    assert got.dtype == weights.dtype
    seen = x.double()
    if FORMATS[weights.quant].activation and tokens:
        values, scale = quantize(x, weights)
        blocks = scale.double()
        if blocks.dim() == 1 and blocks.numel() == tokens:
            blocks = blocks[:, None]
        elif blocks.dim() == 2 and blocks.shape[1] > 1:
            blocks = blocks.repeat_interleave(128, 1)[:, :columns]
        seen = values.double() * blocks
    expected = seen @ weights.dequantize().double().T
    bound = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[weights.dtype]
    assert float((got.double() - expected).norm()) <= bound * float(expected.norm())


@pytest.mark.parametrize(
    ("quant", "bound"),
    [("fp32", 0.0), ("bf16", 0.003), ("fp8_channel", 0.04), ("fp8_block", 0.04), ("int8", 0.02), ("int4", 0.16)]
    + [("nvfp4", 0.13), ("mxfp4", 0.17)],
)
def test_what_is_stored_is_near_the_dense_matrix(quant, bound):
    _, weights, dense = made(quant, 150, 300, 1)
    assert float((weights.dequantize() - dense).norm() / dense.norm()) <= bound


def test_a_zero_row_stays_zero_and_a_bias_is_added():
    dense = torch.randn(40, 64, generator=torch.Generator().manual_seed(1))
    dense[3] = 0
    bias = torch.arange(40.0)
    for quant in FORMS[3:]:
        weights = LinearWeights.from_dense(dense, quant, dtype=torch.float32)
        x = torch.ones(2, 64)
        assert torch.equal(linear(x, weights, bias=bias)[:, 3], bias[3].expand(2)), quant


def test_bad_arguments_are_named():
    weights = LinearWeights.from_dense(torch.randn(8, 16), "fp32")
    with pytest.raises(ValueError, match=r"x_TK must be \[T, 16\]"):
        linear(torch.randn(2, 15), weights)
    with pytest.raises(ValueError, match="impl must be one of reference, torch"):
        linear(torch.randn(2, 16), weights, impl="cublas")
    with pytest.raises(ValueError, match="finite values"):
        LinearWeights.from_dense(torch.full((4, 4), float("nan")), "int8")
    assert resolve_linear_impl(torch.randn(2, 16), weights) == "torch"
