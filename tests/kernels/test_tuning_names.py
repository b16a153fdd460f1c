"""Names of tuning files: SGLang's and vLLM's, built and taken apart."""

import pytest
from moe_kernels.names import Quant
from moe_kernels.tuning.names import (
    Dialect,
    FormatWords,
    Part,
    Problem,
    TuningName,
    accepted_words,
    build_name,
    device_word,
    format_words,
    parse_name,
    parse_version_folder,
    problem_name,
    quant_of,
    version_folder,
)

START = "E=8,N=14336,device_name=NVIDIA_H200"
# What SGLang's own function writes, spaces and all.
SGLANG = {
    "fp32": ",dtype=float32",
    "bf16": "",
    "fp16": "",
    "fp8_tensor": ",dtype=fp8_w8a8",
    "fp8_channel": ",dtype=fp8_w8a8,per_channel_quant=True",
    "fp8_block": ",dtype=fp8_w8a8,block_shape=[128, 128]",
    "int8": ",dtype=int8_w8a8,per_channel_quant=True",
    "int8_weight": ",dtype=int8_w8a16",
    "int4": ",dtype=int4_w4a16,block_shape=[0, 64]",
    "nvfp4": ",dtype=nvfp4_w4a16",
    "mxfp4": ",dtype=mxfp4_w4a16",
}


def problem(quant):
    return Problem(8, 8, 4096, 14336, 2, quant, group_size=64)


@pytest.mark.parametrize("quant", list(Quant))
def test_every_format_has_its_name(quant):
    assert build_name(problem_name(problem(quant), "NVIDIA H200")) == f"{START}{SGLANG[quant]}.json"
    vllm = build_name(problem_name(problem(quant), "NVIDIA H200"), Dialect.VLLM)
    assert vllm == f"{START}{SGLANG[quant].replace(', ', ',')}.json"


@pytest.mark.parametrize("dialect", list(Dialect))
@pytest.mark.parametrize("part", list(Part), ids=["up", "down", "modes"])
@pytest.mark.parametrize("quant", list(Quant))
def test_round_trip(quant, part, dialect):
    name = problem_name(problem(quant), "NVIDIA A100-SXM4-80GB", part)
    if part is Part.DOWN and dialect is Dialect.VLLM:
        with pytest.raises(ValueError, match=r"^part must be '' or '_modes' in vLLM's dialect"):
            build_name(name, dialect)
        return
    assert parse_name(build_name(name, dialect)) == name
    found = quant_of(name.words)
    assert found == ("bf16" if quant == "fp16" else quant, 64 if quant == "int4" else 128)


def test_names_of_other_projects_are_read():
    assert parse_name("E=257,N=256,device_name=AMD_Instinct_MI300X,dtype=fp8_w8a8,block_shape=[128,128].json") == (
        TuningName(257, 256, "AMD_Instinct_MI300X", FormatWords("fp8_w8a8", (128, 128)))
    )
    down = parse_name("E=8,N=14336,device_name=NVIDIA_H200_down.json")
    assert (down.device, down.part) == ("NVIDIA_H200", Part.DOWN)


@pytest.mark.parametrize(
    "text",
    [
        "README",
        "E=8,N=14336.json",
        "E=x,N=14336,device_name=NVIDIA_H200.json",
        f"{START},block_shape=[128].json",
        f"{START},per_channel_quant=False.json",
        f"{START}.json.bak",
        f"{START}_up.txt",
    ],
)
def test_other_files_are_no_tuning_files(text):
    assert parse_name(text) is None


def test_formats_of_other_projects_are_none():
    assert quant_of(FormatWords("fp8_w8a16")) is None
    assert quant_of(FormatWords("fp8_w8a8", (64, 64))) is None
    assert quant_of(FormatWords("int4_w4a16", (1, 64))) is None


def test_int4_is_also_found_where_the_group_is_left_out():
    # SGLang and vLLM write no block shape that holds a zero.
    assert accepted_words("int4", 64) == [FormatWords("int4_w4a16", (0, 64)), FormatWords("int4_w4a16")]
    assert accepted_words("fp8_block") == [format_words("fp8_block")]


def test_folders_and_devices():
    assert version_folder("3.6.0") == "triton_3_6_0"
    assert version_folder("3.6.0+git1234") == "triton_3_6_0"
    assert parse_version_folder("triton_3_6_0") == "3.6.0"
    assert parse_version_folder("triton") is None
    assert device_word("NVIDIA H200") == "NVIDIA_H200"
