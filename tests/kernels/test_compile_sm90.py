"""Every Triton kernel compiles for compute capability 9.0 as it would be launched, with no GPU at hand."""

import pytest
import torch

pytest.importorskip("triton")

from moe_kernels.experts.config import default_config, flatten_config, unflatten_config
from moe_kernels.experts.triton import launch_experts
from moe_kernels.testing.offline import compile_only

SHARED_LIMIT = 232448  # bytes a block may have on compute capability 9.0
MODELS = {
    "mixtral": (8, 4096, 14336, 2),
    "qwen3": (128, 2048, 768, 8),
    "v3": (256, 7168, 2048, 8),
    "odd": (5, 40, 23, 3),
}
BASE = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 8, "num_warps": 4, "num_stages": 3}


def compiled_for(shape, num_tokens, dtype, config=None):
    num_experts, hidden, ffn, top_k = shape
    if config is None:
        chosen, _ = default_config(num_tokens, num_experts, hidden, ffn, top_k, dtype)
    else:
        chosen = unflatten_config(tuple(flatten_config(config)))

    def empty(*sizes, dtype=dtype):
        return torch.empty(*sizes, dtype=dtype, device="meta")

    with compile_only(90) as kernels:
        launch_experts(
            empty(num_tokens, hidden),
            empty(num_experts, 2 * ffn, hidden),
            empty(num_experts, hidden, ffn),
            empty(num_tokens, top_k, dtype=torch.float32),
            empty(num_tokens, top_k, dtype=torch.int32),
            chosen,
        )
    return {kernel.name: kernel for kernel in kernels}


@pytest.mark.parametrize("num_tokens", [1, 8, 128, 4096])
@pytest.mark.parametrize("model", MODELS)
def test_defaults_in_bf16(model, num_tokens):
    kernels = compiled_for(MODELS[model], num_tokens, torch.bfloat16)
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
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_defaults_in_other_dtypes(dtype, num_tokens):
    kernels = compiled_for(MODELS["qwen3"], num_tokens, dtype)
    assert all(kernel.shared <= SHARED_LIMIT for kernel in kernels.values())
    if dtype == torch.float32:
        assert "tf32" not in kernels["up_kernel"].ptx


@pytest.mark.parametrize("extra", [{"USE_TMA": True}, {"PDL": True}, {"LAYOUT": "inline", "PDL": True}], ids=str)
def test_options(extra):
    kernels = compiled_for(MODELS["qwen3"], 40, torch.bfloat16, {**BASE, **extra})
    ptx = kernels["up_kernel"].ptx + kernels["down_kernel"].ptx
    assert ("cp.async.bulk.tensor" in ptx) == bool(extra.get("USE_TMA"))
    assert ("griddepcontrol.wait" in ptx) == bool(extra.get("PDL"))


def test_offsets_are_64_bit_only_where_sizes_need_them():
    def wide(num_tokens, shape=(8, 4096, 2048, 6)):
        kernels = compiled_for(shape, num_tokens, torch.bfloat16, BASE)
        return kernels["up_kernel"].ptx, kernels["down_kernel"].ptx, kernels["sum_kernel"].ptx

    # 6 * 87381 rows of 4096 columns end below 2^31, 6 * 87382 rows beyond.
    small, large = wide(87_380), wide(87_382)
    assert small == wide(1024)
    assert all(a != b for a, b in zip(small[1:], large[1:], strict=True))
