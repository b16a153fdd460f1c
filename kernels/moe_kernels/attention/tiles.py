"""Tiles and launch options of the Triton kernels, and which ones a call gets: numbers alone, no torch.

They depend on sizes, the dtype and the device, never on lengths: a captured launch serves every length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields, replace
from typing import NamedTuple, Self

H200_SMS = 132
H200_SHARED = 232448
# What Triton itself takes of a program's shared memory, for sums across warps and the like.
_SPARE = 2048


class DecodeShape(NamedTuple):
    """What a choice of tiles for decode depends on.

    Attributes:
        group: query heads to a head of keys.
        head_dim, v_head_dim: D and Dv.
        shared_v: whether values are the first columns of the keys.
        bytes: of an element.
    """

    group: int
    head_dim: int
    v_head_dim: int
    shared_v: bool
    bytes: int


class PrefillShape(NamedTuple):
    """What a choice of tiles for prefill depends on; fields as for decode."""

    group: int
    head_dim: int
    v_head_dim: int
    shared_v: bool
    bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tiles:
    @property
    def as_ints(self) -> list[int]:
        """The form in which tiles pass through an op schema."""
        return [int(value) for value in astuple(self)]

    @classmethod
    def from_ints(cls, values: Sequence[int]) -> Self:
        """Undo `as_ints`; ValueError where the count is wrong."""
        names = [field.name for field in fields(cls)]
        if len(values) != len(names):
            raise ValueError(f"config must hold {', '.join(names)}; got {list(values)}.")
        return cls(**dict(zip(names, values, strict=True)))


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeTiles(_Tiles):
    """Tiles and launch options of decode.

    Attributes:
        block_h, block_n: heads of a group and keys of a tile, powers of two.
        num_warps, num_stages: of a program.
        swap: keys are the left operand of products.
        programs: programs on a multiprocessor that sequences are split for.
        least_keys: keys of a part at least, a multiple of ``block_n``.
        pdl: parts are merged by a kernel that starts while the first one ends, where the GPU can.
    """

    block_h: int
    block_n: int
    num_warps: int
    num_stages: int
    swap: int = 0
    programs: int = 2
    least_keys: int = 256
    pdl: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillTiles(_Tiles):
    """Tiles and launch options of prefill.

    Attributes:
        block_m, block_n: rows (queries x heads of a group) and keys of a tile, powers of two.
        num_warps, num_stages: of a program.
        pack: heads of a group side by side in a tile's rows.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    pack: int = 1


def power_of_two(value: int) -> int:
    """The smallest power of two that is not below ``value``."""
    return 1 << max(0, value - 1).bit_length()


def head_split(head_dim: int) -> tuple[int, int]:
    """Columns of a head as two powers of two, the second 0 where the first holds all: 80 -> (64, 16), 128 -> (128, 0).

    Products take 16 columns at least: 72 -> (64, 16), 8 -> (16, 0).
    """
    main = power_of_two(head_dim)
    if main > head_dim:
        main //= 2
    main = max(16, main)
    rest = head_dim - main
    return main, max(16, power_of_two(rest)) if rest > 0 else 0


def decode_tiles(shape: DecodeShape, shared_bytes: int = H200_SHARED) -> DecodeTiles:
    """The default for a shape on a device whose programs may take ``shared_bytes`` of shared memory."""
    wide = shape.head_dim > 256
    block_h = max(16, power_of_two(min(shape.group, 64 if wide else 128)))
    if shape.bytes == 4:
        tiles = DecodeTiles(block_h=min(block_h, 16), block_n=16 if wide else 32, num_warps=4, num_stages=2)
    elif wide and block_h >= 64:
        # The sums of 64 heads take most registers of a multiprocessor: one program on each.
        tiles = DecodeTiles(block_h=block_h, block_n=32, num_warps=8, num_stages=3, programs=1)
    elif wide:
        tiles = DecodeTiles(block_h=block_h, block_n=32, num_warps=4 if block_h <= 16 else 8, num_stages=3)
    else:
        tiles = DecodeTiles(block_h=block_h, block_n=64, num_warps=4, num_stages=3)
    return fit_decode(tiles, shape, shared_bytes)


