"""Rows of tuning files: what is wrong is named, with its file, row and key."""

import json

import pytest
from moe_kernels.tuning.names import Problem
from moe_kernels.tuning.rows import config_fault, parse_file, plain_config, plain_rows, reach_fault, shared_estimate

H200 = 232448
SGLANG = {
    "BLOCK_SIZE_M": 16,
    "BLOCK_SIZE_N": 64,
    "BLOCK_SIZE_K": 128,
    "GROUP_SIZE_M": 1,
    "num_warps": 4,
    "num_stages": 4,
}
OURS = {**SGLANG, "LAYOUT": "sorted", "USE_TMA": False, "SWAP_AB": False, "SPLIT_K": 1}
TOKEN = {**OURS, "LAYOUT": "token", "BLOCK_SIZE_M": 1}


def problem(quant="bf16", tokens=8, hidden=4096, ffn=14336, dtype="bf16", top_k=2):
    return Problem(tokens, 8, hidden, ffn, top_k, quant, dtype)


def both(row):
    return {"up": row, "down": row, "PDL": False}


def without(row, key):
    return {name: value for name, value in row.items() if name != key}


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ({**OURS, "num_warps": 3}, "up: num_warps must be a power of two from 1 to 16, not 3"),
        ({**OURS, "BLOCK_SIZE_N": 0}, "up: BLOCK_SIZE_N must be a power of two from 16 to 256, not 0"),
        ({**OURS, "BLOCK_SIZE_M": 48}, "up: BLOCK_SIZE_M must be a power of two from 16 to 256, not 48"),
        ({**OURS, "BLOCK_SIZE_K": "64"}, 'up: BLOCK_SIZE_K must be a power of two from 16 to 2048, not "64"'),
        ({**OURS, "num_stages": True}, "up: num_stages must be a whole number from 1 to 16, not true"),
        ({**OURS, "GROUP_SIZE_M": 0}, "up: GROUP_SIZE_M must be a whole number from 1 to 1024, not 0"),
        ({**OURS, "SPLIT_K": 0}, "up: SPLIT_K must be a whole number from 1 to 64, not 0"),
        ({**OURS, "USE_TMA": 1}, "up: USE_TMA must be true or false, not 1"),
        ({**OURS, "LAYOUT": "dense"}, 'up: LAYOUT must be sorted, inline or token, not "dense"'),
        (without(OURS, "num_warps"), "up: num_warps is missing"),
        ({**OURS, "waves": 1}, "up: waves is unknown; allowed: BLOCK_SIZE_M, "),
        ({**TOKEN, "BLOCK_SIZE_M": 16}, "up: BLOCK_SIZE_M must be 1 where LAYOUT is token, not 16"),
        ({**TOKEN, "SWAP_AB": True}, "up: SWAP_AB must be false where LAYOUT is token"),
        ({**TOKEN, "SPLIT_K": 2}, "up: SPLIT_K must be 1 where LAYOUT is token, not 2"),
        (None, "up is missing"),
        ([1], "up must be an object, not [1]"),
    ],
)
def test_a_bad_row_names_its_key(row, fault):
    assert config_fault(both(row), problem(), H200).startswith(fault)


def test_the_whole_configuration_is_checked():
    assert config_fault(both(OURS), problem(), H200) == ""
    assert config_fault({**both(OURS), "hidden_size": 4096, "top_k": 2, "us": 1.5}, problem(), H200) == ""
    assert config_fault({**both(OURS), "speed": 1}, problem(), H200).startswith("speed is unknown; allowed: up, ")
    assert config_fault({**both(OURS), "PDL": 1}, problem(), H200) == "PDL must be true or false, not 1"
    apart = {"up": OURS, "down": {**OURS, "BLOCK_SIZE_M": 32}}
    assert config_fault(apart, problem(), H200).startswith("up and down must share BLOCK_SIZE_M where both are sorted")
    assert config_fault({"up": OURS, "down": TOKEN}, problem(), H200) == ""


def test_tiles_of_block_scales_lie_within_a_block():
    for k, legal in ((32, False), (64, True), (128, True), (256, False)):
        fault = config_fault(both({**OURS, "BLOCK_SIZE_K": k, "num_stages": 2}), problem("fp8_block"), H200)
        assert (fault == "") == legal
        assert legal or fault == (f"up: BLOCK_SIZE_K must be 64 or 128 for fp8_block, whose scales cover 128, not {k}")
    assert config_fault(both({**TOKEN, "BLOCK_SIZE_K": 512}), problem("fp8_block"), H200) == ""
    assert "multiple of 128" in config_fault(both({**TOKEN, "BLOCK_SIZE_K": 64}), problem("fp8_block"), H200)


def test_packed_and_eight_bit_tiles_hold_a_unit():
    for quant, legal in (("bf16", True), ("int8", False), ("int4", False), ("mxfp4", False)):
        assert (config_fault(both({**OURS, "BLOCK_SIZE_K": 16}), problem(quant), H200) == "") == legal


def test_tma_needs_rows_of_sixteen_bytes():
    tma = both({**OURS, "USE_TMA": True})
    assert config_fault(tma, problem(), H200) == ""
    assert config_fault(tma, problem(hidden=4100), H200).startswith("up: USE_TMA needs weight rows that are multiples")
    assert config_fault(tma, problem(ffn=1004), H200).startswith("down: USE_TMA needs")
    assert config_fault(tma, problem("int4", ffn=1004), H200) == ""


