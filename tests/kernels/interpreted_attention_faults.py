"""Known faults of attention in the Triton kernels; run by test_attention_faults under the interpreter."""

from __future__ import annotations

import pytest
import torch
from attention_faults import (
    FAR_PAGES,
    check_far_page,
    check_far_rows,
    check_heads,
    check_latent,
    check_more_splits_than_keys,
)


@pytest.mark.parametrize(("heads", "kv_heads"), [(28, 4), (5, 1)])
def test_a06_heads(heads, kv_heads):
    check_heads("triton", "cpu", torch.float32, heads, kv_heads)


@pytest.mark.parametrize("rank", [512, 256])
@pytest.mark.parametrize("heads", [1, 24])
def test_a06_latent(heads, rank):
    check_latent("triton", "cpu", torch.float32, heads, rank)


@pytest.mark.parametrize("name", FAR_PAGES)
def test_a05_far_pages(name):
    check_far_page("triton", "cpu", torch.float16, name)


def test_a05_far_rows():
    check_far_rows("triton", "cpu", torch.float16, 2**26, 32, 5)


def test_more_splits_than_keys():
    check_more_splits_than_keys("cpu", torch.float32)
