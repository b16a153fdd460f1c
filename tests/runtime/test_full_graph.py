"""The bookkeeping of many graphs on a stand-in recorder. The real one is in tests/engines/test_full_graph_gpu.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

from workbench.errors import InvalidInput
from workbench.runtime.full_graph import FullGraphRunner, capture_list, default_sizes, padding_waste
from workbench.runtime.graph import WARMUPS, CaptureError


@dataclass
class Pool:
    """Memory of all stand-in recorders: grows only where a capture needs more than was there."""

    held: int = 1000
    spare: int = 0
    order: list[int] = field(default_factory=list)
    released: int = 0
    warmed: int = 0
    fail_at: int = 0
    error: type[Exception] = RuntimeError


class Playback:
    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.call: Callable[[], torch.Tensor] | None = None
        self.output: torch.Tensor | None = None
        self.mine = 0

    def warm(self, call: Callable[[], torch.Tensor], times: int) -> None:
        for _ in range(times):
            call()
        self.pool.warmed += times

    def capture(self, call: Callable[[], torch.Tensor]) -> torch.Tensor:
        out = call()
        size = out.shape[0]
        if size == self.pool.fail_at:
            raise self.pool.error("an operation is not permitted when stream is capturing\nmore")
        self.pool.order.append(size)
        self.mine = max(0, 100 * size - self.pool.spare)
        self.pool.held += self.mine
        self.pool.spare = max(self.pool.spare, 100 * size)
        self.call, self.output = call, out
        return out

    def replay(self) -> None:
        assert self.call is not None
        assert self.output is not None
        self.output.copy_(self.call())

    def release(self) -> None:
        self.pool.released += 1
        self.pool.held -= self.mine
        self.mine = 0

    def held_bytes(self) -> int:
        return self.pool.held


class Doubling:
    """`2 x + mean of all rows that run`: padding that is not harmless would show in every row."""

    def __init__(self, largest: int = 16) -> None:
        self.x = torch.zeros(largest, 3)
        self.called: list[int] = []

    @property
    def largest(self) -> int:
        return self.x.shape[0]

    def load(self, rows: int, padded: int) -> None:
        self.x[rows:padded] = self.x[:rows].mean(dim=0)

    def call(self, size: int) -> torch.Tensor:
        self.called.append(size)
        return 2 * self.x[:size] + self.x[:size].mean(dim=0)


def runner(sizes: list[int], largest: int = 16, **pool: object) -> tuple[FullGraphRunner, Doubling, Pool]:
    subject, memory = Doubling(largest), Pool(**pool)  # type: ignore[arg-type]
    return FullGraphRunner(subject, sizes, lambda: Playback(memory)), subject, memory


def filled(subject: Doubling, rows: int, seed: int) -> torch.Tensor:
    x = torch.randn(rows, 3, generator=torch.Generator().manual_seed(seed))
    subject.x.fill_(float("nan"))
    subject.x[:rows] = x
    return 2 * x + x.mean(dim=0)


def test_largest_first_in_one_pool() -> None:
    made, _, pool = runner([1, 2, 8, 4])
    assert pool.order == [16, 8, 4, 2, 1]
    assert made.sizes == [1, 2, 4, 8, 16]
    assert [one.size for one in made.captured] == [16, 8, 4, 2, 1]
    assert [one.held_bytes for one in made.captured] == [1600, 0, 0, 0, 0]
    assert made.held_bytes == 1600
    assert all(one.capture_s > 0 for one in made.captured)
    assert pool.warmed == 5 * WARMUPS
    assert made.capture_error_mode == "thread_local"


@pytest.mark.parametrize("rows", range(1, 17))
def test_any_number_of_rows_pads_to_the_next_size(rows: int) -> None:
    made, subject, _ = runner([1, 2, 4, 8])
    expected = filled(subject, rows, rows)
    out = made.run(rows)
    torch.testing.assert_close(out, expected)
    assert out.shape == (rows, 3)
    assert made.last == ("graph", min(size for size in (1, 2, 4, 8, 16) if size >= rows))


def test_results_of_many_sizes_stay() -> None:
    made, subject, _ = runner([2, 8])
    kept = []
    for seed, rows in enumerate((8, 1, 5, 16, 2, 3)):
        expected = filled(subject, rows, seed)
        kept.append((made.run(rows), expected))
    for out, expected in kept:
        torch.testing.assert_close(out, expected)


def test_a_replay_is_overwritten_and_a_run_is_not() -> None:
    made, subject, _ = runner([4])
    filled(subject, 4, 0)
    static, copy = made.replay(4), made.run(4)
    before = copy.clone()
    filled(subject, 4, 1)
    made.replay(4)
    assert torch.equal(copy, before)
    assert not torch.equal(static, before)


def test_the_maximum_is_always_captured_and_nothing_is_above_the_buffers() -> None:
    made, _, _ = runner([3], largest=7)
    assert made.sizes == [3, 7]
    assert made.padded(4) == 7
    assert made.padded(8) is None
    for rows in (0, 8):
        with pytest.raises(InvalidInput, match=f"size: must be from 1 to 7, not {rows}"):
            made.run(rows)


def test_above_the_captured_sizes_runs_eager_and_says_so() -> None:
    made, subject, _ = runner([4])
    made.sizes.remove(16)
    calls = len(subject.called)
    expected = filled(subject, 9, 3)
    torch.testing.assert_close(made.run(9), expected)
    assert made.last == ("eager", 9)
    assert len(subject.called) == calls + 1


@pytest.mark.parametrize(
    ("error", "kind"), [(RuntimeError, CaptureError), (torch.OutOfMemoryError, torch.OutOfMemoryError)]
)
def test_a_failed_capture_gives_everything_back(error: type[Exception], kind: type[Exception]) -> None:
    pool = Pool(fail_at=4, error=error)
    with pytest.raises(kind, match=r"size 4.*an operation is not permitted when stream is capturing$"):
        FullGraphRunner(Doubling(), [2, 4, 8], lambda: Playback(pool))
    assert pool.order == [16, 8]
    assert pool.held == 1000
    assert pool.released == 3
    pool.fail_at = 0
    again = FullGraphRunner(Doubling(), [2, 4, 8], lambda: Playback(pool))
    assert again.sizes == [2, 4, 8, 16]


def test_a_stop_between_sizes_gives_everything_back() -> None:
    pool, left = Pool(), [3]

    def check() -> None:
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        FullGraphRunner(Doubling(), [2, 4, 8], lambda: Playback(pool), check=check)
    assert pool.order == [16, 8]
    assert pool.held == 1000


def test_progress_names_every_size() -> None:
    told: list[tuple[int, int, int]] = []
    FullGraphRunner(Doubling(), [2, 4], lambda: Playback(Pool()), progress=lambda *at: told.append(at))
    assert told == [(0, 3, 16), (1, 3, 4), (2, 3, 2)]


def test_close_and_open_again_five_times_grows_nothing() -> None:
    pool = Pool()
    for _ in range(5):
        made = FullGraphRunner(Doubling(), [1, 2, 4, 8], lambda: Playback(pool))
        made.close()
        made.close()
        pool.spare = 0
        assert pool.held == 1000
        with pytest.raises(RuntimeError, match="closed"):
            made.run(1)


@pytest.mark.parametrize("sizes", [[0], [17], [True], [2.0], [-1]])
def test_sizes_that_are_none(sizes: list[int]) -> None:
    with pytest.raises(InvalidInput, match="sizes: must be whole numbers from 1 to 16"):
        capture_list(sizes, 16)


def test_default_sizes() -> None:
    assert default_sizes(1) == [1]
    assert default_sizes(3) == [1, 2, 3]
    assert default_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert default_sizes(600)[-4:] == [496, 512, 576, 600]


def test_padding_waste() -> None:
    assert padding_waste([1, 2, 4, 8], [1, 2, 4, 8]) == 0
    assert padding_waste([4, 8], [3, 5, 9]) == pytest.approx(1 - 8 / 12)
    assert padding_waste([4], [5]) == 0
