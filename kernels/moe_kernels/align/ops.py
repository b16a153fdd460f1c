"""torch.library schema, fake and dispatch of token alignment."""

from __future__ import annotations

import torch

from moe_kernels.align.reference import align_reference, max_blocks

_LIBRARY = torch.library.Library("moe_kernels", "FRAGMENT")
_LIBRARY.define("moe_align(Tensor topk_ids, int num_experts, int block_m) -> (Tensor, Tensor, Tensor)")


def _fake(topk_ids: torch.Tensor, num_experts: int, block_m: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    num_blocks = max_blocks(topk_ids.numel(), num_experts, block_m)
    return (
        topk_ids.new_empty(num_blocks * block_m),
        topk_ids.new_empty(num_blocks),
        topk_ids.new_empty(1),
    )


def _cuda(topk_ids: torch.Tensor, num_experts: int, block_m: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    try:
        from moe_kernels.align.triton import launch_align
    except ImportError:  # triton is optional; the specification runs on every device
        return align_reference(topk_ids, num_experts, block_m)
    return launch_align(topk_ids, num_experts, block_m)


_LIBRARY.impl("moe_align", align_reference, "CPU")
_LIBRARY.impl("moe_align", _cuda, "CUDA")
torch.library.register_fake("moe_kernels::moe_align", _fake, lib=_LIBRARY)


def moe_align(
    topk_ids: torch.Tensor, num_experts: int, block_m: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Call the registered op."""
    result: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = torch.ops.moe_kernels.moe_align(
        topk_ids, num_experts, block_m
    )
    return result
