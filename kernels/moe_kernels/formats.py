"""What each weight format stores, and how activations are treated beside it. Torch is not needed to read it.

=========== ======= ============================== =========================================
format      weight  scales of a matrix [N, K]      activations
=========== ======= ============================== =========================================
fp8_tensor  e4m3    one float32                    e4m3, one scale a call (dynamic or static)
fp8_channel e4m3    float32 a row                  e4m3, one scale a token
fp8_block   e4m3    float32 a 128x128 block        e4m3, one scale a token and 128 columns
int8        int8    float32 a row                  int8, one scale a token
int8_weight int8    float32 a row                  as they are
int4        4 bits  compute dtype a row and group  as they are
nvfp4       e2m1    e4m3 a row and 16 columns,     as they are
                    times one float32
mxfp4       e2m1    e8m0 a row and 32 columns      as they are
=========== ======= ============================== =========================================

Gate and up count as two matrices. Activations that are quantised are so before each of the two products.

The backend ``triton_fp4`` multiplies nvfp4 and mxfp4 on FP4 units, and those take both operands in one format. There
activations are stored as the weights are: mxfp4 as e2m1 with an e8m0 a token and 32 columns; nvfp4 as e2m1 with an e4m3
a token and 16 columns, times one float32 a token, worked out at each call. One a token rather than one for all: it
needs no pass over all rows beforehand, and what a token gives depends on nothing else in the batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from moe_kernels.names import Impl, Quant

BLOCK = 128
FP8_MAX = 448.0
INT8_MAX = 127.0
FP4_MAX = 6.0
# The mxfp4 kernels hold a block's scale times 2^106 in bfloat16, which ends at 2^127.
MXFP4_LIMIT = 2.0**24
# Smallest magnitude that a scale stands for: below it, values count as zero, so that no scale is 0 and none overflows.
SMALLEST_AMAX = 1e-30
GROUP_SIZES = (32, 64, 128)
# Packed 4-bit weights: rows are padded to whole units of 32 columns, 16 bytes. In every 16 columns, byte j (0..7) holds
# column j in its low and column 8 + j in its high nibble.
PACK_UNIT, PACK_RUN = 32, 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """Facts about one format.

    Attributes:
        bits: of one stored weight.
        activation: ``"fp8"``, ``"int8"`` or ``"fp4"`` where activations are quantised, else ``""``.
        granularity: what one activation scale covers: ``"tensor"``, ``"token"``, ``"block"`` (128 columns of a token)
            or ``"group"`` (``scale_columns`` of a token); ``""`` for none.
        scale_bits: of one weight scale; 0 where there is none.
        scale_columns: columns that one weight scale covers; 0 for all of a row or matrix.
    """

    bits: int
    activation: str = ""
    granularity: str = ""
    scale_bits: int = 0
    scale_columns: int = 0

    @property
    def quantized(self) -> bool:
        """Whether weights have scales."""
        return self.scale_bits > 0

    @property
    def packed(self) -> bool:
        """Whether two weights share a byte."""
        return self.bits == 4

    @property
    def weight_only(self) -> bool:
        """Whether weights alone are quantised: they are unpacked in the kernel and multiplied as the compute dtype."""
        return self.quantized and not self.activation


FORMATS = {
    Quant.FP32: Format(bits=32),
    Quant.BF16: Format(bits=16),
    Quant.FP16: Format(bits=16),
    Quant.FP8_TENSOR: Format(bits=8, activation="fp8", granularity="tensor", scale_bits=32),
    Quant.FP8_CHANNEL: Format(bits=8, activation="fp8", granularity="token", scale_bits=32),
    Quant.FP8_BLOCK: Format(bits=8, activation="fp8", granularity="block", scale_bits=32, scale_columns=BLOCK),
    Quant.INT8: Format(bits=8, activation="int8", granularity="token", scale_bits=32),
    Quant.INT8_WEIGHT: Format(bits=8, scale_bits=32),
    Quant.INT4: Format(bits=4, scale_bits=16, scale_columns=128),
    Quant.NVFP4: Format(bits=4, scale_bits=8, scale_columns=16),
    Quant.MXFP4: Format(bits=4, scale_bits=8, scale_columns=32),
}
NATIVE_FP4 = {
    quant: replace(FORMATS[quant], activation="fp4", granularity="group") for quant in (Quant.NVFP4, Quant.MXFP4)
}


def format_for(quant: Quant, impl: str = "") -> Format:
    """Facts about a format as the implementation ``impl`` runs it: ``triton_fp4`` quantises activations beside FP4."""
    native = impl == Impl.TRITON_FP4.value and quant in NATIVE_FP4
    return NATIVE_FP4[quant] if native else FORMATS[quant]


def matrix_bytes(quant: str, rows: int, columns: int, *, group_size: int = 128, zero_points: bool = False) -> int:
    """Bytes that one matrix ``[rows, columns]`` takes with its scales, padding included.

    ``group_size`` and ``zero_points`` count for int4 only; other formats leave them unread.
    """
    scheme = Quant(quant)
    form = FORMATS[scheme]
    if not form.packed:
        data = rows * columns * form.bits // 8
        if scheme is Quant.FP8_TENSOR:
            return data + 4
        if scheme is Quant.FP8_BLOCK:
            return data + 4 * _ceil(rows, BLOCK) * _ceil(columns, BLOCK)
        return data + rows * form.scale_bits // 8
    data = rows * _ceil(columns, PACK_UNIT) * PACK_UNIT // 2
    if scheme is Quant.INT4:
        groups = _ceil(columns, group_size)
        return data + rows * groups * (3 if zero_points else 2)
    if scheme is Quant.NVFP4:
        return data + rows * _ceil(columns, PACK_UNIT) * 2 + 4
    return data + rows * _ceil(columns, PACK_UNIT)


def expert_bytes(
    quant: str, hidden_size: int, intermediate_size: int, *, group_size: int = 128, zero_points: bool = False
) -> int:
    """Bytes of one expert: gate, up and down with their scales."""
    gate = matrix_bytes(quant, intermediate_size, hidden_size, group_size=group_size, zero_points=zero_points)
    down = matrix_bytes(quant, hidden_size, intermediate_size, group_size=group_size, zero_points=zero_points)
    return 2 * gate + down


def _ceil(value: int, unit: int) -> int:
    return -(-value // unit)
