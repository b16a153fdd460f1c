"""Stands for a GPU: configurations take the time that a function says, by a clock that only they move."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager

from workbench.tune.search import DeviceLost, Wrong

Row = dict


class Clock:
    """Seconds that pass when something is run."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class FakeBench:
    """See `workbench.tune.search.Bench`.

    `us` gives a configuration's time; `fault` why it is wrong; each opening takes `open_s`.
    """

    def __init__(
        self,
        us: Callable[[Row], float],
        fault: Callable[[Row], str] = lambda config: "",
        clock: Clock | None = None,
        open_s: float = 0.0,
        lost_after: int | None = None,
    ) -> None:
        self.us, self.fault, self.clock, self.open_s = us, fault, clock or Clock(), open_s
        self.lost_after = lost_after
        self.opened: list[Row] = []
        self.samples: list[Row] = []
        self.expected: list[Row] = []
        self.closed = 0

    def expect(self, configs: list[Row]) -> None:
        self.expected += configs

    def open(self, config: Row) -> FakeEntry:
        self.clock.now += self.open_s
        self.opened.append(config)
        if self.lost_after is not None and len(self.opened) > self.lost_after:
            raise DeviceLost("an illegal memory access was encountered")
        if why := self.fault(config):
            raise Wrong(why)
        return FakeEntry(self, config)


class FakeEntry:
    """One configuration."""

    def __init__(self, bench: FakeBench, config: Row) -> None:
        self.bench, self.config = bench, config

    def sample(self) -> float:
        us = self.bench.us(self.config)
        self.bench.samples.append(self.config)
        self.bench.clock.now += us / 1e6
        return us

    def close(self) -> None:
        self.bench.closed += 1


class FakeWorkshop:
    """One bench for all cells."""

    def __init__(self, bench: FakeBench) -> None:
        self._bench = bench
        self.cells: list = []

    def bench(self, cell) -> FakeBench:
        self.cells.append(cell)
        return self._bench


def opener(workshop: FakeWorkshop):
    """What `tune` is given to open it."""

    @contextmanager
    def open_workshop(request, device, cells, shared_bytes, progress):
        yield workshop

    return open_workshop


def costs(config: Row) -> float:
    """Microseconds by tiles and layout: the best has the largest N and K in both, and PDL."""
    total = 0.0
    for which, weight in (("up", 2.0), ("down", 1.0)):
        gemm = config[which]
        total += weight * (100 - gemm["BLOCK_SIZE_N"] / 8 - gemm["BLOCK_SIZE_K"] / 64 - gemm["num_stages"] / 16)
        total += {"inline": 0.0, "sorted": 10.0, "token": 20.0}[gemm.get("LAYOUT", "sorted")]
        total += 5.0 * gemm.get("SWAP_AB", False) + gemm.get("SPLIT_K", 1) - 1
    return total - 3.0 * bool(config.get("PDL"))
