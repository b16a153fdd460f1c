"""Kernels of a graph, from a trace written by hand."""

from __future__ import annotations

from typing import Any

from workbench.measure.graph_kernels import kernels_of


def event(cat: str, name: str, start: float, length: float = 1.0, number: int | None = None) -> dict[str, Any]:
    made: dict[str, Any] = {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": length}
    return made if number is None else {**made, "args": {"correlation": number}}


def test_kernels_belong_to_the_size_whose_graph_was_launched() -> None:
    events = [
        event("user_annotation", "graph|8", 0, 50),
        event("user_annotation", "graph|2", 60, 50),
        event("cuda_runtime", "cudaLaunchKernel", 5, number=1),
        event("cuda_runtime", "cudaGraphLaunch", 10, number=2),
        event("cuda_driver", "cuGraphLaunch", 70, number=3),
        event("kernel", "loads_the_buffers", 100, number=1),
        *[event("kernel", f"k{i}", 110 + i, number=2) for i in range(5)],
        event("gpu_memset", "Memset", 120, number=2),
        *[event("kernel", f"k{i}", 210 + i, number=3) for i in range(3)],
        event("kernel", "of_nobody", 300, number=9),
        {"ph": "M", "name": "graph|7"},
    ]
    assert kernels_of(events) == {8: 6, 2: 3}


def test_a_trace_without_kernels() -> None:
    assert kernels_of([event("user_annotation", "graph|8", 0, 50)]) == {}
