"""Names of tuning files, as SGLang and vLLM write them.

``E={E},N={N},device_name={device}[,dtype=WORD][,block_shape=[n, k]][,per_channel_quant=True][_down].json`` in a folder
``triton_3_6_0``. N is the width F of one expert on one rank. vLLM has no space in ``[128,128]``, no ``_down`` and no
folder per triton version. ``_modes`` marks the files of these kernels' own rows. Source: SGLang's
fused_moe_triton_config.py and vLLM's fused_moe.py.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NamedTuple

from moe_kernels.formats import BLOCK
from moe_kernels.names import Quant


class Problem(NamedTuple):
    """What a configuration is chosen for.

    Attributes:
        num_tokens: T.
        num_experts: E.
        hidden_size: D; 0 where it is not known.
        intermediate_size: F.
        top_k: K.
        quant: weight format, a value of ``Quant``.
        dtype: of activations: ``"fp32"``, ``"bf16"`` or ``"fp16"``.
        group_size: columns that an int4 scale covers; not read for other formats.
    """

    num_tokens: int
    num_experts: int
    hidden_size: int
    intermediate_size: int
    top_k: int
    quant: str
    dtype: str = "bf16"
    group_size: int = 128


class Dialect(StrEnum):
    """Whose spelling a name has."""

    SGLANG = "sglang"
    VLLM = "vllm"


class Part(StrEnum):
    """What a file holds: rows of both GEMMs or of the first, rows of the second, or whole configurations."""

    UP = ""
    DOWN = "_down"
    MODES = "_modes"


class FormatWords(NamedTuple):
    """A format as file names tell it.

    Attributes:
        dtype: ``""`` for bf16 and fp16, which share their files.
        block_shape: of the weight scales; int4's group g is (0, g). None where the name has none.
        per_channel: whether ``per_channel_quant=True`` is there.
    """

    dtype: str = ""
    block_shape: tuple[int, int] | None = None
    per_channel: bool = False


class TuningName(NamedTuple):
    """A file's name, taken apart."""

    num_experts: int
    intermediate_size: int
    device: str
    words: FormatWords
    part: Part = Part.UP


_WORDS = {
    Quant.FP32: FormatWords("float32"),
    Quant.BF16: FormatWords(),
    Quant.FP16: FormatWords(),
    Quant.FP8_TENSOR: FormatWords("fp8_w8a8"),
    Quant.FP8_CHANNEL: FormatWords("fp8_w8a8", per_channel=True),
    Quant.FP8_BLOCK: FormatWords("fp8_w8a8", (BLOCK, BLOCK)),
    Quant.INT8: FormatWords("int8_w8a8", per_channel=True),
    Quant.INT8_WEIGHT: FormatWords("int8_w8a16"),
    Quant.INT4: FormatWords("int4_w4a16"),
    # No other project's words: none of them tunes these two.
    Quant.NVFP4: FormatWords("nvfp4_w4a16"),
    Quant.MXFP4: FormatWords("mxfp4_w4a16"),
}
_NAME = re.compile(
    r"E=(?P<experts>\d+),N=(?P<width>\d+),device_name=(?P<device>[^,]+?)"
    r"(?:,dtype=(?P<dtype>\w+?))?"
    r"(?:,block_shape=\[(?P<rows>\d+), ?(?P<columns>\d+)\])?"
    r"(?P<channel>,per_channel_quant=True)?"
    r"(?P<part>_down|_modes)?\.json"
)
_FOLDER = re.compile(r"triton_(\d+(?:_\d+)*)")


def format_words(quant: str, group_size: int = 128) -> FormatWords:
    """What the names of a format's files say; ValueError names an unknown format."""
    words = _WORDS[Quant(quant)]
    return words._replace(block_shape=(0, group_size)) if quant == Quant.INT4 else words


def accepted_words(quant: str, group_size: int = 128) -> list[FormatWords]:
    """The words under which rows of a format may stand, the own ones first.

    SGLang and vLLM leave a block shape that holds a zero out of the name, so int4's group is not told by theirs.
    """
    own = format_words(quant, group_size)
    return [own, own._replace(block_shape=None)] if quant == Quant.INT4 else [own]


def quant_of(words: FormatWords) -> tuple[Quant, int] | None:
    """The format and group size that a name's words mean, ``bf16`` for bf16 and fp16; None for another project's."""
    if words.dtype == "int4_w4a16" and not words.per_channel:
        if words.block_shape is None:
            return Quant.INT4, 128
        return (Quant.INT4, words.block_shape[1]) if words.block_shape[0] == 0 else None
    return next(((quant, 128) for quant, own in _WORDS.items() if own == words), None)


def device_word(device_name: str) -> str:
    """A device's name as files have it: ``NVIDIA H200`` as ``NVIDIA_H200``."""
    return device_name.replace(" ", "_")


def problem_name(problem: Problem, device_name: str, part: Part = Part.UP) -> TuningName:
    """The name under which this package keeps rows for a problem."""
    words = format_words(problem.quant, problem.group_size)
    return TuningName(problem.num_experts, problem.intermediate_size, device_word(device_name), words, part)


def build_name(name: TuningName, dialect: Dialect = Dialect.SGLANG) -> str:
    """Write a file's name.

    Raises:
        ValueError: vLLM knows no ``_down`` files.
    """
    vllm = dialect is Dialect.VLLM
    if vllm and name.part is Part.DOWN:
        raise ValueError("part must be '' or '_modes' in vLLM's dialect, which knows no _down files.")
    words = name.words
    text = f"E={name.num_experts},N={name.intermediate_size},device_name={name.device}"
    if words.dtype:
        text += f",dtype={words.dtype}"
    if words.block_shape:
        text += f",block_shape=[{words.block_shape[0]},{'' if vllm else ' '}{words.block_shape[1]}]"
    if words.per_channel:
        text += ",per_channel_quant=True"
    return f"{text}{name.part}.json"


def parse_name(file_name: str) -> TuningName | None:
    """Take a file's name apart, in either dialect; None where it is no tuning file's."""
    found = _NAME.fullmatch(file_name)
    if found is None:
        return None
    block = (int(found["rows"]), int(found["columns"])) if found["rows"] else None
    words = FormatWords(found["dtype"] or "", block, found["channel"] is not None)
    part = Part(found["part"] or "")
    return TuningName(int(found["experts"]), int(found["width"]), found["device"], words, part)


def version_folder(triton_version: str) -> str:
    """``3.6.0`` as ``triton_3_6_0``."""
    return f"triton_{triton_version.partition('+')[0].replace('.', '_')}"


def parse_version_folder(folder_name: str) -> str | None:
    """``triton_3_6_0`` as ``3.6.0``; None for a folder of another kind."""
    found = _FOLDER.fullmatch(folder_name)
    return found[1].replace("_", ".") if found else None
