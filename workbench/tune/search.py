"""The search for one token count: each GEMM apart, then the best pairs as whole layers. No torch here.

What times and checks a configuration comes in as a `Bench`, so that the search itself runs anywhere.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple, Protocol

from moe_kernels.tuning.rows import Row

from workbench.tune.candidates import compatible, partner

SAMPLES, LONG_SAMPLES, LONG_US = 15, 7, 3000.0
# After so many samples a candidate this much slower than the best of its kind is given up.
FIRST_LOOK, HOPELESS = 5, 1.5
FINAL_SAMPLES, LEAST_FINAL = 45, 5
FINAL_PAIRS = 10
WITH_PDL = 4
# A later finalist must be faster by more than this to take the place of an earlier one.
TIE = 0.005
# Share of a cell's time that each GEMM may take.
GEMM_SHARE = 0.4
# Share of a layer that the first GEMM is: it reads two of the three matrices.
UP_SHARE = 2 / 3


class Wrong(Exception):
    """A candidate's result is wrong, or it cannot run; `str` says why."""


class DeviceLost(Exception):
    """The device can run nothing more in this process; `str` says why."""


class Entry(Protocol):
    """A candidate that is right and ready to be timed."""

    def sample(self) -> float:
        """Run it once, with a cold cache: microseconds."""

    def close(self) -> None:
        """Give back what it holds."""


class Bench(Protocol):
    """Runs whole layers of one token count."""

    def expect(self, configs: list[Row]) -> None:
        """Be told which configurations are opened next, so that they can be compiled side by side."""

    def open(self, config: Row) -> Entry:
        """Check a configuration's result and make it ready.

        Raises:
            Wrong: its result is wrong, or it cannot run.
            DeviceLost: nothing can be run after it.
        """


@dataclass(frozen=True, kw_only=True)
class Timed:
    """A configuration and its median in microseconds."""

    config: Row
    us: float


class _Beside(NamedTuple):
    """A GEMM's row, the other GEMM's that it was timed beside, and the layer's median."""

    row: Row
    other: Row
    us: float


@dataclass(kw_only=True)
class CellResult:
    """What was found for one token count.

    Attributes:
        best: the fastest of the finalists; None where none could be timed.
        finalists: in the order in which they were compared.
        dropped: candidates that were wrong or could not run, as sentences.
        timed: candidates that were timed.
        left: candidates that there was no time for.
        lost: why the device can run nothing more; empty where it can.
    """

    best: Timed | None = None
    finalists: list[Timed] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    timed: int = 0
    left: int = 0
    lost: str = ""


def search(
    ups: list[Row],
    downs: list[Row],
    bench: Bench,
    *,
    known: list[Row] = [],  # noqa: B006 - never changed
    seconds: float = float("inf"),
    clock: Callable[[], float] = time.monotonic,
    progress: Callable[[str], None] = lambda text: None,
) -> CellResult:
    """Find the fastest configuration.

    Args:
        ups, downs: candidates for the two GEMMs.
        bench: checks and times.
        known: configurations to compare with; the first ones win ties.
        seconds: budget, after which the finalists found so far are compared.
        clock: seconds that pass.
        progress: told a line after each stage.
    """
    return _Search(bench, clock, progress, clock(), seconds).run(ups, downs, known)


