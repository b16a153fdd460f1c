"""Weights of four bits, unpacked in registers.

Of every 16 columns a byte j (0..7) holds column j in its low nibble and column 8 + j in its high one, so that both
halves of a tile of bytes are runs of 8 columns: activations are read as they lie, and one scale serves both nibbles.

FORM: 0 int4, ``(nibble - zero) * scale``; 1 nvfp4 and 2 mxfp4, ``e2m1 * scale``. The e2m1 value of a nibble ``s ee m``
is read by putting its bits where a wider format has sign, exponent and mantissa, which makes it too small by a power of
two: 2^126 for bfloat16, 2^14 for float16. Subnormals come out right, too.
"""

# Triton gives its decorator and its device functions no types.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

# Of weights unpacked to bfloat16: what they are times too small, so that a scale and the factor above fit in one.
SHRUNK = tl.constexpr(2.0**-20)

# Four bytes and their scales to 4 + 4 values: two bytes a register, sign and e2m1 moved into place, times the scale,
# which holds 2^126 * SHRUNK. fma with -0 is the product that every GPU of compute capability 8.0 has.
_E2M1_BF16 = tl.constexpr("""
{
.reg .b32 r0, r1, t, zero;
mov.b32 zero, 0x80008000;
prmt.b32 r0, $4, 0, 0x1404;
prmt.b32 r1, $4, 0, 0x3424;
shr.b32 t, r0, 6;
and.b32 t, t, 0x01C001C0;
lop3.b32 $2, r0, 0x80008000, t, 0xEA;
shr.b32 t, r1, 6;
and.b32 t, t, 0x01C001C0;
lop3.b32 $3, r1, 0x80008000, t, 0xEA;
shl.b32 r0, r0, 4;
shl.b32 r1, r1, 4;
shr.b32 t, r0, 6;
and.b32 t, t, 0x01C001C0;
lop3.b32 $0, r0, 0x80008000, t, 0xEA;
shr.b32 t, r1, 6;
and.b32 t, t, 0x01C001C0;
lop3.b32 $1, r1, 0x80008000, t, 0xEA;
fma.rn.bf16x2 $0, $0, $5, zero;
fma.rn.bf16x2 $1, $1, $6, zero;
fma.rn.bf16x2 $2, $2, $5, zero;
fma.rn.bf16x2 $3, $3, $6, zero;
}
""")
# The same for int4: a nibble set into the mantissa of 128 is 128 plus the nibble; $7 and $8 hold -(128 + zero).
_INT4_BF16 = tl.constexpr("""
{
.reg .b32 r0, r1, t, one, zero;
mov.b32 one, 0x3F803F80;
mov.b32 zero, 0x80008000;
prmt.b32 r0, $4, 0, 0x1404;
prmt.b32 r1, $4, 0, 0x3424;
shr.b32 t, r0, 12;
lop3.b32 $2, t, 0x000F000F, 0x43004300, 0xEA;
shr.b32 t, r1, 12;
lop3.b32 $3, t, 0x000F000F, 0x43004300, 0xEA;
shr.b32 t, r0, 8;
lop3.b32 $0, t, 0x000F000F, 0x43004300, 0xEA;
shr.b32 t, r1, 8;
lop3.b32 $1, t, 0x000F000F, 0x43004300, 0xEA;
fma.rn.bf16x2 $0, $0, one, $7;
fma.rn.bf16x2 $1, $1, one, $8;
fma.rn.bf16x2 $2, $2, one, $7;
fma.rn.bf16x2 $3, $3, one, $8;
fma.rn.bf16x2 $0, $0, $5, zero;
fma.rn.bf16x2 $1, $1, $6, zero;
fma.rn.bf16x2 $2, $2, $5, zero;
fma.rn.bf16x2 $3, $3, $6, zero;
}
""")


