"""Stands for the package deep_gemm: its grouped product in plain float32, by the layouts that the real one takes."""

from __future__ import annotations

import torch

ALIGNMENT = 128


def get_mk_alignment_for_contiguous_layout() -> int:
    return ALIGNMENT


def m_grouped_fp8_gemm_nt_contiguous(
    a: tuple[torch.Tensor, torch.Tensor],
    b: tuple[torch.Tensor, torch.Tensor],
    d: torch.Tensor,
    grouped_layout: torch.Tensor,
) -> None:
    (x, x_scale), (w, w_scale) = a, b
    rows, columns = x.shape
    experts, width, _ = w.shape
    assert x.dtype == w.dtype == torch.float8_e4m3fn
    assert x.is_contiguous()
    assert w.is_contiguous()
    assert x_scale.dtype == w_scale.dtype == torch.float32
    assert x_scale.shape == (rows, columns // 128)
    assert x_scale.stride() == (1, rows)  # by columns, as TMA reads it; rows are a multiple of 4
    assert w_scale.shape == (experts, width // 128, columns // 128)
    assert d.shape == (rows, width)
    assert d.dtype == torch.bfloat16
    assert grouped_layout.shape == (rows,)
    assert grouped_layout.dtype == torch.int32
    for first in range(0, rows, ALIGNMENT):
        block = slice(first, first + ALIGNMENT)
        expert = int(grouped_layout[first])
        assert bool((grouped_layout[block] == expert).all())
        if expert < 0:
            continue
        wide = x[block].float() * x_scale[block].repeat_interleave(128, dim=1)
        scale = w_scale[expert].repeat_interleave(128, dim=0).repeat_interleave(128, dim=1)
        d[block] = (wide @ (w[expert].float() * scale).T).to(torch.bfloat16)
