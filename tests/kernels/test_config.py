"""Tile configurations: checked before use, and their origin is told."""

import pytest
import torch
from moe_kernels import ExpertWeights, Quant, resolve_config
from moe_kernels.experts.config import INLINE_MAX_ROWS, Layout, Target, default_config, flatten_config, unflatten_config
from moe_kernels.tuning.names import Problem

SGLANG = {
    "BLOCK_SIZE_M": 16,
    "BLOCK_SIZE_N": 64,
    "BLOCK_SIZE_K": 128,
    "GROUP_SIZE_M": 1,
    "num_warps": 4,
    "num_stages": 4,
}
TOKEN = {**SGLANG, "BLOCK_SIZE_M": 1, "LAYOUT": "token"}
MODELS = [(8, 4096, 14336, 2), (128, 2048, 768, 8), (64, 2048, 1408, 6), (64, 3584, 2560, 8), (256, 7168, 2048, 8)]


def test_sglang_keys_serve_both_gemms():
    config = unflatten_config(tuple(flatten_config(SGLANG)))
    assert config.up == config.down
    assert config.up.block_n == 64
    assert config.up.layout == "sorted"
    assert not config.pdl


def test_round_trip():
    plain = {"USE_TMA": False, "SWAP_AB": False, "SPLIT_K": 1}
    split = {"LAYOUT": "inline", "USE_TMA": True, "SWAP_AB": True, "SPLIT_K": 4}
    config = {"up": {**TOKEN, **plain}, "down": {**SGLANG, **split}, "PDL": True}
    assert unflatten_config(tuple(flatten_config(config))).as_dict() == config


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**SGLANG, "num_warps": 3}, "^num_warps of config must be a power of two from 1 to 16; got 3"),
        ({**SGLANG, "BLOCK_SIZE_N": 0}, "^BLOCK_SIZE_N of config must be a power of two from 16 to 256; got 0"),
        ({**SGLANG, "BLOCK_SIZE_M": 8}, "^BLOCK_SIZE_M of config must be a power of two from 16 to 256; got 8"),
        ({**SGLANG, "LAYOUT": "token"}, "^BLOCK_SIZE_M of config must be 1 where LAYOUT is token; got 16"),
        ({**SGLANG, "LAYOUT": "dense"}, "^LAYOUT must be one of sorted, inline, token; got 'dense'"),
        ({**SGLANG, "num_stages": 0}, "^num_stages of config must be an integer from 1 to 16; got 0"),
        ({**SGLANG, "waves_per_eu": 1}, "^config key 'waves_per_eu' of config is unknown"),
        ({**TOKEN, "USE_TMA": True}, "^USE_TMA of config must be False where LAYOUT is token"),
        ({**TOKEN, "SWAP_AB": True}, "^SWAP_AB of config must be False where LAYOUT is token"),
        ({**SGLANG, "SPLIT_K": 0}, "^SPLIT_K of config must be an integer from 1 to 64; got 0"),
        ({**SGLANG, "USE_TMA": "false"}, "^USE_TMA of config must be True or False; got 'false'"),
        ({**SGLANG, "PDL": 1}, "^PDL of config must be True or False; got 1"),
        ({"up": 3, "down": SGLANG}, "^up must be a dict of BLOCK_SIZE_M"),
        ({**SGLANG, "SPLIT_K": True}, "^SPLIT_K of config must be an integer from 1 to 64; got True"),
        ({**SGLANG, "SPLIT_K": 2.0}, "^SPLIT_K of config must be an integer from 1 to 64; got 2.0"),
        ({"BLOCK_SIZE_M": 16}, "^config of config lacks BLOCK_SIZE_N"),
        ({"up": SGLANG}, "^config must hold both 'up' and 'down'"),
        ({"up": SGLANG, "down": SGLANG, "BLOCK_SIZE_M": 16}, "^config key 'BLOCK_SIZE_M' is unknown beside 'up'"),
        (
            {"up": SGLANG, "down": {**SGLANG, "BLOCK_SIZE_M": 32}},
            "^up and down must share BLOCK_SIZE_M .* got 16 and 32",
        ),
    ],
)
def test_wrong_entries_are_named(config, message):
    with pytest.raises(ValueError, match=message):
        flatten_config(config)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [*MODELS, (1, 1, 1, 1), (60, 40, 23, 7), (513, 64, 8, 9)], ids=str)
def test_every_default_is_legal(shape, dtype):
    num_experts, hidden, ffn, top_k = shape
    dense = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]
    for quant in (dense, *(q for q in Quant if q not in ("bf16", "fp16", "fp32"))):
        for num_tokens in (0, 1, 2, 8, 9, 32, 100, 128, 129, 1024, 5000, 100_000):
            config, source = resolve_config(
                num_tokens=num_tokens, num_experts=num_experts, hidden_size=hidden, intermediate_size=ffn, top_k=top_k,
                dtype=dtype, quant=quant, group_size=128 if quant == "int4" else 0,
            )  # fmt: skip
            assert unflatten_config(tuple(flatten_config(config))).as_dict() == config
            for gemm in (config["up"], config["down"]):
                assert gemm["LAYOUT"] != "inline" or num_tokens * top_k <= INLINE_MAX_ROWS
                assert gemm["LAYOUT"] != "token" or num_tokens <= 8
                if quant == "fp8_block":
                    assert gemm["BLOCK_SIZE_K"] % 128 == 0 if gemm["LAYOUT"] == "token" else gemm["BLOCK_SIZE_K"] <= 128
            assert source.endswith(".")
            assert source.startswith(("Tuned on", "Default rule"))


