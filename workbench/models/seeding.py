"""Seeded random tensors, so that a spec's seed gives the same weights, inputs and routings again."""

from __future__ import annotations

import hashlib

import torch

_BLOCK = 1024


def derive_seed(*parts: object) -> int:
    """A seed of 63 bits from any parts. Hashed, because the CPU generator keeps only the low 32 bits of its seed."""
    text = ":".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def generator(*parts: object, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator seeded by `parts`. CPU and CUDA generators give different numbers for the same seed."""
    return torch.Generator(device=device).manual_seed(derive_seed(*parts))


def normal(shape: tuple[int, ...], std: float, *parts: object, device: torch.device | str = "cpu") -> torch.Tensor:
    """Float32 normal numbers of deviation `std`."""
    return torch.randn(shape, generator=generator(*parts, device=device), device=device, dtype=torch.float32).mul_(std)


def normal_rows(num_rows: int, width: int, *parts: object) -> torch.Tensor:
    """Float32 `[num_rows, width]` on the CPU, deviation 1; fewer rows are the first of more."""
    blocks = [normal((_BLOCK, width), 1.0, *parts, start) for start in range(0, num_rows, _BLOCK)]
    return torch.cat(blocks)[:num_rows].contiguous() if blocks else torch.empty(0, width)
