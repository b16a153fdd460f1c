"""Quantisation of activations in Triton; the same bits as the specification.

Shapes: R rows, C columns, T tokens, K experts per token.
"""

# Triton gives its decorator and its device functions no types.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from moe_kernels.experts.rules import TRITON_INTERPRETED
from moe_kernels.formats import BLOCK, FP8_MAX, SMALLEST_AMAX

_INT32_MAX = 2**31 - 1
_INTERPRETED = tl.constexpr(TRITON_INTERPRETED)
_PARTIALS = 256
_ONE_LOOK = 16384
_TORCH = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}


@triton.jit
def in_use(ids_ptr, row, E: tl.constexpr, K: tl.constexpr, K_P2: tl.constexpr, SLOTS: tl.constexpr):
    """Whether any expert here reads this row."""
    if SLOTS:
        expert = tl.load(ids_ptr + row)
        return (expert >= 0) & (expert < E)
    else:
        slot = tl.arange(0, K_P2)
        experts = tl.load(ids_ptr + row * K + slot, mask=slot < K, other=-1)
        return tl.max(((experts >= 0) & (experts < E)).to(tl.int32)) > 0


@triton.jit
def to_e4m3(x):
    """float32 within -448 to 448 to e4m3, to nearest even; a NaN stays one.

    The interpreter's own conversion loses the carry of a mantissa that rounds up, cuts subnormals off and makes a
    number of a NaN. Of values that e4m3 holds exactly it is right, so there the rounding comes first: adding 1.5 * 2^20
    times the value's power of two leaves three bits of mantissa.
    """
    if _INTERPRETED:
        bits = tl.where(x == x, x, 0.0).to(tl.int32, bitcast=True)
        power = (bits & 0x7F800000).to(tl.float32, bitcast=True)
        shift = tl.maximum(power, 0.015625) * 1572864.0
        rounded = (tl.abs(x) + shift) - shift
        bits = rounded.to(tl.int32, bitcast=True) | (bits & -2147483648)
        x = tl.where(x == x, bits, 0x7FF00000).to(tl.float32, bitcast=True)
    return x.to(tl.float8e4nv)


@triton.jit
def store(q_ptr, scaled, mask, FP8: tl.constexpr):
    """Write ``scaled`` rounded to nearest even; a NaN stays one in e4m3."""
    LARGEST: tl.constexpr = 448.0 if FP8 else 127.0
    scaled = tl.where(scaled > LARGEST, LARGEST, tl.where(scaled < -LARGEST, -LARGEST, scaled))
    if FP8:
        tl.store(q_ptr, to_e4m3(scaled), mask=mask)
    else:
        # The sum has no bits left behind the point.
        rounded = (scaled + 12582912.0) - 12582912.0
        tl.store(q_ptr, rounded.to(tl.int8), mask=mask)


@triton.jit
def group_scales(x, finite, FP8: tl.constexpr):
    """(inverse, scale) of float32 ``[G, C]`` over its rows."""
    LARGEST: tl.constexpr = 448.0 if FP8 else 127.0
    amax = tl.maximum(tl.max(tl.where(finite, tl.abs(x), 0.0), axis=1), 1e-30)
    largest = tl.zeros_like(amax) + LARGEST
    return tl.math.div_rn(largest, amax), tl.math.div_rn(amax, largest)