@dataclass
class _Search:
    bench: Bench
    clock: Callable[[], float]
    progress: Callable[[str], None]
    start: float
    seconds: float
    result: CellResult = field(default_factory=CellResult)

    def run(self, ups: list[Row], downs: list[Row], known: list[Row]) -> CellResult:
        try:
            best_ups = self._gemm("up", ups, downs, GEMM_SHARE)
            best_downs = self._gemm("down", downs, ups, 2 * GEMM_SHARE)
            self._finals(
                known, _pairs(_alone(best_ups, best_downs, 1 - UP_SHARE), _alone(best_downs, best_ups, UP_SHARE))
            )
        except DeviceLost as error:
            self.result.lost = str(error)
        return self.result

    def _passed(self) -> float:
        return self.clock() - self.start

    def _gemm(self, which: str, rows: list[Row], others: list[Row], until: float) -> list[_Beside]:
        """Time one GEMM's candidates, each beside the partner of its kind, best first."""
        found: list[_Beside] = []
        best: dict[tuple[object, ...], float] = {}
        for index, row in enumerate(rows):
            if index and self._passed() > until * self.seconds:  # one of each, so that there is a pair
                self.result.left += len(rows) - index
                break
            other = partner(which, row, others)
            if other is None:
                continue
            config = {"up": row, "down": other} if which == "up" else {"up": other, "down": row}
            kind = tuple(other.items())  # only candidates beside the same partner can be compared
            us = self._time({**config, "PDL": False}, best.get(kind, float("inf")))
            if us is not None:
                found.append(_Beside(row, other, us))
                best[kind] = min(us, best.get(kind, us))
        found.sort(key=lambda timed: timed.us)
        fastest = f", fastest {found[0].us:.1f} us with {describe_row(found[0].row)}" if found else ""
        self.progress(f"{which}: {len(found)} of {len(rows)} candidates timed{fastest}")
        return found

    def _open(self, config: Row) -> Entry | None:
        try:
            return self.bench.open(config)
        except Wrong as error:
            self.result.dropped.append(f"{describe(config)}: {error}")
            return None

    def _time(self, config: Row, best_us: float) -> float | None:
        entry = self._open(config)
        if entry is None:
            return None
        try:
            samples = [entry.sample()]
            count = LONG_SAMPLES if samples[0] > LONG_US else SAMPLES
            while len(samples) < count:
                if len(samples) == FIRST_LOOK and statistics.median(samples) > HOPELESS * best_us:
                    break
                samples.append(entry.sample())
        finally:
            entry.close()
        self.result.timed += 1
        return float(statistics.median(samples))

    def _finals(self, known: list[Row], pairs: list[Row]) -> None:
        """Compare whole layers, interleaved; earlier ones win ties."""
        plain = [{"up": pair["up"], "down": pair["down"], "PDL": False} for pair in pairs]
        configs = [*known, *plain, *({**config, "PDL": True} for config in plain[:WITH_PDL])]
        entries: list[tuple[Row, Entry, list[float]]] = []
        finalists = _distinct(configs)
        self.bench.expect(finalists)
        try:
            for config in finalists:
                if entries and self._passed() > self.seconds:
                    self.result.left += 1
                    continue
                entry = self._open(config)
                if entry is not None:
                    entries.append((config, entry, []))
            for turn in range(FINAL_SAMPLES):
                if turn >= LEAST_FINAL and self._passed() > self.seconds:
                    break
                for _, entry, samples in entries:
                    samples.append(entry.sample())
        finally:
            for _, entry, _ in entries:
                entry.close()
        for config, _, samples in entries:
            timed = Timed(config=config, us=float(statistics.median(samples)))
            self.result.finalists.append(timed)
            if self.result.best is None or timed.us < self.result.best.us * (1 - TIE):
                self.result.best = timed


def _alone(rows: list[_Beside], others: list[_Beside], share: float) -> list[Timed]:
    """What each row takes without its partner, best first; `share` is the partner's of a layer.

    A layer of the partner was timed when the partner was a candidate itself. So the sum of two rows of one kind is
    what their layer takes; for rows of different kinds it is as good as `share` is.
    """
    layers = [(other.row, other.us) for other in others]
    alone = []
    for one in rows:
        layer = next((us for row, us in layers if row == one.other), one.us)
        alone.append(Timed(config=one.row, us=one.us - share * layer))
    return sorted(alone, key=lambda timed: timed.us)


def _pairs(ups: list[Timed], downs: list[Timed]) -> list[Row]:
    """The pairs to compare as whole layers: the best of every combination of kinds, then the best of all."""

    def kind(row: Row) -> tuple[object, ...]:
        return row["LAYOUT"], row["BLOCK_SIZE_M"]

    sums = sorted(
        ((up.us + down.us, up.config, down.config) for up, down in product(ups[:40], downs[:40])
         if compatible(up.config, down.config)),
        key=lambda pair: pair[0],
    )  # fmt: skip
    first: list[Row] = []
    rest: list[Row] = []
    seen = set()
    for _, up, down in sums:
        kinds = (kind(up), kind(down))
        (rest if kinds in seen else first).append({"up": up, "down": down})
        seen.add(kinds)
    return [*first[: FINAL_PAIRS // 2], *rest][:FINAL_PAIRS]


def _distinct(configs: list[Row]) -> list[Row]:
    kept: list[Row] = []
    for config in configs:
        if config not in kept:
            kept.append(config)
    return kept


def describe_row(row: Row) -> str:
    """A GEMM's row in a few words: `inline 16x32x128 g1 w4 s5 swap`."""
    tiles = "x".join(str(row[key]) for key in ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K"))
    words = [str(row.get("LAYOUT", "sorted")), tiles, f"g{row['GROUP_SIZE_M']}"]
    words += [f"w{row['num_warps']}", f"s{row['num_stages']}"]
    words += [word for key, word in (("USE_TMA", "tma"), ("SWAP_AB", "swap")) if row.get(key)]
    return " ".join([*words, *([f"split {row['SPLIT_K']}"] if row.get("SPLIT_K", 1) > 1 else [])])


def describe(config: Row) -> str:
    """A configuration in a few words."""
    pdl = ", pdl" if config.get("PDL") else ""
    return f"up {describe_row(config['up'])}, down {describe_row(config['down'])}{pdl}"
