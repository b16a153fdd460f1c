"""`linear` in every weight format against the float64 product of what is stored; what is chosen, what refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from moe_kernels import LinearWeights, Quant, linear, resolve_linear_impl
from moe_kernels.experts.rules import TRITON_INTERPRETED
from moe_kernels.formats import FORMATS, matrix_bytes
from moe_kernels.projections.oracle import linear_budget, linear_oracle, linear_problem
from moe_kernels.projections.reference import quantize
from moe_kernels.projections.rule import fit, rule
from moe_kernels.projections.rules import SCALED_MM_TOKENS, linear_preference, linear_reasons
from moe_kernels.projections.scaled_mm import linear_scaled_mm
from moe_kernels.projections.tiles import LinearConfig, LinearProblem, check_legal, unflatten
from moe_kernels.testing.oracle import relative_error

FORMS = [quant.value for quant in Quant]
PLAIN = [quant for quant in FORMS if not FORMATS[Quant(quant)].quantized]
QUANTIZED = [quant for quant in FORMS if quant not in PLAIN]
GPU = {"dtype": "bf16", "outputs": 64, "inputs": 64, "capability": (9, 0)}
TILES = {"block_m": 16, "block_n": 32, "block_k": 64}


def made(quant: str, rows: int, columns: int, tokens: int) -> tuple[torch.Tensor, LinearWeights, torch.Tensor]:
    make = torch.Generator().manual_seed(7)
    dense = torch.randn(rows, columns, generator=make) * columns**-0.5
    weights = LinearWeights.from_dense(dense, quant, **({} if quant in PLAIN else {"dtype": torch.float32}))
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
    assert weights.nbytes == matrix_bytes(quant, 150, 300) + (2 * 150 * 3 if quant == "int4" else 0)


def test_a_zero_row_stays_zero_and_a_bias_is_added():
    dense = torch.randn(40, 64, generator=torch.Generator().manual_seed(1))
    dense[3] = 0
    bias = torch.arange(40.0)
    for quant in QUANTIZED:
        weights = LinearWeights.from_dense(dense, quant, dtype=torch.float32)
        x = torch.ones(2, 64)
        assert torch.equal(linear(x, weights, bias=bias)[:, 3], bias[3].expand(2)), quant


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("quant", ["int8", "fp8_block", "int4", "mxfp4"])
def test_every_dtype_and_strided_rows(quant, dtype):
    x, weights, bias = linear_problem(5, 40, 200, quant, dtype=dtype)
    out = linear(x, weights, bias=bias, impl="reference")
    assert out.dtype == dtype
    assert relative_error(out, linear_oracle(x, weights, bias)) <= linear_budget(x, weights, bias)
    wide = torch.full((5, 500), float("nan"), dtype=dtype)
    wide[:, 7:207] = x
    out = linear(wide[:, 7:207], weights, bias=bias, impl="reference")
    assert relative_error(out, linear_oracle(x, weights, bias)) <= linear_budget(x, weights, bias)
    assert torch.equal(wide[:, 7:207], x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("quant", ["fp8_tensor", "fp8_channel"])
def test_the_fp8_product_of_torch(quant, dtype):
    for tokens in (1, 5, 70):
        x, weights, bias = linear_problem(tokens, 48, 160, quant, dtype=dtype)
        for added in (None, bias):
            out = linear_scaled_mm(x, weights, added)
            assert out.dtype == dtype
            assert relative_error(out, linear_oracle(x, weights, added)) <= linear_budget(x, weights, added)


@pytest.mark.parametrize("quant", FORMS)
def test_traced_in_one_graph_for_any_number_of_rows(quant):
    """No value is read on the way: one graph with symbolic rows takes them all."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x, w, b: linear(x, w, bias=b), fullgraph=True, backend=backend, dynamic=True)
    for tokens in (3, 7, 200):
        x, weights, bias = linear_problem(tokens, 24, 40, quant)
        assert torch.equal(compiled(x, weights, bias), linear(x, weights, bias=bias))
    assert len(graphs) == 1


def test_what_is_chosen_by_rows():
    for quant in QUANTIZED:
        assert linear_preference("cpu", quant, 8) == ("reference",)
        few, many = (linear_preference("cuda", quant, tokens)[0] for tokens in (1, SCALED_MM_TOKENS))
        assert few == "triton"
        assert many == ("torch" if quant in ("fp8_tensor", "fp8_channel") else "triton")
        assert linear_reasons("triton", "cuda", quant=quant, **GPU) == []
    for quant in PLAIN:
        assert linear_preference("cuda", quant, 8)[0] == linear_preference("cpu", quant, 8)[0] == "torch"
    weights = LinearWeights.from_dense(torch.ones(8, 16), "int8", dtype=torch.float32)
    assert resolve_linear_impl(torch.ones(2, 16), weights) == "reference"
    assert resolve_linear_impl(torch.randn(2, 16), LinearWeights.from_dense(torch.randn(8, 16), "fp32")) == "torch"


