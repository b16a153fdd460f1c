"""The timer times the call and nothing else, says how, and notices a compilation."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from workbench.measure.cachelevel import DEFAULT_CPU_CACHE, Evictor, cache_bytes, cpu_cache_bytes
from workbench.measure.timer import Timer, middle
from workbench.modes import L2

CPU = torch.device("cpu")


def test_only_the_call_is_timed() -> None:
    order = []

    def prepare(index: int) -> None:
        order.append(f"prepare {index}")
        time.sleep(0.01)

    def call() -> None:
        order.append("call")
        time.sleep(0.002)

    timed = Timer(device=CPU, call=call, prepare=prepare).run(3)
    assert order == ["prepare 0", "call", "prepare 1", "call", "prepare 2", "call"]
    assert len(timed.samples_us) == 3
    assert all(2000 <= sample < 9000 for sample in timed.samples_us)
    assert timed.wall_us == ()
    assert "monotonic" in timed.method
    assert timed.evictor_bytes >= 4 * cache_bytes(CPU)
    assert f"{timed.evictor_bytes / 2**20:.0f} MiB" in timed.cold_method
    assert any("CPU" in note for note in timed.notes)


def test_a_no_op_takes_nearly_nothing_with_a_cold_cache() -> None:
    timed = Timer(device=CPU, call=lambda: None, prepare=lambda index: None).run(11)
    assert middle(timed.samples_us) < 50  # reading the buffer takes thousands


def test_hot_makes_the_very_call_once_before() -> None:
    order = []
    timer = Timer(
        device=CPU, call=lambda: order.append("call"), prepare=lambda i: order.append(f"prepare {i}"), l2=L2.HOT
    )
    timed = timer.run(2)
    assert order == ["prepare 0", "call", "call", "prepare 1", "call", "call"]
    assert timed.cold_method == ""
    assert timed.evictor_bytes == 0


def test_a_series_with_a_compilation_is_taken_again() -> None:
    calls = []
    timer = Timer(
        device=CPU, call=lambda: calls.append(1), prepare=lambda index: None, compiles=lambda: len(calls) >= 2
    )
    timed = timer.run(4)
    assert len(calls) == 8
    assert timed.compiled_in == ()
    assert any("during 1 of 4 samples; all were taken again" in note for note in timed.notes)


def test_a_compilation_that_comes_again_is_said() -> None:
    calls = []
    timer = Timer(device=CPU, call=lambda: calls.append(1), prepare=lambda index: None, compiles=lambda: len(calls))
    timed = timer.run(4)
    assert timed.compiled_in == (0, 1, 2, 3)
    assert any("4 of 4 samples, also when repeated" in note for note in timed.notes)


def test_stop_is_heard_between_samples() -> None:
    calls = []

    def check() -> None:
        if len(calls) == 3:
            raise KeyError("stop")

    with pytest.raises(KeyError):
        Timer(device=CPU, call=lambda: calls.append(1), prepare=lambda index: None, check=check).run(100)
    assert len(calls) == 3


def test_the_evictor_reads_and_does_not_write() -> None:
    evict = Evictor(CPU)
    evict()
    assert int(evict._sum) == evict.nbytes // 4
    assert bool((evict._buffer == 1).all())


def test_cache_sizes_as_the_system_writes_them(tmp_path: Path) -> None:
    assert cpu_cache_bytes(tmp_path) == DEFAULT_CPU_CACHE
    for index, text in enumerate(("32K", "512K", "3M\n", "junk")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(text, encoding="utf-8")
    assert cpu_cache_bytes(tmp_path) == 3 * 2**20


def test_the_middle() -> None:
    assert middle([3.0, 1.0, 2.0]) == 2.0
    assert middle([4.0, 1.0]) == 2.5