def decode_bytes(tiles: DecodeTiles, shape: DecodeShape) -> int:
    """Shared memory that a program may take at most: tiles in flight, queries, probabilities."""
    main, rest = head_split(shape.head_dim)
    columns = main + rest + (0 if shape.shared_v else power_of_two(max(16, shape.v_head_dim)))
    in_flight = tiles.num_stages * tiles.block_n * columns
    return (in_flight + tiles.block_h * (main + rest + tiles.block_n)) * shape.bytes + _SPARE


def fit_decode(tiles: DecodeTiles, shape: DecodeShape, shared_bytes: int) -> DecodeTiles:
    """``tiles`` with fewer stages, then narrower, until they fit."""
    while decode_bytes(tiles, shape) > shared_bytes:
        if tiles.num_stages > 2:
            tiles = replace(tiles, num_stages=tiles.num_stages - 1)
        elif tiles.block_n > 16:
            tiles = replace(tiles, block_n=tiles.block_n // 2)
        elif tiles.block_h > 16:
            tiles = replace(tiles, block_h=tiles.block_h // 2)
        elif tiles.num_stages > 1:
            tiles = replace(tiles, num_stages=1)
        else:
            break
    return tiles


def prefill_tiles(shape: PrefillShape, shared_bytes: int = H200_SHARED) -> PrefillTiles:
    """The default for a shape on a device whose programs may take ``shared_bytes`` of shared memory."""
    wide = shape.head_dim > 256
    if shape.bytes == 4:
        tiles = PrefillTiles(block_m=16 if wide else 32, block_n=16 if wide else 32, num_warps=4, num_stages=2)
    elif wide:
        tiles = PrefillTiles(block_m=64, block_n=32, num_warps=8, num_stages=3)
    elif max(shape.head_dim, shape.v_head_dim) > 192:
        tiles = PrefillTiles(block_m=128, block_n=32, num_warps=8, num_stages=3)
    elif max(shape.head_dim, shape.v_head_dim) > 128:
        tiles = PrefillTiles(block_m=128, block_n=64, num_warps=8, num_stages=3)
    else:
        tiles = PrefillTiles(block_m=128, block_n=128 if shape.head_dim > 64 else 64, num_warps=8, num_stages=3)
    return fit_prefill(replace(tiles, pack=min(shape.group, tiles.block_m)), shape, shared_bytes)


def prefill_bytes(tiles: PrefillTiles, shape: PrefillShape) -> int:
    """Shared memory that a program may take at most: tiles in flight, queries, probabilities."""
    main, rest = head_split(shape.head_dim)
    columns = main + rest + (0 if shape.shared_v else power_of_two(max(16, shape.v_head_dim)))
    in_flight = tiles.num_stages * tiles.block_n * columns
    return (in_flight + tiles.block_m * (main + rest)) * shape.bytes + _SPARE


def fit_prefill(tiles: PrefillTiles, shape: PrefillShape, shared_bytes: int) -> PrefillTiles:
    """``tiles`` with fewer stages, then narrower, until they fit."""
    while prefill_bytes(tiles, shape) > shared_bytes:
        if tiles.num_stages > 2:
            tiles = replace(tiles, num_stages=tiles.num_stages - 1)
        elif tiles.block_n > 32:
            tiles = replace(tiles, block_n=tiles.block_n // 2)
        elif tiles.block_m > 16:
            block_m = tiles.block_m // 2
            tiles = replace(tiles, block_m=block_m, pack=min(tiles.pack, block_m))
        elif tiles.block_n > 16:
            tiles = replace(tiles, block_n=tiles.block_n // 2)
        elif tiles.num_stages > 1:
            tiles = replace(tiles, num_stages=1)
        else:
            break
    return tiles


def num_splits(tiles: DecodeTiles, rows: int, max_keys: int, sms: int = H200_SMS) -> int:
    """Parts that sequences are cut into, so that ``rows`` programs a part fill the device.

    Example: 64 rows, 8192 keys, 132 multiprocessors of 2 programs: 264 // 64 = 4 parts.
    """
    wanted = tiles.programs * sms // max(1, rows)
    return max(1, min(wanted, -(-max_keys // tiles.least_keys)))
