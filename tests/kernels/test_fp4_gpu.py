"""FP4 on an NVIDIA GPU: the quantiser on any, the layer on one that has FP4 units."""

import pytest
import torch
from moe_kernels import Quant, fused_experts
from moe_kernels.experts.rules import FP4_UNITS
from moe_kernels.quant.fp4 import quantize_fp4, quantize_fp4_reference
from moe_kernels.testing.oracle import error_budget, oracle, poison_allocator, random_problem, relative_error

HERE = torch.cuda.is_available()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HERE, reason="needs a CUDA device"),
    # Inductor's first import uses a deprecated part of torch.
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
]
units = pytest.mark.skipif(
    not HERE or torch.cuda.get_device_capability()[0] not in FP4_UNITS, reason="needs a GPU with FP4 units"
)
each_format = pytest.mark.parametrize("quant", [Quant.NVFP4, Quant.MXFP4])
TILES = {
    "BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 4, "num_warps": 4, "num_stages": 3,
    "SWAP_AB": True,
}  # fmt: skip
CONFIGS = {
    "default": None,
    "swapped": TILES,
    "inline-pdl": {**TILES, "LAYOUT": "inline", "PDL": True},
    "upright": {**TILES, "BLOCK_SIZE_M": 128, "SWAP_AB": False, "num_warps": 8},
}
# T, E, D, F, K
SHAPES = [(1, 8, 2048, 1408, 2), (33, 5, 136, 40, 3), (300, 4, 1000, 200, 2)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 33), (17, 250), (1000, 768), (4096, 7168), (33, 20000)], ids=str)
@each_format
def test_quantiser_gives_the_bits_of_the_specification(quant, shape, dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator)
    spread = 4.0 ** torch.randint(-6, 7, (shape[0], -(-shape[1] // 16)), generator=generator)
    x = (x * spread.repeat_interleave(16, dim=1)[:, : shape[1]]).clamp(-6e4, 6e4).to(dtype)
    x[0, -1] = 0.0
    if shape[0] > 2:
        x[1], x[2, 0] = 0.0, float("nan")
    units_of_row = -(-shape[1] // 32)
    poison_allocator("cuda", shape[0] * units_of_row * 16, shape[0] * units_of_row * 2, shape[0] * 4)
    for got, want in zip(quantize_fp4(x.cuda(), quant), quantize_fp4_reference(x, quant), strict=True):
        if want is None:
            assert got is None
            continue
        nan = want.float().isnan()
        assert torch.equal(got.cpu().view(torch.uint8), want.view(torch.uint8)) or bool(nan.any())
        assert torch.equal(got.cpu().float()[~nan], want.float()[~nan])
        assert torch.equal(got.cpu().float().isnan(), nan)


@units
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@each_format
def test_within_budget(quant, shape, name, dtype):
    problem = random_problem(*shape, quant, "cuda", dtype=dtype)
    problem[2].topk_ids[-1, -1] = -1
    out = fused_experts(*problem, impl="triton_fp4", config=CONFIGS[name])
    assert relative_error(out, oracle(*problem, impl="triton_fp4")) <= error_budget(*problem, impl="triton_fp4")


@units
@each_format
def test_compiled_and_in_a_graph(quant):
    problem = random_problem(37, 8, 512, 256, 2, quant, "cuda")
    want = fused_experts(*problem, impl="triton_fp4")
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: fused_experts(x, *problem[1:], impl="triton_fp4"), fullgraph=True)
    assert torch.equal(compiled(problem[0]), want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fused_experts(*problem, impl="triton_fp4")
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, want)
