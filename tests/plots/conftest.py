"""Frames of results with known values, in the columns of `Results.frame()`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest

from workbench.spec import RunSpec


def row(latency_us: float | None = 100.0, *, noise: float = 0.02, reason: str = "", **fields: Any) -> dict[str, Any]:
    """One row; without a latency it is a failed one."""
    status = fields.pop("status", "ok" if latency_us is not None else "runtime_error")
    measured = math.nan if latency_us is None else latency_us
    values: dict[str, Any] = RunSpec().flat() | {
        "status": status,
        "reason": reason,
        "latency_us": measured,
        "p10_us": measured * (1 - noise),
        "p90_us": measured * (1 + noise),
        "total_error": 3e-3,
        "kernel_error": 2e-3,
        "mode_error": math.nan,
        "error_ratio": 0.5 if latency_us is not None else math.nan,
        "compile_s": math.nan,
        "weight_bytes": 5e6,
        "floor_share": math.nan,
        "device_name": "Test CPU",
        "anchor": False,
    }
    return values | fields


@pytest.fixture
def make_row() -> Callable[..., dict[str, Any]]:
    return row


@pytest.fixture
def frame() -> pd.DataFrame:
    """Two backends in two formats at three token counts; grouped_mm in fp32 fails at 16 tokens."""
    rows = []
    for quant, backend, tokens in itertools.product(("bf16", "fp32"), ("reference", "torch_grouped_mm"), (1, 16, 128)):
        time = tokens * (2.0 if backend == "reference" else 1.0) * (1.5 if quant == "fp32" else 1.0) + 100
        broken = (quant, backend, tokens) == ("fp32", "torch_grouped_mm", 16)
        rows.append(
            row(
                None if broken else time,
                quant=quant,
                moe_backend=backend,
                num_tokens=tokens,
                reason="the kernel raised <b>Error</b>" if broken else "",
            )
        )
    frame = pd.DataFrame(rows)
    for name in ("experts", "top_k"):
        frame[name] = pd.array([None] * len(frame), dtype="Int64")
    return frame


@pytest.fixture
def large_frame() -> pd.DataFrame:
    """10,500 rows: five models, every mode, seven token counts, four seeds."""
    rows = []
    for seed, model, quant, backend, mode, tokens in itertools.product(
        range(4),
        [f"model-{i}" for i in range(5)],
        ("fp32", "bf16", "fp16"),
        ("reference", "torch_grouped_mm", "triton", "sglang", "own"),
        ("none", "default", "max-autotune-no-cudagraphs", "reduce-overhead", "max-autotune"),
        (1, 2, 4, 8, 16, 32, 64),
    ):
        rows.append(
            row(
                100.0 + tokens,
                seed=seed,
                model=model,
                quant=quant,
                moe_backend=backend,
                compile=mode,
                num_tokens=tokens,
            )
        )
    return pd.DataFrame(rows)
