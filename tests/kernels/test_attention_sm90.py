"""Attention kernels compile for compute capability 9.0 at the sizes of real models, with no GPU at hand."""

from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("triton")

from moe_kernels import PagedPrefix
from moe_kernels.attention import launch
from moe_kernels.attention.tiles import (
    H200_SHARED,
    DecodeShape,
    PrefillShape,
    decode_bytes,
    decode_tiles,
    head_split,
    num_splits,
    prefill_bytes,
    prefill_tiles,
)
from moe_kernels.attention.triton_decode import decode_kernel
from moe_kernels.attention.triton_merge import merge_kernel
from moe_kernels.attention.triton_prefill import prefill_kernel
from moe_kernels.testing.offline import compile_only

# Shared memory of a program on small parts: compute capability 8.6, and what A-04's reports had.
SMALL_SHARED = 101376


@pytest.fixture(autouse=True)
def forget_binaries():
    yield
    for kernel in (decode_kernel, merge_kernel, prefill_kernel):
        kernel.device_caches.clear()


def empty(*sizes, dtype=torch.bfloat16):
    return torch.empty(*sizes, dtype=dtype, device="meta")


def compiled_decode(batch, heads, kv_heads, size, v_size, page, keys, *, latent=False, dtype=torch.bfloat16):
    pages = keys // page
    k = empty(batch * pages, page, kv_heads, size, dtype=dtype)
    v = k[..., :v_size] if latent else empty(batch * pages, page, kv_heads, v_size, dtype=dtype)
    ints = empty(batch, pages, dtype=torch.int32), empty(batch, dtype=torch.int32)
    with compile_only(90) as kernels:
        launch.launch_decode(empty(batch, heads, size, dtype=dtype), k, v, *ints, 0.1, 0, 0, [])
    return {kernel.name: kernel for kernel in kernels}


def compiled_prefill(rows, heads, kv_heads, size, v_size, page=0, *, latent=False, dtype=torch.bfloat16):
    k = empty(rows, kv_heads, size, dtype=dtype)
    v = k[..., :v_size] if latent else empty(rows, kv_heads, v_size, dtype=dtype)
    prefix = None
    if page:
        k_cache = empty(64, page, kv_heads, size, dtype=dtype)
        v_cache = k_cache[..., :v_size] if latent else empty(64, page, kv_heads, v_size, dtype=dtype)
        prefix = PagedPrefix(k_cache, v_cache, empty(4, 16, dtype=torch.int32), empty(4, dtype=torch.int32))
    with compile_only(90) as kernels:
        q, bounds = empty(rows, heads, size, dtype=dtype), empty(5, dtype=torch.int32)
        launch.launch_prefill(q, k, v, bounds, 0.1, True, 0, prefix, [])
    return kernels[0]


def copied_bytes(ptx, threads):
    """Bytes of asynchronous copies in the text; all are of 16 bytes a thread."""
    sizes = re.findall(r"cp\.async\.c[ag]\.shared\.global[^;]*?, (0x\w+|\d+)[,;]", ptx)
    assert {int(size, 0) for size in sizes} == {16}
    return 16 * threads * len(sizes)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "v_size", "page", "latent"),
    [(32, 8, 128, 128, 16, False), (16, 1, 576, 512, 64, True), (128, 1, 576, 512, 16, True)],
    ids=["llama", "v2-lite", "v3"],
)
def test_decode_reads_every_key_once_in_whole_vectors(heads, kv_heads, size, v_size, page, latent):
    kernels = compiled_decode(8, heads, kv_heads, size, v_size, page, 8192, latent=latent)
    tiles = decode_tiles(DecodeShape(heads // kv_heads, size, v_size, latent, 2))
    decode = kernels["decode_kernel"]
    assert decode.shared <= H200_SHARED
    # Tiles in flight before the loop and the one that the loop asks for; with latent heads no second one for values.
    columns = size + (0 if latent else v_size)
    assert copied_bytes(decode.ptx, 32 * tiles.num_warps) == tiles.num_stages * tiles.block_n * columns * 2
    rows, splits = decode.grid
    assert 0.9 * 132 * tiles.programs <= rows * splits <= 132 * tiles.programs
    assert "griddepcontrol.wait" in kernels["merge_kernel"].ptx


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "v_size", "page", "latent"),
    [(32, 8, 128, 128, 16, False), (16, 16, 192, 128, 0, False), (16, 1, 576, 512, 64, True)],
    ids=["llama", "v2-lite", "absorbed"],
)
def test_prefill_multiplies_by_tensor_cores_of_hopper(heads, kv_heads, size, v_size, page, latent):
    kernel = compiled_prefill(4096, heads, kv_heads, size, v_size, page, latent=latent)
    assert kernel.shared <= H200_SHARED
    assert "wgmma" in kernel.ptx
    assert copied_bytes(kernel.ptx, 256) > 0


@pytest.mark.parametrize(
    ("size", "v_size", "latent", "dtype"),
    [(576, 512, True, torch.bfloat16), (576, 512, True, torch.float32), (512, 512, False, torch.bfloat16)],
    ids=str,
)
def test_a04_tiles_are_cut_to_the_shared_memory_of_small_parts(size, v_size, latent, dtype, monkeypatch):
    monkeypatch.setattr(launch, "device_limits", lambda device: launch.Limits(82, SMALL_SHARED, False))
    kernels = compiled_decode(2, 16, 1, size, v_size, 32, 1024, latent=latent, dtype=dtype)
    assert kernels["decode_kernel"].shared <= SMALL_SHARED
    if dtype != torch.float32:
        assert compiled_prefill(64, 16, 1, size, v_size, latent=latent, dtype=dtype).shared <= SMALL_SHARED


def test_a04_every_head_size_fits_or_is_refused_with_both_numbers(monkeypatch):
    for shared in (H200_SHARED, 166912, SMALL_SHARED):
        for size, v_size, nbytes in (
            (s, v, b) for s in (64, 80, 96, 128, 192, 256, 320, 576) for v in (s, 512) for b in (2, 4)
        ):
            latent = v_size == head_split(size)[0]
            if v_size > 512 or (nbytes == 4 and size > 512 and not latent):
                continue
            for group in (1, 7, 16, 128):
                decode = DecodeShape(group, size, v_size, latent, nbytes)
                assert decode_bytes(decode_tiles(decode, shared), decode) <= shared
                prefill = PrefillShape(group, size, v_size, latent, nbytes)
                assert prefill_bytes(prefill_tiles(prefill, shared), prefill) <= shared
    monkeypatch.setattr(launch, "device_limits", lambda device: launch.Limits(82, SMALL_SHARED, False))
    with pytest.raises(
        NotImplementedError, match=r"needs \d+ bytes of shared memory for head sizes 640 and 512 .* 101376"
    ):
        compiled_decode(2, 16, 1, 640, 512, 32, 1024, dtype=torch.float32)


def test_splits_fill_the_device_and_never_exceed_the_keys():
    tiles = decode_tiles(DecodeShape(4, 128, 128, False, 2))
    assert num_splits(tiles, 64, 8192) == tiles.programs * 132 // 64
    assert num_splits(tiles, 8, tiles.least_keys) == 1
    assert num_splits(tiles, 8, tiles.least_keys + 1) == 2
    assert num_splits(tiles, 10**6, 8192) == 1