@triton.jit(do_not_specialize=["num_rows"])
def block_kernel(
    x_ptr, q_ptr, scale_ptr, num_rows, x_stride, C: tl.constexpr, GROUPS: tl.constexpr, WIDE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """GROUPS neighbouring groups of 128 columns of one row a program."""
    CB: tl.constexpr = (C + 127) // 128
    TILES: tl.constexpr = (CB + GROUPS - 1) // GROUPS
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    # Rows that nobody reads are quantised too: to ask first would put one wait before the other.
    row = tl.program_id(0) // TILES
    group = (tl.program_id(0) % TILES) * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    if WIDE:
        row = row.to(tl.int64)
    mask = column < C
    x = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    finite = tl.abs(x) < float("inf")
    inverse, scale = group_scales(x, finite, True)
    store(q_ptr + row * C + column, tl.where(finite, x * inverse[:, None], float("nan")), mask, True)
    tl.store(scale_ptr + row * CB + group, scale, mask=group < CB)


@triton.jit(do_not_specialize=["num_rows"])
def token_kernel(
    x_ptr, q_ptr, scale_ptr, ids_ptr, num_rows, x_stride, C: tl.constexpr, E: tl.constexpr, K: tl.constexpr,
    K_P2: tl.constexpr, SLOTS: tl.constexpr, C_P2: tl.constexpr, FP8: tl.constexpr, WIDE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One row a program."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    if not in_use(ids_ptr, row, E, K, K_P2, SLOTS):
        return
    own = row
    if WIDE:
        row = row.to(tl.int64)
    column = tl.arange(0, C_P2)[None, :]
    mask = column < C
    x = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    finite = tl.abs(x) < float("inf")
    inverse, scale = group_scales(x, finite, FP8)
    if FP8:
        scaled = tl.where(finite, x * inverse[:, None], float("nan"))
    else:
        scaled = tl.where(finite, x * inverse[:, None], 0.0)
        bad = tl.max(tl.where(finite, 0, 1), axis=1) > 0
        scale = tl.where(bad, float("nan"), scale)
    store(q_ptr + row * C + column, scaled, mask, FP8)
    tl.store(scale_ptr + own + tl.arange(0, 1), scale)


@triton.jit
def magnitudes(
    x_ptr, ids_ptr, row, column, num_rows, x_stride, C: tl.constexpr, E: tl.constexpr, K: tl.constexpr,
    K_P2: tl.constexpr, SLOTS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """``|x|`` of rows ``[R]`` and columns ``[C]`` that count for the scale, else 0: finite, and of rows in use.

    Ids do not hold up the loads of x; what rows out of use hold is thrown away.
    """
    slot = tl.arange(0, K_P2)
    if SLOTS:
        experts = tl.load(ids_ptr + row, mask=row < num_rows, other=-1)
        used = (experts >= 0) & (experts < E)
    else:
        mask = (row < num_rows)[:, None] & (slot < K)[None, :]
        experts = tl.load(ids_ptr + row[:, None] * K + slot[None, :], mask=mask, other=-1)
        used = tl.max(((experts >= 0) & (experts < E)).to(tl.int32), axis=1) > 0
    mask = (row < num_rows)[:, None] & (column < C)[None, :]
    if WIDE:
        row = row.to(tl.int64)
    x = tl.load(x_ptr + row[:, None] * x_stride + column[None, :], mask=mask, other=0.0)
    x = tl.abs(x.to(tl.float32))
    return tl.where((x < float("inf")) & used[:, None], x, 0.0)


@triton.jit(do_not_specialize=["num_rows"])
def amax_kernel(
    x_ptr, partial_ptr, ids_ptr, num_rows, x_stride, C: tl.constexpr, E: tl.constexpr, K: tl.constexpr,
    K_P2: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr, BLOCK_C: tl.constexpr, PROGRAMS: tl.constexpr,
    WIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Largest magnitude among the tiles ``[ROWS, BLOCK_C]`` that this program gets, every PROGRAMS-th."""
    TILES: tl.constexpr = (C + BLOCK_C - 1) // BLOCK_C
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    amax = tl.zeros([ROWS, BLOCK_C], dtype=tl.float32)
    for tile in range(tl.program_id(0), (num_rows + ROWS - 1) // ROWS * TILES, PROGRAMS):
        row = tile // TILES * ROWS + tl.arange(0, ROWS)
        column = tile % TILES * BLOCK_C + tl.arange(0, BLOCK_C)
        x = magnitudes(x_ptr, ids_ptr, row, column, num_rows, x_stride, C, E, K, K_P2, SLOTS, WIDE)
        amax = tl.maximum(amax, x)
    tl.store(partial_ptr + tl.program_id(0), tl.max(tl.max(amax, axis=1), axis=0))


@triton.jit(do_not_specialize=["num_rows"])
def tensor_kernel(
    x_ptr, q_ptr, scale_ptr, partial_ptr, ids_ptr, num_rows, x_stride, C: tl.constexpr, E: tl.constexpr,
    K: tl.constexpr, K_P2: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr, BLOCK_C: tl.constexpr,
    SCALE: tl.constexpr, ALL_ROWS: tl.constexpr, ALL_C: tl.constexpr, PROGRAMS: tl.constexpr, WIDE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A tile ``[ROWS, BLOCK_C]`` a program, one scale for all.

    SCALE: 0 given; 1 that of PROGRAMS partial maxima; 2 every program looks at all of x, ``[ALL_ROWS, ALL_C]`` with
    padding, which saves a launch while x is small.
    """
    TILES: tl.constexpr = (C + BLOCK_C - 1) // BLOCK_C
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    pid = tl.program_id(0)
    row = pid // TILES * ROWS + tl.arange(0, ROWS)
    column = pid % TILES * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = (row < num_rows)[:, None] & (column < C)[None, :]
    if WIDE:
        row = row.to(tl.int64)
    x = tl.load(x_ptr + row[:, None] * x_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
    if SCALE == 0:
        scale = tl.load(scale_ptr)
        inverse = tl.math.div_rn(tl.full([], 1.0, tl.float32), scale)
    else:
        if SCALE == 1:
            amax = tl.max(tl.load(partial_ptr + tl.arange(0, PROGRAMS)), axis=0)
        else:
            every = magnitudes(
                x_ptr, ids_ptr, tl.arange(0, ALL_ROWS), tl.arange(0, ALL_C), num_rows, x_stride, C, E, K, K_P2, SLOTS,
                WIDE,
            )  # fmt: skip
            amax = tl.max(tl.max(every, axis=1), axis=0)
        amax = tl.maximum(amax, 1e-30)
        largest = tl.full([], 448.0, tl.float32)
        inverse = tl.math.div_rn(largest, amax)
        if pid == 0:
            tl.store(scale_ptr, tl.math.div_rn(amax, largest))
    scaled = tl.where(tl.abs(x) < float("inf"), x * inverse, float("nan"))
    store(q_ptr + row[:, None] * C + column[None, :], scaled, mask, True)


def launch_quantize(
    x_RC: torch.Tensor,
    granularity: str,
    kind: str,
    ids_TK: torch.Tensor,
    num_experts: int,
    rows_per_token_slot: bool,
    static_scale: torch.Tensor | None = None,
    pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (q ``[R, C]``, scale) as ``quantize_activation`` does; rows not in use may stay unwritten.

    Rows are tokens of ``ids_TK``, or with ``rows_per_token_slot`` its slots in order.
    """
    if x_RC.stride(1) != 1:
        x_RC = x_RC.contiguous()
    rows, columns = x_RC.shape
    q = torch.empty(rows, columns, dtype=_TORCH[kind], device=x_RC.device)
    top_k = ids_TK.shape[1]
    stride, given = x_RC.stride(0), static_scale
    use = {"E": num_experts, "K": top_k, "K_P2": triton.next_power_of_2(top_k), "SLOTS": rows_per_token_slot}
    common = {"C": columns, "WIDE": rows * max(stride, columns) > _INT32_MAX, "PDL": pdl}
    common |= {"launch_pdl": True} if pdl else {}
    if granularity == "block":
        scale = torch.empty(rows, triton.cdiv(columns, BLOCK), dtype=torch.float32, device=x_RC.device)
        groups = min(16, triton.next_power_of_2(scale.shape[1])) if rows > 64 else 1
        if rows:
            block_kernel[(rows * triton.cdiv(scale.shape[1], groups),)](
                x_RC, q, scale, rows, stride, GROUPS=groups, num_warps=max(1, groups // 4), **common
            )
        return q, scale
    if granularity == "token":
        scale = torch.empty(rows, dtype=torch.float32, device=x_RC.device)
        width = triton.next_power_of_2(columns)
        if rows:
            token_kernel[(rows,)](
                x_RC, q, scale, ids_TK, rows, stride, **use, C_P2=width, FP8=kind == "fp8",
                num_warps=min(16, max(1, width // 512)), **common,
            )  # fmt: skip
        return q, scale
    if kind != "fp8":
        raise ValueError(f"one scale for all is for fp8 only; got {kind!r}.")
    if rows == 0:
        return q, x_RC.new_full((1,), SMALLEST_AMAX / FP8_MAX, dtype=torch.float32) if given is None else given
    scale = torch.empty(1, dtype=torch.float32, device=x_RC.device) if given is None else given
    all_rows, all_columns = triton.next_power_of_2(rows), triton.next_power_of_2(columns)
    partials, mode = scale, 0
    if given is None and all_rows * all_columns <= _ONE_LOOK:
        mode = 2
    elif given is None:
        mode = 1
        partials = torch.empty(_PARTIALS, dtype=torch.float32, device=x_RC.device)
        amax_kernel[(_PARTIALS,)](
            x_RC, partials, ids_TK, rows, stride, **use, **_tile(all_columns, 8192), PROGRAMS=_PARTIALS, num_warps=16,
            **common,
        )  # fmt: skip
    tile = _tile(all_columns, 1024 if rows * columns < 2**19 else 4096)
    tensor_kernel[(triton.cdiv(rows, tile["ROWS"]) * triton.cdiv(columns, tile["BLOCK_C"]),)](
        x_RC, q, scale, partials, ids_TK, rows, stride, **use, **tile, SCALE=mode,
        ALL_ROWS=all_rows if mode == 2 else 1, ALL_C=all_columns if mode == 2 else 1, PROGRAMS=_PARTIALS,
        num_warps=8, **common,
    )  # fmt: skip
    return q, scale


def _tile(columns_p2: int, size: int) -> dict[str, int]:
    """Tile of ``size`` elements that is as wide as rows are."""
    width = min(columns_p2, size)
    return {"ROWS": size // width, "BLOCK_C": width}
