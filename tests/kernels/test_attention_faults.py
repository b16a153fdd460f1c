"""Known faults of attention kernels, each at its own numbers: plain PyTorch, the interpreter, and a GPU."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest
import torch
from attention_faults import (
    FAR_PAGES,
    HEADS,
    LATENT_HEADS,
    check_far_page,
    check_far_rows,
    check_heads,
    check_latent,
    check_more_splits_than_keys,
)

IMPLS = ("reference", "sdpa")
gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
ON_GPU = [pytest.param("triton", "cuda", marks=gpu), pytest.param("sdpa", "cuda", marks=gpu)]
WHERE = [*[(impl, "cpu") for impl in IMPLS], *ON_GPU]


@pytest.mark.parametrize(("impl", "device"), WHERE)
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_a06_heads(heads, kv_heads, impl, device):
    check_heads(impl, device, torch.float32, heads, kv_heads)


@pytest.mark.parametrize(("impl", "device"), WHERE)
@pytest.mark.parametrize("rank", [512, 256])
@pytest.mark.parametrize("heads", LATENT_HEADS)
def test_a06_latent(heads, rank, impl, device):
    check_latent(impl, device, torch.float32, heads, rank)


@pytest.mark.parametrize(("impl", "device"), WHERE)
@pytest.mark.parametrize("name", FAR_PAGES)
def test_a05_far_pages(name, impl, device):
    check_far_page(impl, device, torch.float16, name)


@pytest.mark.parametrize(("impl", "device"), WHERE)
def test_a05_far_rows(impl, device):
    check_far_rows(impl, device, torch.float16, 2**26, 32, 5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("stride", "first"), [(8192, 262144), (16384, 131072)])
def test_a05_far_rows_of_a_long_prefill(stride, first):
    check_far_rows("triton", "cuda", torch.bfloat16, stride, first, 6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_more_splits_than_keys(dtype):
    check_more_splits_than_keys("cuda", dtype)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [64, 80, 96, 128, 192, 256])
def test_a04_head_sizes_run(size, dtype):
    check_heads("triton", "cuda", dtype, 8, 2, size)


@pytest.mark.slow
def test_faults_pass_in_the_interpreter():
    pytest.importorskip("triton")
    cases = pathlib.Path(__file__).with_name("interpreted_attention_faults.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:logging", str(cases)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    assert " passed" in result.stdout
    assert "skipped" not in result.stdout