def test_shared_memory_is_checked_for_the_device():
    large = {**OURS, "BLOCK_SIZE_M": 128, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 128, "num_stages": 3, "num_warps": 8}
    assert config_fault(both(large), problem(), H200) == (
        "up: its tiles need 294,912 bytes of shared memory and a block may take 232,448"
    )
    assert config_fault(both(large), problem(), 0) == ""
    assert config_fault(both({**large, "num_stages": 2}), problem(), H200) == ""
    assert config_fault(both({**large, "num_stages": 2}), problem(), 101376) == ""
    assert config_fault(both(large), problem(), 101376).startswith("up: its tiles need 196,608 bytes")
    assert config_fault(both(large), problem("fp8_tensor"), H200) == ""  # half the bytes


def test_the_estimate_is_what_compiled_kernels_hold():
    # Bytes that triton 3.7 reports for capability 9.0: three stages are two tiles without warpgroup instructions.
    bf16 = problem()
    row = {**OURS, "BLOCK_SIZE_K": 64, "num_stages": 3}
    assert shared_estimate(row, "up", bf16, H200) == 36864
    assert shared_estimate(row, "down", bf16, H200) == 20480
    wide = {**row, "BLOCK_SIZE_M": 128, "BLOCK_SIZE_N": 128, "num_warps": 8}
    assert shared_estimate(wide, "up", bf16, H200) == 147456
    assert shared_estimate(wide, "up", bf16, 166912) == 98304
    assert shared_estimate(row, "up", problem("fp32", dtype="fp32"), H200) == 73728
    assert shared_estimate(TOKEN, "up", bf16, H200) == 0


def test_layouts_reach_so_many_rows():
    assert reach_fault(both(TOKEN), 4, problem(tokens=4)) == ""
    assert reach_fault(both(TOKEN), 4, problem(tokens=5)) == "its token layout is for up to 4 tokens, not 5"
    inline = both({**OURS, "LAYOUT": "inline"})
    assert reach_fault(inline, 8, problem(tokens=512)) == ""
    assert reach_fault(inline, 8, problem(tokens=513)) == "its inline layout is for up to 1024 routed rows, not 1026"
    assert reach_fault(both(OURS), 8, problem(tokens=100_000)) == ""


def test_a_row_of_sglangs_serves_both_gemms():
    config, left_out = plain_config({**SGLANG, "waves_per_eu": 2, "SPLIT_K": 1})
    assert left_out == ["waves_per_eu"]
    # Gate and up lie side by side in one tile of theirs.
    assert (config["up"]["BLOCK_SIZE_N"], config["down"]["BLOCK_SIZE_N"]) == (32, 64)
    assert config_fault(config, problem(), H200) == ""
    config, _ = plain_config(SGLANG, {**SGLANG, "BLOCK_SIZE_N": 128, "USE_TMA": True})
    assert config["down"]["BLOCK_SIZE_N"] == 128
    assert config["down"]["USE_TMA"]
    renamed, _ = plain_config({**SGLANG, "SPLIT_K_SIZE": 2})
    assert renamed["down"]["SPLIT_K"] == 2
    assert plain_config({**SGLANG, "BLOCK_SIZE_N": 512}, SGLANG)[0]["up"]["BLOCK_SIZE_N"] == 256
    assert plain_config({**SGLANG, "BLOCK_SIZE_N": 512}) == (
        "down: BLOCK_SIZE_N must be a power of two from 16 to 256, not 512"
    )
    assert plain_config({**SGLANG, "LAYOUT": "token"}) == "up: LAYOUT is for _modes files"


def test_rows_for_sglang_and_back():
    config = {"up": {**OURS, "BLOCK_SIZE_N": 32, "SPLIT_K": 2}, "down": {**OURS, "USE_TMA": True}, "PDL": True}
    up, down = plain_rows(config)
    assert set(up) == set(SGLANG)
    assert set(down) == {*SGLANG, "USE_TMA"}
    back, _ = plain_config(up, down)
    for which in ("up", "down"):
        assert {key: back[which][key] for key in SGLANG} == {key: config[which][key] for key in SGLANG}
    assert plain_rows({**config, "up": TOKEN}) is None
    assert plain_rows({**config, "down": {**OURS, "BLOCK_SIZE_M": 32}}) is None
    assert plain_rows({**config, "down": {**OURS, "LAYOUT": "inline"}}) is not None


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("{", "is no valid JSON ("),
        ("[]", "must hold an object with a row for each token count."),
        ('{"8": {}, "8": {}}', "is no valid JSON (the key '8' stands there twice)."),
        ('{"8": NaN}', "is no valid JSON (NaN is no number of JSON)."),
        ('{"08": {}, "8": {}}', "row 8: stands there twice."),
        ('{"many": {}}', "row 'many': must be named by a number of tokens."),
        ('{"8": 3}', "row 8: must be an object, not 3."),
    ],
)
def test_a_bad_file_is_told(tmp_path, text, fault):
    path = tmp_path / "rows.json"
    path.write_text(text, encoding="utf-8")
    assert parse_file(path).faults[0].startswith(f"{path}: {fault}")


def test_a_file_that_is_none(tmp_path):
    assert parse_file(tmp_path / "none.json").faults == (
        f"{tmp_path / 'none.json'}: cannot be read (No such file or directory).",
    )
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe")
    assert "is no valid JSON" in parse_file(tmp_path / "bytes.json").faults[0]


def test_rows_come_in_order_and_a_version_is_no_row(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"triton_version": "3.4.0", "32": SGLANG, "4": SGLANG}), encoding="utf-8")
    parsed = parse_file(path)
    assert (list(parsed.rows), parsed.faults, parsed.triton_version) == ([4, 32], (), "3.4.0")
