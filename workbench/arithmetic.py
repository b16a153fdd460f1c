"""What a weight format means for a run: the compute dtype, which matrix rate bounds it, bytes, and a sentence.

No torch here.
"""

from __future__ import annotations

from moe_kernels.formats import FORMATS, format_for
from moe_kernels.formats import expert_bytes as expert_bytes
from moe_kernels.names import Quant

FIRST_WITH_FP4 = (10, 0)  # Blackwell
_PLAIN_BYTES = {Quant.FP32: 4, Quant.BF16: 2, Quant.FP16: 2}
_WEIGHT_SCALES = {
    Quant.FP8_TENSOR: "one weight scale a matrix",
    Quant.FP8_CHANNEL: "one weight scale a row",
    Quant.FP8_BLOCK: "128x128 weight blocks",
    Quant.INT8: "one weight scale a row",
    Quant.INT8_WEIGHT: "one weight scale a row",
    Quant.NVFP4: "e4m3 scales of 16 columns",
    Quant.MXFP4: "e8m0 scales of 32 columns",
}
_ACTIVATION_SCALES = {"token": "one activation scale a token", "block": "1x128 activation blocks"}
_FP4_SCALES = {
    Quant.NVFP4: "activations alike and one scale a token",
    Quant.MXFP4: "activations alike",
}


def compute_dtype(quant: Quant) -> Quant:
    """The dtype of inputs, outputs and what passes between: the format itself, or bf16 where weights are quantised."""
    return Quant.BF16 if FORMATS[quant].quantized else quant


def activation_bytes(quant: Quant) -> int:
    """Bytes of one input or output value."""
    return _PLAIN_BYTES[compute_dtype(quant)]


def rate_name(quant: Quant, backend: str = "") -> str:
    """The matrix rate that bounds a format, by its name among the roofs: `fp8`, `int8`, `fp4`, or the compute dtype."""
    return format_for(quant, backend).activation or compute_dtype(quant).value


def describe(
    quant: Quant,
    *,
    group_size: int = 128,
    zero_points: bool = False,
    static: bool = False,
    device_type: str = "cuda",
    capability: tuple[int, int] | None = None,
    emulated: bool = False,
    backend: str = "",
) -> str:
    """The arithmetic of a quantised format, in words; empty for the others.

    Args:
        quant, group_size, zero_points: the weights.
        static: whether the scale of activations is fixed beforehand.
        device_type, capability: where it runs.
        emulated: whether quantised values are multiplied as float32, as the reference does.
        backend: what runs it: triton_fp4 multiplies FP4 with FP4.
    """
    form = format_for(quant, backend)
    if not form.quantized:
        return ""
    if quant is Quant.INT4:
        scales = f"groups of {group_size} columns, {'a zero point each' if zero_points else 'symmetric'}"
    else:
        scales = _WEIGHT_SCALES[quant]
    if form.weight_only:
        # NVFP4 and MXFP4 are formats that some GPUs multiply themselves; that they do not here must be said.
        fp4 = ""
        if quant in (Quant.NVFP4, Quant.MXFP4) and device_type == "cuda":
            with_units = capability is not None and capability >= FIRST_WITH_FP4
            fp4 = "; this GPU's FP4 units are not used" if with_units else "; this GPU has no FP4 units"
        return f"weights unpacked to {compute_dtype(quant)}{fp4}; {scales}"
    kind = form.activation
    if form.granularity == "tensor":
        activations = "one fixed activation scale" if static else "one activation scale a call"
    elif form.granularity == "group":
        activations = _FP4_SCALES[quant]
    else:
        activations = _ACTIVATION_SCALES[form.granularity]
    if emulated:
        product = f"{kind} values multiplied as float32"
    else:
        product = f"{kind} x {kind}, {'int32' if kind == 'int8' else 'float32'} accumulation"
    return f"{product}, {scales}, {activations}"
