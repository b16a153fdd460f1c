"""What a record says was in force: the arithmetic of quantised formats, and how K loops were split."""

from __future__ import annotations

import pytest

from workbench.devices import DeviceInfo
from workbench.engines.resolved import arithmetic, split_in_force
from workbench.modes import Quant
from workbench.spec import RunSpec

CPU = DeviceInfo(type="cpu", name="Some CPU", torch_device="cpu")
H200 = DeviceInfo(type="cuda", name="NVIDIA H200", torch_device="cuda:0", capability=(9, 0))
B200 = DeviceInfo(type="cuda", name="NVIDIA B200", torch_device="cuda:0", capability=(10, 0))


@pytest.mark.parametrize(
    ("values", "device", "words"),
    [
        ({"quant": "fp8_block"}, H200, "fp8 x fp8, float32 accumulation, 128x128 weight blocks, 1x128 activation blo"),
        ({"quant": "int8"}, H200, "int8 x int8, int32 accumulation, one weight scale a row, one activation scale a t"),
        ({"quant": "fp8_tensor", "activation_scale": "static"}, H200, "one fixed activation scale"),
        ({"quant": "fp8_tensor"}, H200, "one activation scale a call"),
        ({"quant": "nvfp4"}, H200, "weights unpacked to bf16; this GPU has no FP4 units"),
        ({"quant": "mxfp4"}, B200, "weights unpacked to bf16; this GPU's FP4 units are not used"),
        ({"quant": "nvfp4", "moe_backend": "reference"}, CPU, "weights unpacked to bf16; e4m3 scales of 16 columns"),
        ({"quant": "int4", "group_size": 64, "zero_points": True}, H200, "groups of 64 columns, a zero point each"),
        ({"quant": "int8_weight"}, H200, "weights unpacked to bf16; one weight scale a row"),
        ({"quant": "fp8_channel", "moe_backend": "reference"}, CPU, "fp8 values multiplied as float32"),
    ],
)  # fmt: skip
def test_the_arithmetic_of_a_quantised_format(values: dict[str, object], device: DeviceInfo, words: str) -> None:
    found = arithmetic(RunSpec().replace(**{"moe_backend": "triton", **values}), device)
    assert words in found["arithmetic"]


def test_every_quantised_format_has_words_and_the_others_none() -> None:
    plain = {Quant.FP32, Quant.BF16, Quant.FP16}
    for quant in Quant:
        assert bool(arithmetic(RunSpec().replace(quant=quant), H200)) == (quant not in plain)
    assert arithmetic(RunSpec().replace(quant="int8", moe_backend="json:dumps"), H200) == {}


def test_the_split_in_force_is_what_was_asked_or_what_the_configuration_has() -> None:
    assert split_in_force(4, {"SPLIT_K": 2}) == 4
    assert split_in_force(None, {"BLOCK_SIZE_M": 16}) == 1
    assert split_in_force(None, {"up": {"SPLIT_K": 2}, "down": {"SPLIT_K": 2}, "PDL": True}) == 2
    assert split_in_force(None, {"up": {"SPLIT_K": 2}, "down": {}}) == "up 2, down 1"
