"""Messages go through a pipe and come out equal; anything else is refused in one sentence."""

from __future__ import annotations

import json

import pytest

from workbench.engines import protocol
from workbench.errors import InvalidInput
from workbench.record import Environment, Metric, Record, Status
from workbench.spec import RunSpec

HERE = Environment(device_type="cpu", device_name="Some\nCPU \u2028 \U0001f600", torch="2.13.0")
RECORD = Record(
    spec=RunSpec(), status=Status.OK, metrics={"latency": Metric.from_samples([0.1, 1 / 3], "us")}, environment=HERE
)
REQUESTS = [protocol.Run(generation=3, spec=RunSpec.from_flat({"num_tokens": 9})), protocol.Cancel(generation=3),
            protocol.Close()]  # fmt: skip
ANSWERS = [
    protocol.Ready(pid=7, environment=HERE),
    protocol.Busy(sentence='in use by "me"'),
    protocol.Unable(sentence="cannot", generation=2, invalid=True),
    protocol.Progress(generation=3, state="checking", text="line one\nline two"),
    protocol.Done(generation=3, record=RECORD, leaving="poisoned"),
]


@pytest.mark.parametrize("message", REQUESTS, ids=lambda m: m.kind)
def test_requests_round_trip(message: protocol.Request) -> None:
    line = protocol.encode(message)
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    assert protocol.decode_request(line) == message


@pytest.mark.parametrize("message", ANSWERS, ids=lambda m: m.kind)
def test_answers_round_trip(message: protocol.Answer) -> None:
    line = protocol.encode(message)
    assert line.count(b"\n") == 1
    assert protocol.decode_answer(line) == message


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\n",
        b"Traceback (most recent call last):\n",
        b"[]\n",
        b'{"kind": "run"}\n',
        b'{"kind": "nothing"}\n',
        b'{"kind": "progress", "generation": 1, "state": "done", "text": "", "more": 1}\n',
        b"\xff\xfe\n",
    ],
)
def test_other_lines_are_refused(line: bytes) -> None:
    with pytest.raises(InvalidInput, match="message"):
        protocol.decode_answer(line)
    with pytest.raises(InvalidInput, match="message"):
        protocol.decode_request(line)


def test_a_request_is_no_answer() -> None:
    with pytest.raises(InvalidInput):
        protocol.decode_answer(protocol.encode(REQUESTS[0]))
    with pytest.raises(InvalidInput):
        protocol.decode_request(protocol.encode(ANSWERS[0]))


def test_a_bad_spec_inside_a_request_is_refused() -> None:
    data = json.loads(protocol.encode(REQUESTS[0]))
    data["spec"]["point"]["num_tokens"] = -1
    with pytest.raises(InvalidInput):
        protocol.decode_request(json.dumps(data).encode())