@pytest.mark.parametrize(
    ("impl", "device", "quant", "changes", "sentence"),
    [
        ("torch", "cuda", "fp8_channel", {"outputs": 24}, "multiples of 16; N is 24"),
        ("torch", "cuda", "fp8_tensor", {"inputs": 100}, "multiples of 16; K is 100"),
        ("torch", "cuda", "fp8_channel", {"dtype": "fp16"}, "bf16 only, not fp16"),
        ("torch", "cuda", "fp8_tensor", {"capability": (8, 0)}, "compute capability 8.9; this device has 8.0"),
        ("torch", "cpu", "fp8_tensor", {}, "for cuda here, not cpu"),
        ("torch", "cuda", "fp8_block", {}, "fp8_tensor and fp8_channel, not fp8_block"),
        ("torch", "cuda", "bf16", {"dtype": "fp16"}, "bf16 weights with bf16 activations, not fp16"),
        ("triton", "cuda", "nvfp4", {"capability": (8, 6)}, "nvfp4 needs compute capability 8.9"),
        ("reference", "cpu", "int3", {}, "not int3"),
        ("reference", "cpu", "int8", {"dtype": "fp64"}, "not fp64"),
    ],
)
def test_what_does_not_run_is_told(impl, device, quant, changes, sentence):
    if impl == "triton" and TRITON_INTERPRETED:
        pytest.skip("interpreted kernels run anywhere")
    pytest.importorskip("triton")
    reasons = linear_reasons(impl, device, quant=quant, **{**GPU, **changes})
    assert len(reasons) == 1
    assert sentence in reasons[0]


def test_bad_arguments_are_named():
    weights = LinearWeights.from_dense(torch.randn(8, 16), "fp32")
    with pytest.raises(ValueError, match=r"x_TK must be \[T, 16\]"):
        linear(torch.randn(2, 15), weights)
    with pytest.raises(ValueError, match="dtype of the weights"):
        linear(torch.randn(2, 16).half(), weights)
    with pytest.raises(ValueError, match=r"bias must be torch.float32 \[8\]"):
        linear(torch.randn(2, 16), weights, bias=torch.randn(7))
    with pytest.raises(ValueError, match="one device"):
        linear(torch.empty(2, 16, device="meta"), weights)
    with pytest.raises(ValueError, match="impl must be one of reference, torch, triton"):
        linear(torch.randn(2, 16), weights, impl="cublas")
    with pytest.raises(NotImplementedError, match="impl 'torch' does not run here"):
        linear(
            torch.randn(2, 16), LinearWeights.from_dense(torch.randn(8, 16), "int8", dtype=torch.float32), impl="torch"
        )
    with pytest.raises(ValueError, match="finite values"):
        LinearWeights.from_dense(torch.full((4, 4), float("nan")), "int8")
    with pytest.raises(ValueError, match="group_size must be one of"):
        LinearWeights.from_dense(torch.ones(4, 4), "int4", group_size=48)
    with pytest.raises(ValueError, match="zero_points must be False for int8"):
        LinearWeights.from_dense(torch.ones(4, 4), "int8", zero_points=True)
    with pytest.raises(ValueError, match=r"dtype must be None or torch.float16"):
        LinearWeights.from_dense(torch.ones(4, 4), "fp16", dtype=torch.bfloat16)


@pytest.mark.parametrize("quant", FORMS)
def test_every_default_is_legal_and_fits(quant):
    dtypes = [quant] if quant in PLAIN else ["bf16", "fp16", "fp32"]
    for dtype in dtypes:
        for tokens in (0, 1, 2, 9, 17, 33, 65, 300, 8192):
            for outputs, inputs in ((1, 1), (7, 33), (576, 2048), (4096, 14336), (28672, 4096), (130, 100)):
                problem = LinearProblem(tokens, outputs, inputs, quant, dtype, 128 if quant == "int4" else 0)
                for hopper, shared in ((True, 232448), (False, 101376)):
                    config = fit(rule(problem, hopper=hopper), problem, shared)
                    check_legal(config, problem)
                    assert unflatten(config.flat()) == config
                    assert hopper or not (config.pdl or config.use_tma)
                    # No part of a split sum is without a step.
                    steps = -(-inputs // config.block_k)
                    assert (config.split_k - 1) * -(-steps // config.split_k) < steps


@pytest.mark.parametrize(
    ("changes", "quant", "field"),
    [
        ({"block_n": 48}, "bf16", "block_n must be a power of two"),
        ({"block_m": 8}, "bf16", "block_m must be"),
        ({"split_k": 0}, "bf16", "split_k must be"),
        ({"split_k": 2, "lanes": True}, "bf16", "split_k must be"),
        ({"swap_ab": True, "lanes": True}, "bf16", "swap_ab and use_tma must be False"),
        ({"prefetch": 100}, "bf16", "prefetch must be"),
        ({"inside": True}, "int4", "inside must be False for int4"),
        ({"inside": True}, "int8", "inside must be False for int8"),
        ({"inside": True, "lanes": True}, "fp8_tensor", "more than 16 rows"),
        ({"block_k": 256}, "fp8_block", "block_k must be 128"),
        ({"num_stages": 0}, "bf16", "num_stages must be"),
    ],
)
def test_tiles_that_do_not_run_are_named(changes, quant, field):
    problem = LinearProblem(20, 64, 256, quant, "bf16", 128 if quant == "int4" else 0)
    with pytest.raises(ValueError, match=field):
        check_legal(dataclasses.replace(LinearConfig(**TILES), **changes), problem)
    with pytest.raises(ValueError, match="multiples of 16 bytes; these have 90"):
        check_legal(LinearConfig(**TILES, use_tma=True), LinearProblem(20, 64, 45, "bf16", "bf16"))
