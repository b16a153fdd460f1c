"""The worker, with a stand-in for all that needs torch: it starts in a moment. The rest of it is the real one.

A point goes through its phases and calls the backend that the spec names once; its "latency" is the number of tokens.
"""

from __future__ import annotations

import importlib
import sys
import time
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any

from workbench.devices import DeviceInfo
from workbench.record import Correctness, Difference, Environment, Metric, Record, Status, now
from workbench.spec import RunSpec


class Cancelled(Exception):
    """A stop was asked for."""


class PointSession:
    """Holds nothing."""

    def __init__(self, device: DeviceInfo, environment: Environment) -> None:
        self.environment, self.poisoned = environment, ""


def run_point(
    spec: RunSpec,
    device: DeviceInfo,
    session: PointSession,
    progress: Callable[[str, str], None],
    check: Callable[[], None],
) -> Record:
    given: dict[str, Any] = {"spec": spec, "environment": session.environment, "created": now()}
    module, _, name = spec.modes.moe_backend.partition(":")
    try:
        progress("starting", f"{spec.point.num_tokens} tokens")
        function = getattr(importlib.import_module(module), name)
        progress("warming", f"{spec.point.num_tokens} tokens")
        latency = function(spec.point.num_tokens, None, None)
        progress("checking", f"{spec.point.num_tokens} tokens")
        for _ in range(spec.samples):
            check()
            time.sleep(0.001)
        progress("measuring", f"{spec.samples} samples")
    except Cancelled:
        progress("cancelled", "stopped by the user")
        return Record(status=Status.CANCELLED, reason="stopped by the user", **given)
    except Exception as error:
        if name == "poisons":
            session.poisoned = "the device is in an error state"
        progress("failed", str(error))
        reason = f"{type(error).__name__}: {error}"
        return Record(status=Status.RUNTIME_ERROR, reason=reason, detail=traceback.format_exc(), **given)
    progress("done", "measured")
    same = Difference(relative_l2=0.0, max_over_rms=0.0, dissimilarity=0.0)
    right = Correctness(total=same, kernel=same, kernel_budget=1.0, ratio=0.0, rows_checked=1, rows=1, passed=True)
    metric = Metric.from_samples([float(latency)] * 3, "us")
    return Record(status=Status.OK, metrics={"latency": metric}, correctness=right, **given)


def put_in_place() -> None:
    """Set the stand-ins where the worker imports from."""
    stand_ins: dict[str, dict[str, Any]] = {
        "workbench.engines.faults": {"Cancelled": Cancelled},
        "workbench.engines.point": {"run_point": run_point},
        "workbench.engines.session": {"PointSession": PointSession},
        "workbench.measure.roofs": {"find_roofs": lambda device, folder: {"read_bytes_s": 1e9}},
        "workbench.models.cache": {"cache_folder": lambda: None},
        "workbench.runtime.compile": {"watch_compiles": lambda: None},
    }
    for name, content in stand_ins.items():
        module = ModuleType(name)
        vars(module).update(content)
        sys.modules[name] = module


if __name__ == "__main__":
    put_in_place()
    from workbench.engines import worker

    code = worker.main(sys.argv)
    assert "torch" not in sys.modules
    worker.leave(code)
