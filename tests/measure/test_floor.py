"""The floor from known numbers, and the guard against what cannot be."""

from __future__ import annotations

import pytest

from workbench.devices import Datasheet, datasheet
from workbench.measure.floor import SampleWork, implausible_reason, sample_work, weigh
from workbench.models.shapes import model_shape
from workbench.modes import L2, Quant
from workbench.spec import RunSpec

QWEN = model_shape(RunSpec(model="qwen3-30b-a3b"))
SHEET = Datasheet(read=1e12, rates={"bf16": 100e12})
ROOFS = {"read": 0.8e12, "bf16": 80e12}


def test_bytes_of_one_token_of_qwen3() -> None:
    # 8 experts of 3 * 2048 * 768 weights of 2 bytes: 75.5 MB, and a row in and a row out.
    work = sample_work(QWEN, Quant.BF16, 1, experts=8, slots=8)
    assert work.bytes == 8 * 3 * 2048 * 768 * 2 + 2 * 2048 * 2
    assert work.bytes == pytest.approx(75.5e6, rel=1e-3)
    assert work.operations == 2 * 8 * 3 * 2048 * 768
    assert sample_work(QWEN, Quant.FP32, 1, 8, 8).bytes == 2 * work.bytes


def test_bytes_follow_the_stored_format() -> None:
    rows = 2 * 2 * 2048 * 2  # bf16, in and out
    numbers, channels = 3 * 2048 * 768, 2 * 768 + 2048
    assert sample_work(QWEN, Quant.FP8_CHANNEL, 2, 5, 16).bytes == 5 * (numbers + 4 * channels) + rows
    assert sample_work(QWEN, Quant.FP8_BLOCK, 2, 5, 16).bytes == 5 * (numbers + 4 * numbers // 128**2) + rows
    assert sample_work(QWEN, Quant.NVFP4, 2, 5, 16).bytes == 5 * (numbers // 2 + numbers // 16 + 12) + rows
    plain = sample_work(QWEN, Quant.INT4, 2, 5, 16)
    finer = sample_work(QWEN, Quant.INT4, 2, 5, 16, group_size=32, zero_points=True)
    assert plain.bytes == 5 * (numbers // 2 + numbers // 128 * 2) + rows
    assert finer.bytes == 5 * (numbers // 2 + numbers // 32 * 3) + rows
    assert finer.operations == plain.operations == 2 * 16 * numbers


@pytest.mark.parametrize(
    ("quant", "rate"),
    [("fp8_tensor", 160e12), ("fp8_block", 160e12), ("int8", 150e12), ("int8_weight", 80e12), ("mxfp4", 80e12)],
)
def test_the_rate_is_that_of_the_arithmetic(quant: str, rate: float) -> None:
    roofs = ROOFS | {"fp8": 160e12, "int8": 150e12}
    found = weigh([SampleWork(10, 8_000_000_000, 1)], [200.0], Quant(quant), roofs)
    assert found.floor_us == pytest.approx(1e6 * 8e9 / rate)
    assert SHEET.rate("fp8") == SHEET.rate("int8") == 2 * SHEET.rate("bf16")
    without = weigh([SampleWork(10, 8_000_000_000, 1)], [200.0], Quant(quant), ROOFS)
    assert (without.floor_us is None) == (rate != 80e12)


def test_a_quantised_product_may_be_twice_as_fast_as_bf16() -> None:
    work = [SampleWork(10, 10**9, 2)]
    assert implausible_reason(work, [6.0], Quant.FP8_TENSOR, SHEET, L2.COLD) is None
    assert implausible_reason(work, [4.0], Quant.FP8_TENSOR, SHEET, L2.COLD) is not None
    assert implausible_reason(work, [6.0], Quant.INT4, SHEET, L2.COLD) is not None


def test_memory_bound() -> None:
    works = [SampleWork(8_000_000, 10, 2), SampleWork(16_000_000, 10, 4), SampleWork(24_000_000, 10, 6)]
    found = weigh(works, [20.0, 40.0, 60.0], Quant.BF16, ROOFS)
    assert found.bytes == 16_000_000
    assert found.distinct_experts == 4
    assert found.floor_us == pytest.approx(20.0)
    assert found.floor_share == pytest.approx(0.5)
    assert found.bound == "memory"
    assert not found.at_roof


def test_compute_bound() -> None:
    found = weigh([SampleWork(10, 8_000_000_000, 1)], [200.0], Quant.BF16, ROOFS)
    assert found.bound == "compute"
    assert found.floor_us == pytest.approx(100.0)


def test_each_sample_is_held_to_its_own_floor() -> None:
    works = [SampleWork(8_000_000, 10, 2)] * 2 + [SampleWork(80_000_000, 10, 20)]
    assert weigh(works, [20.0, 20.0, 200.0], Quant.BF16, ROOFS).floor_share == pytest.approx(0.5)


def test_without_roofs_there_is_no_share() -> None:
    found = weigh([SampleWork(10, 10, 1)], [1.0], Quant.BF16, {})
    assert found.floor_us is None
    assert found.floor_share is None
    assert found.bound is None


def test_the_fastest_board_of_a_name_is_its_datasheet() -> None:
    sheet = datasheet("NVIDIA H100 NVL")
    assert sheet is not None
    assert sheet.read == 3.94e12
    assert datasheet("NVIDIA H2000") is None


@pytest.mark.parametrize(
    ("taken", "at_roof", "impossible"), [(11.0, False, False), (9.0, True, False), (7.9, True, True)]
)
def test_between_the_roofs_and_beyond_the_datasheet(taken: float, at_roof: bool, impossible: bool) -> None:
    # 8 MB: 10 us at the measured 0.8 TB/s, 8 us at the datasheet's 1 TB/s.
    works = [SampleWork(8_000_000, 10, 2)] * 3
    why = implausible_reason(works, [taken] * 3, Quant.BF16, SHEET, L2.COLD)
    assert (why is not None) == impossible
    found = weigh(works, [taken] * 3, Quant.BF16, ROOFS, implausible=why is not None)
    assert found.at_roof == (at_roof and not impossible)
    assert why is None or "datasheet" in why


def test_a_hot_cache_may_beat_memory_but_not_arithmetic() -> None:
    assert implausible_reason([SampleWork(8_000_000, 10, 2)], [1.0], Quant.BF16, SHEET, L2.HOT) is None
    assert implausible_reason([SampleWork(10, 10**9, 2)], [1.0], Quant.BF16, SHEET, L2.HOT) is not None
    assert implausible_reason([SampleWork(10, 10**9, 2)], [1.0], Quant.BF16, None, L2.HOT) is None
    assert implausible_reason([SampleWork(10, 10, 2)], [0.0], Quant.BF16, SHEET, L2.COLD) is not None
