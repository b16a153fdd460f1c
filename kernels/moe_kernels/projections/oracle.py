"""What a linear layer must give, and how far from it an implementation may be.

Shapes: T tokens, N outputs, K inputs.
"""

from __future__ import annotations

from typing import Any

import torch

from moe_kernels.formats import FORMATS
from moe_kernels.projections.weights import LinearWeights
from moe_kernels.quant.reference import dequantize, quantize_reference
from moe_kernels.testing.oracle import relative_error


def linear_oracle(x_TK: torch.Tensor, weights: LinearWeights, bias_N: torch.Tensor | None = None) -> torch.Tensor:
    """Return float64 ``[T, N]``: the stored weights and x, with no rounding on the way but the format's own."""
    out = _rounded(x_TK, weights).double() @ weights.dequantize().double().T
    return out if bias_N is None else out + bias_N.double()


def linear_budget(x_TK: torch.Tensor, weights: LinearWeights, bias_N: torch.Tensor | None = None) -> float:
    """Largest relative error allowed: twice that of plain eager code plus what roundings may do.

    Plain eager code multiplies dequantised weights and activations in the dtype of x. The roundings are one of the
    output, and those of a float32 sum in another order than its own, which grow with the square root of its terms.
    Tensor cores add up products of e4m3 with some 14 bits only.
    """
    plain = (_rounded(x_TK, weights).to(x_TK.dtype) @ weights.dequantize().to(x_TK.dtype).T).to(x_TK.dtype)
    if bias_N is not None:
        plain = plain + bias_N
    eager = relative_error(plain, linear_oracle(x_TK, weights, bias_N))
    band = torch.finfo(x_TK.dtype).eps / 2 + torch.finfo(torch.float32).eps / 2 * float(weights.K) ** 0.5
    band += 2.0**-13 if FORMATS[weights.quant].activation == "fp8" else 0.0
    return 2.0 * (eager + float(band))


def _rounded(x_TK: torch.Tensor, weights: LinearWeights) -> torch.Tensor:
    """What the format leaves of activations; by the specification on every device."""
    form = FORMATS[weights.quant]
    if not form.activation:
        return x_TK
    q, scale = quantize_reference(x_TK, form.granularity, form.activation, None, None)
    return dequantize(q, scale, form.granularity)


def linear_problem(
    num_tokens: int, outputs: int, inputs: int, quant: str, device: str = "cpu", seed: int = 0, **options: Any
) -> tuple[torch.Tensor, LinearWeights, torch.Tensor]:
    """Seeded (x, weights, bias) with outputs of about unit size; ``options`` are those of ``from_dense``.

    Rows of x, rows of weights and blocks of columns differ in size, so that a scale that goes astray shows.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    columns = 2.0 ** (torch.arange(inputs) // 32 % 3 - 1)
    w = normal(outputs, inputs) / inputs**0.5 * 2.0 ** (torch.arange(outputs) % 3 - 1)[:, None] * columns
    weights = LinearWeights.from_dense(w, quant, **options)
    x = (normal(num_tokens, inputs) * 2.0 ** (torch.arange(num_tokens) % 3 - 1)[:, None]).to(weights.dtype)
    return x.to(device), weights.to(device), normal(outputs).to(weights.dtype).to(device)
