"""What the parts of attention pass to one another."""

from __future__ import annotations

from typing import NamedTuple

import torch


class PagedPrefix(NamedTuple):
    """Keys and values that sequences have in the cache already, before the tokens of a prefill.

    Attributes:
        k_cache: ``[num_pages, page_size, Hkv, D]``, any strides.
        v_cache: ``[num_pages, page_size, Hkv, Dv]``, any strides.
        page_table_BP: int32 ``[B, P]``; entries past a sequence's prefix may be anything.
        prefix_lens_B: int32 ``[B]``; cached keys of each sequence, 0 for none.
    """

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    page_table_BP: torch.Tensor  # noqa: N815
    prefix_lens_B: torch.Tensor  # noqa: N815
