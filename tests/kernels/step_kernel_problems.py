"""Seeded inputs of a step's kernels, what they must give in float64, and how far from it they may be.

Oracles are written anew, from the formulas; they round only where the kernels promise to.

Shapes: S rows, H and G heads, C head size, R turned dimensions, L = latent and R.
"""

import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def randn(*shape, dtype=torch.float32, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(dtype)


def strided(x):
    """The same rows inside of wider ones of NaN."""
    wide = torch.full((x.shape[0], x.shape[1] + 11), float("nan"), dtype=x.dtype, device=x.device)
    wide[:, 5 : 5 + x.shape[1]] = x
    return wide[:, 5 : 5 + x.shape[1]]


def turn_of(positions, dim, device="cpu"):
    """Cosine and signed sine, float32 ``[S, 1, R]``, with a magnitude, so that cos^2 + sin^2 is not 1."""
    angles = torch.tensor(positions, dtype=torch.float64)[:, None, None] * 100.0 ** -(
        torch.arange(0, dim, 2, dtype=torch.float64) / dim
    )
    cos, sin = angles.cos() * 1.25, angles.sin() * 1.25
    return tuple(t.float().to(device) for t in (torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)))


def cache_of(pages, page_size, *inner, dtype, device="cpu", order="plain"):
    """A cache of NaN; ``order`` "turned" has its dimensions in memory the other way round, "gaps" has gaps."""
    shape = (pages, page_size, *inner)
    if order == "plain":
        return torch.full(shape, float("nan"), dtype=dtype, device=device)
    if order == "turned":
        return torch.full(shape[::-1], float("nan"), dtype=dtype, device=device).permute(*range(len(shape))[::-1])
    gaps = torch.full((pages, page_size + 1, *inner[:-1], inner[-1] + 3), float("nan"), dtype=dtype, device=device)
    return gaps[:, :page_size, ..., : inner[-1]]


def expect_written(cache, before, rows, slots):
    """The cache holds the rows at their slots, and what it held elsewhere, bit by bit."""
    want = before.clone()
    for row, slot in zip(rows, slots.tolist(), strict=True):
        want[slot // cache.shape[1], slot % cache.shape[1]] = row
    assert torch.equal(bits(cache.cpu().contiguous()), bits(want.cpu().contiguous()))


def bits(x):
    """Integers of the values, so that NaN equals itself."""
    return x.view(torch.int32 if x.element_size() == 4 else torch.int16)


def norm64(x, weight, eps):
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def turn64(x, turn):
    """As complex numbers, one half real and one imaginary: ``x (cos + i sin)``."""
    cos, sin = (t.double().to(x.device) for t in turn)
    half = x.shape[-1] // 2
    turned = torch.complex(x[..., :half].double(), x[..., half:].double()) * torch.complex(
        cos[..., half:], sin[..., half:]
    )
    return torch.cat((turned.real, turned.imag), -1)


def expect_rounded(got, want, dtype, roundings=1, slack=0.0):
    """``got`` is ``want`` (float64) rounded ``roundings`` times, beside float32 errors of ``slack`` in size."""
    assert got.dtype == dtype
    assert got.shape == want.shape
    got = got.double().cpu()
    want = want.cpu()
    fine = torch.finfo(torch.float32).eps
    allowed = roundings * torch.finfo(dtype).eps / 2 * want.abs() + 8 * fine * want.abs() + slack * fine
    # Below the smallest normal number steps are even.
    allowed = allowed + torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    worst = ((got - want).abs() / allowed).max().item() if want.numel() else 0.0
    assert worst <= 1.0, f"{worst} of what is allowed"


def steps_apart(a, b):
    """Most representable numbers between any two of the same place."""
    order = [
        torch.where(i < 0, -(i & (2 ** (8 * t.element_size() - 1) - 1)), i) for t in (a, b) for i in [bits(t).long()]
    ]
    return int((order[0] - order[1]).abs().max()) if a.numel() else 0