@triton.jit
def e2m1(nibble):
    """The float32 values of int32 nibbles, by way of float16."""
    bits = ((nibble & 8) << 12) | ((nibble & 7) << 9)
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.jit
def e8m0(stored):
    """``2^(b - 127)`` of uint8 b as float32: b is the exponent of one; 0 stands for 2^-127, a subnormal there."""
    value = (stored.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    return tl.where(stored == 0, 5.877471754111438e-39, value)


@triton.jit
def expand(scale, ROWS: tl.constexpr, SCALES: tl.constexpr, SPAN: tl.constexpr):
    """``[ROWS, SCALES]`` to ``[ROWS, SCALES * SPAN / 2]``: each once for the bytes that hold its SPAN columns."""
    return tl.reshape(tl.broadcast_to(scale[:, :, None], [ROWS, SCALES, SPAN // 2]), [ROWS, SCALES * SPAN // 2])


@triton.jit
def unpack(
    packed, scale, zero, ROWS: tl.constexpr, SCALES: tl.constexpr, SPAN: tl.constexpr, FORM: tl.constexpr,
    DTYPE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Bytes ``[ROWS, SCALES * SPAN / 2]`` to the weights in their low and in their high nibbles, rounded to DTYPE once.

    Scales, and zeros of int4, are ``[ROWS, SCALES]`` as ``load_scales`` gives them. ASM works on two values at once; it
    is for bfloat16 and gives the same bits, those of nvfp4 and mxfp4 times SHRUNK: weights below 2^-105 lose some.
    """
    scale = expand(scale, ROWS, SCALES, SPAN)
    if ASM:
        if FORM == 0:
            return tl.inline_asm_elementwise(
                _INT4_BF16, "=&r,=&r,=&r,=&r,r,r,r,r,r", [packed, scale, expand(zero, ROWS, SCALES, SPAN)],
                dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4,
            )  # fmt: skip
        else:
            return tl.inline_asm_elementwise(
                _E2M1_BF16, "=&r,=&r,=&r,=&r,r,r,r", [packed, scale],
                dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4,
            )  # fmt: skip
    else:
        both = packed.to(tl.int32)
        if FORM == 0:
            zero = expand(zero, ROWS, SCALES, SPAN)
            low = (both & 15).to(tl.float32) - zero
            high = (both >> 4).to(tl.float32) - zero
        else:
            low = e2m1(both & 15)
            high = e2m1(both >> 4)
        return (low * scale).to(DTYPE), (high * scale).to(DTYPE)


@triton.jit
def load_scales(
    scale_ptrs, zero_ptrs, k, LENGTH: tl.constexpr, SCALES: tl.constexpr, FORM: tl.constexpr, GROUP: tl.constexpr,
    HAS_ZERO: tl.constexpr, EVEN: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """(scales, zeros), each ``[ROWS, SCALES]``, of the groups of GROUP columns from column k on.

    In float32, or as ``unpack`` with ASM takes them: bfloat16, those of nvfp4 and mxfp4 times 2^126 * SHRUNK, which is
    exact, and zeros as ``-(128 + zero)``. ``scale_ptrs`` and ``zero_ptrs`` are ``[ROWS]``, at each row's first one.
    Scales past the last column are 0; with EVEN there are none.
    """
    group = k // GROUP + tl.arange(0, SCALES)[None, :]
    mask = None if EVEN else group < (LENGTH + GROUP - 1) // GROUP
    stored = tl.load(scale_ptrs[:, None] + group, mask=mask)
    if FORM == 2:
        if ASM:
            scale = ((stored.to(tl.int16) + 106) << 7).to(tl.bfloat16, bitcast=True)
        else:
            scale = e8m0(stored)
        zero = scale
    elif FORM == 1:
        scale = stored.to(tl.float32)
        if ASM:
            scale = (scale * 8.112963841460668e31).to(tl.bfloat16)
        zero = scale
    else:
        zero = tl.full(stored.shape, 8.0, tl.float32)
        if HAS_ZERO:
            zero = tl.load(zero_ptrs[:, None] + group, mask=mask).to(tl.float32)
        if ASM:
            scale = stored.to(tl.bfloat16)
            zero = (-128.0 - zero).to(tl.bfloat16)
        else:
            scale = stored.to(tl.float32)
    if not EVEN:
        # Not of the load: scales of every format are turned into numbers first.
        scale = tl.where(mask, scale, 0.0)
    return scale, zero
