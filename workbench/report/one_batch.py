"""Steps as SGLang's `bench_one_batch` says them: the lines that it prints, and the lines of its result file.

Latencies are in seconds there, throughputs in tokens a second of the whole batch. A step's median decode latency and
throughput are those of one decode step; the total is the prefill and every decode step.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from math import isfinite
from typing import Any, Self

from workbench.errors import InvalidInput, choices
from workbench.modes import Subject
from workbench.record import Record
from workbench.sweeps.results import Results

SHOWN_STEPS = 5
"""Decode steps that are printed one by one."""
_US = 1e6
_WHOLE = ("batch_size", "input_len", "output_len")
_DECODE = ("median_decode_latency", "median_decode_throughput")


@dataclass(frozen=True, kw_only=True, slots=True)
class OneBatch:
    """One line of the result file, its fields in the file's order.

    Attributes:
        run_name: names the configuration.
        batch_size, input_len, output_len: where it was measured.
        prefill_latency, total_latency: seconds.
        median_decode_latency: seconds; None, and left out of the file, where `output_len` is 1.
        prefill_throughput, median_decode_throughput, overall_throughput: tokens a second.
    """

    run_name: str
    batch_size: int
    input_len: int
    output_len: int
    prefill_latency: float
    prefill_throughput: float
    median_decode_latency: float | None = None
    median_decode_throughput: float | None = None
    total_latency: float
    overall_throughput: float

    @classmethod
    def of(cls, record: Record, run_name: str = "") -> Self:
        """What a measured step gave; `run_name` is the model and the modes off their default, unless given.

        Raises:
            InvalidInput: the record is no step, or was not measured.
        """
        if record.spec.subject is not Subject.STEP:
            raise InvalidInput(f"subject: must be step for the lines of bench_one_batch, not {record.spec.subject}")
        prefill, decode, total = (record.median(name) for name in ("prefill", "decode", "total"))
        if prefill is None or total is None:
            raise InvalidInput(f"record: has no times of a prefill and a total; its status is {record.status}")
        point = record.spec.step_point
        batch, prefill_s, total_s = point.batch_size, prefill / _US, total / _US
        decode_s = None if decode is None or point.output_len == 1 else decode / _US
        return cls(
            run_name=run_name or name_of(record),
            batch_size=batch,
            input_len=point.input_len,
            output_len=point.output_len,
            prefill_latency=prefill_s,
            prefill_throughput=point.input_len * batch / prefill_s,
            median_decode_latency=decode_s,
            median_decode_throughput=None if decode_s is None else batch / decode_s,
            total_latency=total_s,
            overall_throughput=point.max_len * batch / total_s,
        )

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read one line of a result file: every number as it was written, to the last digit.

        Raises:
            InvalidInput: not such a line, in one sentence.
        """
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise InvalidInput(f"one_batch: not valid JSON ({error})") from None
        if not isinstance(data, dict):
            raise InvalidInput(f"one_batch: must be a JSON object, not {type(data).__name__}")
        names = [field.name for field in fields(cls)]
        if unknown := [name for name in data if name not in names]:
            raise InvalidInput(f"one_batch: {unknown[0]!r} is none of its fields; there are {choices(names)}")
        return cls(**{name: _value(name, data.get(name)) for name in names})

    def to_json(self) -> str:
        """One line of the result file, without its end."""
        kept = {name: value for name, value in asdict(self).items() if value is not None}
        return json.dumps(kept, allow_nan=False, ensure_ascii=False)

    def lines(self, decode_us: Iterable[float] = ()) -> list[str]:
        """The lines that `bench_one_batch` prints; of `decode_us`, single decode steps, the first are shown.

        A record's decode steps may be of several repeats: no more are shown than one repeat has.
        """
        found = [f"Prefill. {_pair(self.prefill_latency, self.prefill_throughput)}"]
        for index, one in zip(range(min(SHOWN_STEPS, self.output_len - 1)), decode_us, strict=False):
            pair = _pair(one / _US, self.batch_size / (one / _US))
            found.append(f"Decode {index}. Batch size: {self.batch_size}, {pair}")
        if self.median_decode_latency is not None and self.median_decode_throughput is not None:
            latency, throughput = self.median_decode_latency, self.median_decode_throughput
            found.append(f"Decode.  median latency: {latency:6.5f} s, median throughput: {throughput:9.2f} token/s")
        total = f"latency: {self.total_latency:6.3f} s, throughput: {self.overall_throughput:9.2f} token/s"
        return [*found, f"Total. {total}"]


def name_of(record: Record) -> str:
    """A step's configuration on one line: the model, and the modes off their default as options."""
    sizes = ("subject", "model", "device", "batch_size", "input_len", "output_len", "samples", "timeout_s")
    return " ".join([record.spec.model, *record.spec.options(without=sizes)])


def one_batch_lines(record: Record) -> list[str]:
    """The lines that `bench_one_batch` prints for a measured step. Raises `InvalidInput` for any other record."""
    decode = record.metrics.get("decode")
    return OneBatch.of(record).lines(decode.samples if decode is not None else ())


def one_batch_jsonl(results: Results) -> str:
    """The result file of `bench_one_batch`: one line for every measured step, in the order of the records.

    Raises:
        InvalidInput: no step was measured.
    """
    steps = [
        record
        for record in results.points
        if record.spec.subject is Subject.STEP and record.status.measured and "prefill" in record.metrics
    ]
    if not steps:
        raise InvalidInput("format: one_batch is of measured steps, and these results have none")
    return "".join(OneBatch.of(record).to_json() + "\n" for record in steps)


def read_one_batch(text: str) -> list[OneBatch]:
    """Read a result file of `bench_one_batch`, ours or SGLang's. Raises `InvalidInput`, naming the line."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                found.append(OneBatch.from_json(line))
            except InvalidInput as error:
                raise InvalidInput(f"line {number}: {error}") from None
    return found


def _value(name: str, value: Any) -> Any:
    if name == "run_name":
        if not isinstance(value, str):
            raise InvalidInput(f"{name}: must be text, not {value!r}")
        return value
    if value is None and name in _DECODE:
        return None
    if isinstance(value, bool) or not isinstance(value, int if name in _WHOLE else int | float):
        raise InvalidInput(f"{name}: must be a {'whole ' if name in _WHOLE else ''}number, not {value!r}")
    if name in _WHOLE:
        return value
    if not isfinite(value) or value <= 0:
        raise InvalidInput(f"{name}: must be above 0 and finite, not {value!r}")
    return float(value)


def _pair(latency: float, throughput: float) -> str:
    return f"latency: {latency:6.5f} s, throughput: {throughput:9.2f} token/s"
