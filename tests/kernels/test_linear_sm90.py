"""The Triton kernels of linear layers compile for compute capability 9.0 as they would be launched, without a GPU."""

import pytest
import torch

pytest.importorskip("triton")

from moe_kernels import LinearWeights, Quant
from moe_kernels.formats import FORMATS
from moe_kernels.projections import triton_gemm, triton_gemm4, triton_gemv, triton_rows
from moe_kernels.projections.ops import default_config
from moe_kernels.projections.tiles import LinearConfig, LinearProblem
from moe_kernels.projections.triton import Matrix, launch_linear
from moe_kernels.testing.offline import compile_only
from moe_kernels.types import DTYPE_NAME
from triton.runtime.jit import JITFunction

SHARED_LIMIT = 232448  # bytes a block may have on compute capability 9.0
FEW = ("bf16", "fp8_channel", "fp8_block", "int4")
MODULES = (triton_gemm, triton_gemm4, triton_gemv, triton_rows)


def problem_of(num_tokens, outputs, inputs, quant, dtype="bf16", group_size=128):
    own = quant if quant in ("fp32", "fp16", "bf16") else dtype
    return LinearProblem(num_tokens, outputs, inputs, quant, own, group_size if quant == "int4" else 0)


def matrix_of(problem, zero_points=False):
    """Shapes and dtypes of a stored matrix; one of a few rows is converted and stands for the tall one."""
    dtype = {name: dtype for dtype, name in DTYPE_NAME.items()}[problem.dtype]
    options = {"dtype": dtype} if FORMATS[Quant(problem.quant)].quantized else {}
    if problem.group_size:
        options |= {"group_size": problem.group_size, "zero_points": zero_points}
    few = LinearWeights.from_dense(torch.zeros(min(2, problem.outputs), problem.inputs), problem.quant, **options)

    def tall(tensor):
        if tensor is None or tensor.dim() < 2:
            return None if tensor is None else torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        rows = problem.outputs if len(tensor) == few.N else -(-problem.outputs // 128)
        return torch.empty(rows, *tensor.shape[1:], dtype=tensor.dtype, device="meta")

    return Matrix(tall(few.w), tall(few.scale), tall(few.zero), tall(few.global_scale)), dtype


def compiled(problem, config=None, bias=True, zero_points=False):
    matrix, dtype = matrix_of(problem, zero_points)
    config = config or default_config(problem, torch.device("cpu"))
    x = torch.empty(problem.num_tokens, problem.inputs, dtype=dtype, device="meta")
    bias_N = torch.empty(problem.outputs, dtype=dtype, device="meta") if bias else None
    try:
        with compile_only(90) as kernels:
            out = launch_linear(x, matrix, bias_N, problem, config)
    finally:
        # In-process caches would otherwise keep binaries for the absent GPU.
        for module in MODULES:
            for value in vars(module).values():
                if isinstance(value, JITFunction):
                    value.device_caches.clear()
    assert out.shape == (problem.num_tokens, problem.outputs)
    assert all(kernel.shared <= SHARED_LIMIT for kernel in kernels)
    return {kernel.name: kernel for kernel in kernels}, config


@pytest.mark.parametrize(
    ("quant", "num_tokens"),
    [*((quant, tokens) for quant in Quant for tokens in (1, 512)), *((Quant(quant), 8) for quant in FEW)],
)
def test_defaults_of_every_format(quant, num_tokens):
    problem = problem_of(num_tokens, 4096, 4096, quant)
    kernels, config = compiled(problem)
    form = FORMATS[quant]
    name = next(name for name in kernels if name.startswith("linear"))
    main = kernels[name]
    assert (name == "linear_row_kernel") == (num_tokens == 1 and not form.packed)
    assert ("sum_parts_kernel" in kernels) == (config.split_k > 1)
    if config.lanes or problem.dtype == "fp32":
        assert "mma" not in main.ptx
        assert "tf32" not in main.ptx
        return
    # Weights come several tiles ahead: by asynchronous copies or tensor maps.
    assert "cp.async" in main.ptx
    if num_tokens == 512:
        assert "wgmma" in main.ptx
        kind = {"fp8": "e4m3.e4m3", "int8": "s8.s8", "": "f16.f16" if problem.dtype == "fp16" else "bf16.bf16"}
        assert kind[form.activation] in main.ptx
        assert ("cp.async.bulk.tensor" in main.ptx) == config.use_tma


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
@pytest.mark.parametrize("quant", ["fp8_tensor", "int8_weight", "int4"])
def test_other_dtypes_of_activations(quant, dtype):
    for num_tokens in (1, 40):
        compiled(problem_of(num_tokens, 576, 2048, quant, dtype, 32), zero_points=quant == "int4")


@pytest.mark.parametrize("quant", ["bf16", "fp8_block", "nvfp4"])
def test_sizes_that_are_multiples_of_nothing(quant):
    for size in ((1, 1, 1), (3, 1, 130), (300, 77, 1411)):
        compiled(problem_of(*size, quant), bias=False)


@pytest.mark.parametrize("quant", ["fp8_channel", "fp8_block"])
def test_many_rows_and_early_starts(quant):
    kernels, config = compiled(problem_of(8192, 6144, 4096, quant))
    assert config.pdl
    product = kernels["linear_kernel"]
    assert "griddepcontrol.wait" in product.ptx
    assert product.ptx.index("griddepcontrol.wait") < product.ptx.index("wgmma")


def test_splits_and_options():
    problem = problem_of(8, 576, 2048, "int8")
    tiles = {"block_m": 16, "block_n": 64, "block_k": 128}
    kernels, _ = compiled(problem, LinearConfig(**tiles, split_k=4, prefetch=256, pdl=True, use_tma=True, swap_ab=True))
    assert kernels["linear_kernel"].grid == (9, 4)
    assert "prefetch.global.L2" in kernels["linear_kernel"].ptx
    assert "griddepcontrol.wait" in kernels["sum_parts_kernel"].ptx
    kernels, _ = compiled(problem, LinearConfig(**tiles))
    assert not any("griddepcontrol" in kernel.ptx or "prefetch.global" in kernel.ptx for kernel in kernels.values())


@pytest.mark.parametrize("quant", ["int4", "nvfp4", "mxfp4", "int8_weight"])
def test_lanes_take_every_weight_only_format(quant):
    config = LinearConfig(block_m=1, block_n=4, block_k=1024, lanes=True)
    kernels, _ = compiled(problem_of(1, 4096, 4096, quant), config, zero_points=quant == "int4")
    assert len(kernels) == 1
