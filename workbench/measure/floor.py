"""What a sample must do at least, counted from the experts that it touched, and how close the run came.

Shapes: T tokens, D model, F ffn, E experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from workbench.arithmetic import activation_bytes, expert_bytes, rate_name
from workbench.devices import Datasheet
from workbench.measure.timer import middle
from workbench.models.shapes import ModelShape
from workbench.modes import L2, Quant
from workbench.record import Work


@dataclass(frozen=True, slots=True)
class SampleWork:
    """Least bytes moved to or from memory, operations, and experts touched by one sample."""

    bytes: int
    operations: int
    experts: int

    def floor_us(self, read: float, rate: float) -> float:
        """Microseconds at `read` bytes/s and `rate` operations/s, whichever takes longer."""
        return 1e6 * max(self.bytes / read, self.operations / rate)


def sample_work(
    shape: ModelShape,
    quant: Quant,
    num_tokens: int,
    experts: int,
    slots: int,
    *,
    group_size: int = 128,
    zero_points: bool = False,
) -> SampleWork:
    """Work of a sample that touches `experts` distinct experts over `slots` chosen slots (T * K where none is empty).

    Bytes: the weights of the distinct experts with their scales once, the input once, the output once. Operations: two
    a weight a slot. `group_size` and `zero_points` count for int4 alone.
    """
    hidden, channels = shape.hidden_size, shape.intermediate_size
    each = expert_bytes(quant, hidden, channels, group_size=group_size, zero_points=zero_points)
    moved = experts * each + 2 * num_tokens * hidden * activation_bytes(quant)
    return SampleWork(moved, 2 * slots * 3 * hidden * channels, experts)


def weigh(
    works: Sequence[SampleWork],
    samples_us: Sequence[float],
    quant: Quant,
    roofs: Mapping[str, float],
    *,
    implausible: bool = False,
    backend: str = "",
) -> Work:
    """Summarise a series: medians over samples, the floor by this device's measured `roofs`.

    Without a roof of the format's arithmetic, as `backend` does it, there is no floor: fp8 and int8 have none on a CPU,
    and fp4 is measured nowhere.
    """
    read, rate = roofs.get("read"), roofs.get(rate_name(quant, backend))
    work = Work(
        bytes=round(middle([w.bytes for w in works])),
        operations=round(middle([w.operations for w in works])),
        distinct_experts=middle([w.experts for w in works]),
    )
    if not read or not rate:
        return work
    floors = [w.floor_us(read, rate) for w in works]
    share = middle([floor / taken for floor, taken in zip(floors, samples_us, strict=True)])
    bound: Literal["memory", "compute"] = "memory" if work.bytes / read >= work.operations / rate else "compute"
    at_roof = share > 1.0 and not implausible
    return work.model_copy(
        update={"floor_us": middle(floors), "floor_share": share, "bound": bound, "at_roof": at_roof}
    )


def implausible_reason(
    works: Sequence[SampleWork],
    samples_us: Sequence[float],
    quant: Quant,
    sheet: Datasheet | None,
    l2: L2,
    backend: str = "",
) -> str | None:
    """Why a series is too fast to be true, as a sentence; None where it may be.

    Memory counts only with a cold last-level cache: a hot one may hold the weights. None without a datasheet.
    """
    if sheet is None:
        return None
    read = sheet.read if l2 is L2.COLD else float("inf")
    peaks = [w.floor_us(read, sheet.rate(rate_name(quant, backend))) for w in works]
    ratio = middle([peak / taken if taken > 0 else float("inf") for peak, taken in zip(peaks, samples_us, strict=True)])
    if ratio <= 1.0:
        return None
    return (
        f"the median of {middle(samples_us):.4g} us is {ratio:.2f} times as fast as the datasheet's peak allows for "
        f"the bytes and operations of these samples ({middle(peaks):.4g} us)"
    )
