"""Checks that the public functions of a step share; plain enough to be traced by ``torch.compile``."""

from __future__ import annotations

import torch

from moe_kernels.step.reference import Turn
from moe_kernels.types import DTYPE_NAME


def check_rows(name: str, x: torch.Tensor, width: int | None = None) -> None:
    """Refuse all but ``[S, width]`` in a dtype that the kernels compute in."""
    if x.dim() != 2 or x.shape[1] == 0 or width not in (None, x.shape[1]):
        raise ValueError(f"{name} must be [S, {'at least 1' if width is None else width}]; got {list(x.shape)}.")
    if x.dtype not in DTYPE_NAME:
        raise ValueError(f"{name} must be of {', '.join(DTYPE_NAME.values())}; got {x.dtype}.")


def check_like(name: str, tensor: torch.Tensor, shape: tuple[int, ...], other_name: str, other: torch.Tensor) -> None:
    """Refuse all but that shape, in the dtype and on the device of ``other``."""
    if tensor.shape != shape:
        raise ValueError(f"{name} must be {list(shape)}; got {list(tensor.shape)}.")
    if tensor.dtype != other.dtype:
        raise ValueError(f"{name} must have the dtype of {other_name}, {other.dtype}; got {tensor.dtype}.")
    if tensor.device != other.device:
        raise ValueError(f"{name} must be on the device of {other_name}, {other.device}; got {tensor.device}.")


def check_turn(turn: Turn, rows: int, dim: int | None, x: torch.Tensor) -> int:
    """Refuse all but float32 ``[S, 1, R]`` with an even R, of ``dim`` where that is given; returns R."""
    for name, part in zip(("cos", "sin"), turn, strict=True):
        if part.dtype != torch.float32 or part.device != x.device:
            raise ValueError(f"turn's {name} must be float32 on {x.device}; got {part.dtype} on {part.device}.")
        if part.dim() != 3 or part.shape[:2] != (rows, 1) or dim not in (None, part.shape[2]):
            raise ValueError(f"turn's {name} must be [{rows}, 1, {dim or 'R'}]; got {list(part.shape)}.")
    size = int(turn[0].shape[2])
    if turn[1].shape[2] != size or size < 2 or size % 2:
        raise ValueError(f"turn must have one even size in cos and sin; got {size} and {turn[1].shape[2]}.")
    return size


def check_slots(slots_S: torch.Tensor, rows: int, x: torch.Tensor) -> None:
    """Refuse all but int64 or int32 ``[S]``."""
    if slots_S.shape != (rows,) or slots_S.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"slots_S must be int64 or int32 [{rows}]; got {slots_S.dtype} {list(slots_S.shape)}.")
    if slots_S.device != x.device:
        raise ValueError(f"slots_S must be on {x.device}, as the rows are; got {slots_S.device}.")


def check_cache(name: str, cache: torch.Tensor, inner: tuple[int, ...], x: torch.Tensor) -> None:
    """Refuse all but ``[pages, page_size, *inner]`` in the dtype and on the device of the rows."""
    if cache.dim() != 2 + len(inner) or cache.shape[2:] != inner or cache.shape[1] < 1:
        wanted = ", ".join(["pages", "page_size", *map(str, inner)])
        raise ValueError(f"{name} must be [{wanted}]; got {list(cache.shape)}.")
    if cache.dtype != x.dtype or cache.device != x.device:
        raise ValueError(f"{name} must be {x.dtype} on {x.device}, as the rows are; got {cache.dtype} {cache.device}.")
