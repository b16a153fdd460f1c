"""`light_worker`, but everything that it says about a point is preceded by the end of the point before."""

from __future__ import annotations

import sys

import light_worker

light_worker.put_in_place()

from workbench.engines import worker  # noqa: E402 - after the stand-ins
from workbench.engines.protocol import Answer, Done, Progress  # noqa: E402


class LateChannel(worker.Channel):
    """Repeats itself."""

    last: Done | None = None

    def send(self, message: Answer) -> None:
        if self.last is not None and isinstance(message, (Progress, Done)):
            super().send(Progress(generation=self.last.generation, state="failed", text="too late"))
            super().send(self.last)
        super().send(message)
        if isinstance(message, Done):
            self.last = message


if __name__ == "__main__":
    worker.Channel = LateChannel  # type: ignore[misc]
    worker.leave(worker.main(sys.argv))
