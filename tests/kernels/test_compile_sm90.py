"""Every Triton kernel compiles for compute capability 9.0 as it would be launched, with no GPU at hand."""

import pytest
import torch

pytest.importorskip("triton")

from moe_kernels import ExpertWeights, Quant
from moe_kernels.experts.config import flatten_config
from moe_kernels.experts.layer import StoredLayer
from moe_kernels.experts.ops import choose_config
from moe_kernels.experts.triton import launch_experts
from moe_kernels.testing.offline import compile_only
from moe_kernels.tuning.names import Problem

SHARED_LIMIT = 232448  # bytes a block may have on compute capability 9.0
MODELS = {
    "mixtral": (8, 4096, 14336, 2),
    "qwen3": (128, 2048, 768, 8),
    "v3": (256, 7168, 2048, 8),
    "odd": (5, 40, 23, 3),
}
BASE = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 8, "num_warps": 4, "num_stages": 3}


def compiled_for(shape, num_tokens, quant, config=None, split_k=0, **options):
    num_experts, hidden, ffn, top_k = shape
    dtype = {"fp32": torch.float32, "fp16": torch.float16}.get(quant, torch.bfloat16)
    # Only shapes and dtypes count: one expert is converted and stands for all.
    one = ExpertWeights.from_dense(torch.zeros(1, 2 * ffn, hidden), torch.zeros(1, hidden, ffn), quant, **options)
    stored = {
        name: torch.empty(num_experts, *tensor.shape[1:], dtype=tensor.dtype, device="meta")
        for name, tensor in one.tensors().items()
    }
    names = [name for name in StoredLayer._fields if name not in ("quant", "intermediate_size", "group_size")]
    layer = StoredLayer(*(stored.get(name) for name in names), Quant(quant), ffn, one.group_size)
    name = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]
    problem = Problem(num_tokens, num_experts, hidden, ffn, top_k, quant, name, one.group_size)
    chosen = choose_config([] if config is None else flatten_config(config), problem, torch.device("cpu"), split_k)

    def empty(*sizes, dtype=dtype):
        return torch.empty(*sizes, dtype=dtype, device="meta")

    with compile_only(90) as kernels:
        launch_experts(
            empty(num_tokens, hidden),
            layer,
            empty(num_tokens, top_k, dtype=torch.float32),
            empty(num_tokens, top_k, dtype=torch.int32),
            chosen,
        )
    return {kernel.name: kernel for kernel in kernels}


@pytest.mark.parametrize("num_tokens", [1, 8, 128, 4096])
@pytest.mark.parametrize("model", MODELS)
def test_defaults_in_bf16(model, num_tokens):
    kernels = compiled_for(MODELS[model], num_tokens, "bf16")
    assert all(kernel.shared <= SHARED_LIMIT for kernel in kernels.values())
    up, down = kernels.get("up_kernel"), kernels.get("down_kernel") or kernels["down_token_kernel"]
    assert up is not None or "up_row_kernel" in kernels
    if model != "odd":
        # Weights come by asynchronous copies, several tiles ahead: the kernels are limited by bytes in flight.
        assert "cp.async" in down.ptx
    if num_tokens == 4096 and model != "odd":
        assert "wgmma" in up.ptx
        assert "wgmma" in down.ptx


@pytest.mark.parametrize("num_tokens", [1, 300])
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_defaults_in_other_dtypes(dtype, num_tokens):
    kernels = compiled_for(MODELS["qwen3"], num_tokens, dtype)
    assert all(kernel.shared <= SHARED_LIMIT for kernel in kernels.values())
    if dtype == "fp32":
        assert "tf32" not in kernels["up_kernel"].ptx


@pytest.mark.parametrize("num_tokens", [1, 8, 4096])
@pytest.mark.parametrize("quant", [q for q in Quant if q not in ("fp32", "bf16", "fp16")])
def test_defaults_of_every_format(quant, num_tokens):
    kernels = compiled_for(MODELS["qwen3"], num_tokens, quant)
    assert all(kernel.shared <= SHARED_LIMIT for kernel in kernels.values())
    if num_tokens == 4096:
        up = next(kernel.ptx for name, kernel in kernels.items() if name.startswith("up"))
        product = {"fp8_block": "e4m3.e4m3", "int8": "s8.s8", "nvfp4": "bf16.bf16", "mxfp4": "bf16.bf16"}
        assert "wgmma" in up
        assert product.get(quant, "") in up


@pytest.mark.parametrize("quant", ["bf16", "fp8_block", "nvfp4"])
def test_splits(quant):
    kernels = compiled_for(MODELS["qwen3"], 8, quant, split_k=4)
    assert "activate_kernel" in kernels
    assert all(kernel.grid[1] == 4 for name, kernel in kernels.items() if name.startswith(("up", "down")))


@pytest.mark.parametrize("extra", [{"USE_TMA": True}, {"PDL": True}, {"LAYOUT": "inline", "PDL": True}], ids=str)
def test_options(extra):
    kernels = compiled_for(MODELS["qwen3"], 40, "bf16", {**BASE, **extra})
    ptx = kernels["up_kernel"].ptx + kernels["down_kernel"].ptx
    assert ("cp.async.bulk.tensor" in ptx) == bool(extra.get("USE_TMA"))
    assert ("griddepcontrol.wait" in ptx) == bool(extra.get("PDL"))


def test_offsets_are_64_bit_only_where_sizes_need_them():
    def wide(num_tokens, shape=(8, 4096, 2048, 6)):
        kernels = compiled_for(shape, num_tokens, "bf16", BASE)
        return kernels["up_kernel"].ptx, kernels["down_kernel"].ptx, kernels["sum_kernel"].ptx

    # 6 * 87381 rows of 4096 columns end below 2^31, 6 * 87382 rows beyond.
    small, large = wide(87_380), wide(87_382)
    assert small == wide(1024)
    assert all(a != b for a, b in zip(small[1:], large[1:], strict=True))