def test_dtype_and_format_are_refused_by_name():
    size = {"num_tokens": 1, "num_experts": 2, "hidden_size": 8, "intermediate_size": 8, "top_k": 1}
    with pytest.raises(ValueError, match=r"^quant must be one of fp32, .*; got 'fp9'"):
        resolve_config(**size, dtype=torch.bfloat16, quant="fp9")


def test_dtype_is_refused_by_name():
    with pytest.raises(ValueError, match=r"^dtype must be one of fp32, bf16, fp16; got torch.float64"):
        resolve_config(num_tokens=1, num_experts=2, hidden_size=8, intermediate_size=8, top_k=1, dtype=torch.float64)


def test_another_gpu_gets_the_rule_and_tiles_that_fit_its_shared_memory():
    small = Target("NVIDIA L40S", 101376)
    for quant, size in (("bf16", 2), ("fp8_block", 1), ("nvfp4", 0.5)):
        for num_tokens in (1, 8, 128, 1024, 4096):
            config, source = default_config(Problem(num_tokens, 128, 2048, 768, 8, quant, "bf16", 0), small)
            assert source.startswith("Default rule. No tuned row for E=128")
            assert "NVIDIA L40S" in source
            for gemm, tiles in ((config.up, 2), (config.down, 1)):
                row = gemm.block_m * (1 if quant == "fp8_block" else 2) + tiles * gemm.block_n * size
                if gemm.layout is not Layout.TOKEN:
                    assert gemm.num_stages * row * gemm.block_k <= small.shared_bytes
            unflatten_config(tuple(flatten_config(config.as_dict())))
    assert "Tuned on NVIDIA H200" in default_config(Problem(8, 128, 2048, 768, 8, "bf16", "bf16", 0))[1]


@pytest.mark.parametrize(
    ("quant", "row", "num_rows", "message"),
    [
        ("fp8_block", {**TOKEN, "BLOCK_SIZE_N": 256}, 8, "^BLOCK_SIZE_N of up must be at most 128 for fp8_block"),
        ("fp8_block", {**TOKEN, "BLOCK_SIZE_K": 64}, 8, "^BLOCK_SIZE_K of up must be a multiple of 128 for fp8_block"),
        ("fp8_block", {**SGLANG, "BLOCK_SIZE_K": 256}, 8, "^BLOCK_SIZE_K of up must be 64 or 128 for fp8_block"),
        ("int8", {**SGLANG, "BLOCK_SIZE_K": 16}, 8, "^BLOCK_SIZE_K of up must be at least 32 for int8; got 16"),
        ("nvfp4", {**SGLANG, "BLOCK_SIZE_K": 16}, 8, "^BLOCK_SIZE_K of up must be at least 32 for nvfp4; got 16"),
        ("bf16", {**TOKEN, "SPLIT_K": 2}, 8, "^SPLIT_K of up must be 1 where LAYOUT is token; got 2"),
        ("bf16", {**SGLANG, "LAYOUT": "inline"}, 1025, "^LAYOUT inline of up takes up to 1024 routed rows, not 1025"),
        ("bf16", TOKEN, 2**26, "^LAYOUT token of up does not reach 67108864 rows of 256 columns; use sorted"),
    ],
)
def test_what_a_format_or_size_forbids_is_not_launched(quant, row, num_rows, message):
    pytest.importorskip("triton")
    from moe_kernels.experts.layer import StoredLayer
    from moe_kernels.experts.triton import check_legal

    weights = ExpertWeights.from_dense(torch.zeros(1, 512, 256), torch.zeros(1, 256, 256), quant)
    layer = StoredLayer(*(weights.tensors().get(n) for n in StoredLayer._fields[:10]), weights.quant, 256, 0)
    config = unflatten_config(tuple(flatten_config(row)))
    with pytest.raises(ValueError, match=message):
        check_legal(config, layer, num_rows)


def test_a_split_needs_tiles_of_tensor_cores():
    from moe_kernels.experts.ops import choose_config

    problem = Problem(1, 128, 2048, 768, 8, "bf16", "bf16", 0)
    assert Layout.TOKEN in (default_config(problem)[0].up.layout, default_config(problem)[0].down.layout)
    split = choose_config([], problem, torch.device("cpu"), 4)
    assert (split.up.layout, split.up.split_k, split.down.split_k) == (Layout.INLINE, 4, 4)
    with pytest.raises(ValueError, match=r"^split_k must be None or 1 where LAYOUT of config is token; got 4"):
        choose_config(flatten_config(TOKEN), problem, torch.device("cpu"), 4)
