"""What the graphs of a step cost: each size's seconds, bytes and kernels, and the room they take from the KV cache."""

from __future__ import annotations

import pandas as pd

from workbench.arithmetic import activation_bytes
from workbench.modes import Subject
from workbench.plots.select import records
from workbench.record import Record
from workbench.step_support import step_network
from workbench.sweeps.results import Results

MIB = 2**20
WHICH = ("model", "quant", "attention_backend", "mla_decode", "fusion", "compile", "compile_scope", "batch_size")
CAPTURED = ("size", "seconds", "MiB", "kernels")
ROOM = ("graphs_MiB", "KV_bytes_a_token", "room_tokens", "room_tokens_with_graphs", "room_lost")


def captures_table(results: Results) -> pd.DataFrame:
    """Every captured size of every measured step: which step; `size`, `seconds`, `MiB`, and `kernels` if counted."""
    found = [
        (*_which(record), one.size, one.capture_s, one.held_bytes / MIB, one.kernels)
        for record in _steps(results)
        for one in record.captures
    ]
    table = pd.DataFrame(found, columns=[*WHICH, *CAPTURED])
    return table.astype({"kernels": "Int64"})


def room_table(results: Results) -> pd.DataFrame:
    """How many tokens of KV cache fit beside the weights, without graphs and with them.

    Returns:
        One row a measured step that captured graphs, on a device whose memory is known: which step; `graphs_MiB`;
        `KV_bytes_a_token`; `room_tokens`, those that fit into what is left beside the weights and what a step works
        in; `room_tokens_with_graphs`; `room_lost`, the share of that room which the graphs take, 0 to 1.
    """
    found = []
    for record in _steps(results):
        memory, held = record.memory, record.environment.memory_bytes
        if memory.graph_bytes is None or memory.weight_bytes is None or held is None:
            continue
        modes = record.spec.modes
        each = step_network(record.spec).kv_bytes_per_token(activation_bytes(modes.quant), modes.mla_decode)
        used = memory.weight_bytes + (memory.kv_cache_bytes or 0) + memory.graph_bytes
        work = max(0, (memory.peak_bytes or 0) - used)
        room = max(0, held - memory.weight_bytes - work)
        left = max(0, room - memory.graph_bytes)
        lost = 1 - left / room if room else 0.0
        found.append((*_which(record), memory.graph_bytes / MIB, each, room // each, left // each, lost))
    return pd.DataFrame(found, columns=[*WHICH, *ROOM])


def room_lesson(found: pd.DataFrame) -> str:
    """What `room_table` found, in one sentence."""
    if not len(found):
        return "Graphs and the KV cache: no step was measured with a graph."
    worst = max(records(found), key=lambda row: float(row["room_lost"]))
    tokens = int(worst["room_tokens"] - worst["room_tokens_with_graphs"])
    return (
        f"Graphs took at most {worst['room_lost']:.3%} of the KV cache's room: {tokens:,} of "
        f"{worst['room_tokens']:,} tokens with {worst['graphs_MiB']:,.1f} MiB ({worst['model']}, "
        f"batch {worst['batch_size']:,})."
    )


def _steps(results: Results) -> list[Record]:
    return [r for r in results.points if r.spec.subject is Subject.STEP and r.status.measured]


def _which(record: Record) -> tuple[object, ...]:
    flat = record.spec.flat()
    return tuple(flat[name] for name in WHICH)
