"""The kernels on FP4 units compile for the GPUs that have them, as they would be launched, with no GPU at hand."""

import re

import pytest
import torch

pytest.importorskip("triton")

from moe_kernels import Quant
from moe_kernels.experts.config import flatten_config, unflatten_config
from moe_kernels.experts.launch_fp4 import launch_experts_fp4
from moe_kernels.experts.layer import StoredLayer
from moe_kernels.experts.rule_fp4 import fp4_config
from moe_kernels.quant.triton_fp4 import launch_fp4
from moe_kernels.testing.offline import compile_only
from moe_kernels.tuning.names import Problem

FP4 = [Quant.NVFP4, Quant.MXFP4]
# Shared memory that one block may take, by compute capability.
SHARED = {100: 232448, 120: 101376}
# Triton 3.6 and 3.7 write the same instructions.
PRODUCTS = {
    (100, "nvfp4"): r"tcgen05\.mma\.cta_group::1\.kind::mxf4nvf4\.block_scale\.scale_vec::4X",
    (100, "mxfp4"): r"tcgen05\.mma\.cta_group::1\.kind::mxf4\.block_scale\.scale_vec::2X",
    (120, "nvfp4"): r"mma\.sync\.aligned\.m16n8k64\.row\.col\.kind::mxf4nvf4\.block_scale\.scale_vec::4X\S*\.ue4m3",
    (120, "mxfp4"): r"mma\.sync\.aligned\.m16n8k64\.row\.col\.kind::mxf4nvf4\.block_scale\.scale_vec::2X\S*\.ue8m0",
}
MIXTRAL, ODD = (8, 4096, 1792, 2), (5, 136, 40, 3)


def meta(*shape, dtype):
    return torch.empty(*shape, dtype=dtype, device="meta")


def compiled(capability, quant, tokens, sizes=MIXTRAL, dtype=torch.bfloat16, config=None, **options):
    experts, hidden, ffn, top_k = sizes
    d, f = -(-hidden // 32), -(-ffn // 32)
    nvfp4 = quant is Quant.NVFP4
    scales, each = (torch.float8_e4m3fn, 2) if nvfp4 else (torch.uint8, 1)
    layer = StoredLayer(
        meta(experts, 2 * ffn, 16 * d, dtype=torch.uint8),
        meta(experts, hidden, 16 * f, dtype=torch.uint8),
        meta(experts, 2, ffn, each * d, dtype=scales),
        meta(experts, hidden, each * f, dtype=scales),
        None,
        None,
        meta(experts, 2, dtype=torch.float32) if nvfp4 else None,
        meta(experts, dtype=torch.float32) if nvfp4 else None,
        None,
        None,
        quant,
        ffn,
        0,
    )
    if config is None:
        problem = Problem(tokens, experts, hidden, ffn, top_k, quant.value, "bf16", 0)
        config = fp4_config(problem, SHARED[capability])
    x, ids = meta(tokens, hidden, dtype=dtype), meta(tokens, top_k, dtype=torch.int32)
    with compile_only(capability) as kernels:
        launch_experts_fp4(x, layer, ids.to(torch.float32), ids, config, **options)
    return {kernel.name: kernel for kernel in kernels}


# A row an expert, some, and whole tiles of them.
@pytest.mark.parametrize(("capability", "tokens"), [(100, 16), (100, 200), (100, 4096), (120, 16), (120, 4096)])
@pytest.mark.parametrize("quant", FP4)
def test_both_products_run_on_fp4_units(capability, quant, tokens):
    kernels = compiled(capability, quant, tokens)
    for name in ("up_fp4_kernel", "down_fp4_kernel"):
        kernel = kernels[name]
        assert re.search(PRODUCTS[capability, quant.value], kernel.ptx), name
        # Nothing is multiplied in a wider format beside.
        others = re.sub(PRODUCTS[capability, quant.value], "", kernel.ptx)
        assert not re.search(r"mma\.(sync|cta_group)\S*|wgmma", others), name
        assert kernel.shared <= SHARED[capability]


@pytest.mark.parametrize("quant", FP4)
def test_odd_sizes_and_dtypes_stay_on_fp4_units(quant):
    for tokens, dtype, on_input in ((3, torch.float16, False), (500, torch.float32, True)):
        kernels = compiled(100, quant, tokens, ODD, dtype, weight_on_input=on_input)
        for name in ("up_fp4_kernel", "down_fp4_kernel"):
            assert re.search(PRODUCTS[100, quant.value], kernels[name].ptx)


@pytest.mark.parametrize("pdl", [False, True])
def test_dependent_launch(pdl):
    tiles = {
        "BLOCK_SIZE_M": 32, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 4, "num_warps": 4,
        "num_stages": 3, "SWAP_AB": True, "PDL": pdl,
    }  # fmt: skip
    config = unflatten_config(tuple(flatten_config(tiles)))
    kernels = compiled(100, Quant.NVFP4, 200, config=config)
    for name in ("fp4_kernel", "up_fp4_kernel", "down_fp4_kernel", "sum_kernel"):
        assert ("griddepcontrol.wait" in kernels[name].ptx) == pdl, name


@pytest.mark.parametrize(
    ("size", "dtype"), [((4096, 7168), torch.bfloat16), ((37, 130), torch.float32), ((1, 1), torch.float16)], ids=str
)
@pytest.mark.parametrize("quant", FP4)
def test_the_quantiser_divides_and_rounds_exactly(quant, size, dtype):
    for capability in (90, 100):
        with compile_only(capability) as kernels:
            launch_fp4(meta(*size, dtype=dtype), quant)
        (kernel,) = kernels
        assert kernel.name == "fp4_kernel"
        assert kernel.grid == (size[0],)
        assert ("div.rn.f32" in kernel.ptx) == (quant is Quant.NVFP4)
        assert "div.full" not in kernel.ptx
        # Sums and products must not be fused, but for a zero: values would round otherwise than the specification.
        assert all(line.endswith("0f00000000;") for line in re.findall(r"fma\.rn\.f32.*", kernel.ptx))
