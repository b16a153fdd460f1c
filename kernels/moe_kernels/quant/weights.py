"""Conversion of one weight matrix into each quantised format, and back.

Scales are worked out in float32 over float32 weights; values are rounded to nearest even against the scales as stored.

Shapes: N rows, K columns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from moe_kernels.formats import BLOCK, FP4_MAX, FP8_MAX, INT8_MAX, PACK_UNIT, SMALLEST_AMAX
from moe_kernels.quant.pack import from_e2m1, pack_nibbles, pad_columns, to_e2m1, unpack_nibbles
from moe_kernels.types import Quant

_E4M3_SMALLEST = 2.0**-9
_NVFP4_BLOCK, _MXFP4_BLOCK = 16, 32


class Stored(NamedTuple):
    """One matrix ``[N, K]`` as stored; ``ExpertWeights`` says what each tensor holds."""

    data: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None = None
    whole: torch.Tensor | None = None


_LIBRARY = torch.library.Library("moe_kernels", "FRAGMENT")
_LIBRARY.define("quantize_matrix(Tensor w, str quant, ScalarType dtype, int group_size, bool zero_points) -> Tensor[]")


def quantize_matrix(
    w_NK: torch.Tensor, quant: Quant, dtype: torch.dtype, group_size: int = 128, zero_points: bool = False
) -> Stored:
    """Store float32 ``w_NK``, all of it finite, as ``quant``; int4 has scales of ``dtype``.

    Zero rows and blocks give exact zeros; no scale is NaN or infinite. Compiled code calls what eager code calls:
    fused, a scale would not be rounded to its dtype before values are divided by it.
    """
    data, scale, *rest = torch.ops.moe_kernels.quantize_matrix(w_NK, quant.value, dtype, group_size, zero_points)
    return Stored(data, scale, zero=rest[0] if zero_points else None, whole=rest[0] if quant is Quant.NVFP4 else None)


def _quantize(
    w_NK: torch.Tensor, quant: str, dtype: torch.dtype, group_size: int, zero_points: bool
) -> list[torch.Tensor]:
    stored = _store(w_NK, Quant(quant), dtype, group_size, zero_points)
    return [tensor for tensor in stored if tensor is not None]


_LIBRARY.impl("quantize_matrix", _quantize, "CompositeExplicitAutograd")
torch.library.register_fake("moe_kernels::quantize_matrix", _quantize, lib=_LIBRARY)


def _store(w_NK: torch.Tensor, quant: Quant, dtype: torch.dtype, group_size: int, zero_points: bool) -> Stored:
    if quant is Quant.FP8_TENSOR:
        scale = _scale(w_NK.abs().amax().reshape(1, 1), FP8_MAX)
        return Stored(_to_fp8(w_NK / scale), scale)
    if quant is Quant.FP8_CHANNEL:
        scale = _scale(w_NK.abs().amax(dim=1, keepdim=True), FP8_MAX)
        return Stored(_to_fp8(w_NK / scale), scale)
    if quant is Quant.FP8_BLOCK:
        return _fp8_block(w_NK)
    if quant in (Quant.INT8, Quant.INT8_WEIGHT):
        scale = _scale(w_NK.abs().amax(dim=1, keepdim=True), INT8_MAX)
        return Stored((w_NK / scale).round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8), scale)
    if quant is Quant.INT4:
        return _int4(w_NK, dtype, group_size, zero_points)
    return _nvfp4(w_NK) if quant is Quant.NVFP4 else store_mxfp4(w_NK)


def dequantize_matrix(stored: Stored, quant: Quant, columns: int, group_size: int = 128) -> torch.Tensor:
    """The float32 values ``[..., N, columns]`` that stored matrices stand for, any number of them at once."""
    if quant is Quant.FP8_BLOCK:
        rows = stored.data.shape[-2]
        scale = _repeat(stored.scale, BLOCK, columns).mT
        return stored.data.to(torch.float32) * _repeat(scale, BLOCK, rows).mT
    if quant not in (Quant.INT4, Quant.NVFP4, Quant.MXFP4):
        return stored.data.to(torch.float32) * stored.scale
    nibbles = unpack_nibbles(stored.data)[..., :columns]
    if quant is Quant.INT4:
        values = nibbles.to(torch.float32)
        values = values - (8.0 if stored.zero is None else _repeat(stored.zero, group_size, columns))
        return values * _repeat(stored.scale, group_size, columns)
    values = from_e2m1(nibbles)
    if quant is Quant.MXFP4:
        return values * _repeat(e8m0_value(stored.scale), _MXFP4_BLOCK, columns)
    assert stored.whole is not None
    return values * _repeat(stored.scale, _NVFP4_BLOCK, columns) * stored.whole[..., None, None]


def _repeat(scale: torch.Tensor, width: int, columns: int) -> torch.Tensor:
    """Every column of ``scale`` as float32 ``width`` times, cut to ``columns``.

    By index: of a cut expansion torch 2.13 compiles wrong code for CPUs, which repeats the first columns at the end.
    """
    return scale.to(torch.float32)[..., torch.arange(columns, device=scale.device) // width]


def e8m0_value(stored: torch.Tensor) -> torch.Tensor:
    """``2^(b - 127)`` of uint8 b as float32."""
    # b is the exponent in the bits of the value; 0 stands for 2^-127, which has no exponent of its own in float32.
    bits = torch.where(stored == 0, 1 << 22, stored.to(torch.int32) << 23)
    return bits.to(torch.int32).view(torch.float32)


def _scale(amax: torch.Tensor, largest: float) -> torch.Tensor:
    # By a tensor: on a GPU torch divides by a number through its rounded inverse.
    return amax.clamp_min(SMALLEST_AMAX) / torch.full_like(amax, largest)


def _to_fp8(scaled: torch.Tensor) -> torch.Tensor:
    # Clamped first: what a conversion does past the largest value differs between eager and compiled code.
    return scaled.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def _fp8_block(w_NK: torch.Tensor) -> Stored:
    rows, columns = w_NK.shape
    padded = torch.nn.functional.pad(w_NK, (0, -columns % BLOCK, 0, -rows % BLOCK))
    tiles = padded.view(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    scale = _scale(tiles.abs().amax(dim=(1, 3)), FP8_MAX)
    data = _to_fp8(tiles / scale[:, None, :, None]).view(padded.shape)
    return Stored(data[:rows, :columns].contiguous(), scale)


def _int4(w_NK: torch.Tensor, dtype: torch.dtype, group_size: int, zero_points: bool) -> Stored:
    rows, columns = w_NK.shape
    groups = pad_columns(w_NK, group_size).view(rows, -1, group_size)
    limit = torch.finfo(dtype).max
    if zero_points:
        low, high = groups.amin(dim=2).clamp_max(0.0), groups.amax(dim=2).clamp_min(0.0)
        scale = _scale(high - low, 15.0).clamp_max(limit).to(dtype)
        scale = torch.where(scale == 0, torch.finfo(dtype).tiny, scale)
        zero = (-low / scale.float()).round().clamp(0, 15)
    else:
        scale = _scale(groups.abs().amax(dim=2), 7.0).clamp_max(limit).to(dtype)
        scale = torch.where(scale == 0, torch.finfo(dtype).tiny, scale)
        zero = torch.full_like(scale, 8.0, dtype=torch.float32)
    nibbles = ((groups / scale.float()[:, :, None]).round() + zero[:, :, None]).clamp(0 if zero_points else 1, 15)
    # Whole units of 32 columns, also where the last group reaches further.
    packed_columns = -(-columns // PACK_UNIT) * PACK_UNIT
    nibbles = nibbles.to(torch.uint8).view(rows, -1)[:, :packed_columns].contiguous()
    return Stored(pack_nibbles(nibbles), scale, zero.to(torch.uint8) if zero_points else None)


def store_nvfp4(w_NK: torch.Tensor, whole: torch.Tensor) -> Stored:
    """Blocks of 16 columns in e2m1 with an e4m3 each, times ``whole``: a scalar, or ``[N, 1]``, one a row."""
    blocks = pad_columns(w_NK).unflatten(1, (-1, _NVFP4_BLOCK))
    amax = blocks.abs().amax(dim=2)
    wanted = (amax / torch.full_like(amax, FP4_MAX) / whole).clamp(_E4M3_SMALLEST, FP8_MAX)
    scale = torch.where(amax > 0, wanted, 0.0).to(torch.float8_e4m3fn)
    step = scale.to(torch.float32) * whole
    values = torch.where(step[:, :, None] > 0, blocks / step.clamp_min(1e-38)[:, :, None], 0.0)
    return Stored(pack_nibbles(to_e2m1(values).flatten(1)), scale, whole=whole)


def _nvfp4(w_NK: torch.Tensor) -> Stored:
    return store_nvfp4(w_NK, _scale(w_NK.abs().amax(), FP4_MAX * FP8_MAX))


def store_mxfp4(w_NK: torch.Tensor) -> Stored:
    """Blocks of 32 columns in e2m1 with an e8m0 each."""
    blocks = pad_columns(w_NK).unflatten(1, (-1, _MXFP4_BLOCK))
    amax = blocks.abs().amax(dim=2)
    # The exponent of the largest value less that of 4, the largest power of two of e2m1; frexp's mantissa is below 1.
    exponent = torch.frexp(amax).exponent - 1 - 2
    stored = torch.where(amax > 0, exponent + 127, 0).clamp(0, 254).to(torch.uint8)
    values = blocks / e8m0_value(stored)[:, :, None]
    return Stored(pack_nibbles(to_e2m1(values).flatten(1)), stored)
