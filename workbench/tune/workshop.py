"""The layer on a GPU, made once for all token counts, with its candidates compiled ahead."""

from __future__ import annotations

import gc

import torch
from moe_kernels.tuning.rows import Row

from workbench.devices import DeviceInfo
from workbench.errors import InvalidInput
from workbench.models.layer import load_layer_source
from workbench.tune.ahead import Ahead, Job
from workbench.tune.bench import LayerBench
from workbench.tune.candidates import partner
from workbench.tune.run import Cell, Progress, TuneRequest


class GpuWorkshop:
    """See `run.Workshop`. Compiling begins at once, in the order of the cells, while the weights are made."""

    def __init__(
        self,
        request: TuneRequest,
        device: DeviceInfo,
        cells: list[Cell],
        shared_bytes: int,
        ahead: Ahead,
        progress: Progress,
    ) -> None:
        self._ahead, self._zero_points = ahead, request.spec.modes.zero_points
        self._capability = 10 * device.capability[0] + device.capability[1] if device.capability else 90
        self._shared = shared_bytes
        self._jobs: dict[str, int] = {}
        for cell in cells:
            for which, rows, others in (("up", cell.up.kept, cell.down.kept), ("down", cell.down.kept, cell.up.kept)):
                for row in rows:
                    other = partner(which, row, others)
                    if other is not None:
                        pair = {"up": row, "down": other} if which == "up" else {"up": other, "down": row}
                        self._number(cell, {**pair, "PDL": False})
        modes = request.spec.modes
        progress(f"making the weights of {request.spec.model} as {modes.quant}")
        spec = request.spec.replace(num_tokens=max(request.tokens))
        with torch.no_grad():
            self._source = load_layer_source(spec, device)
            self._weights = self._source.build_weights(
                modes.quant, group_size=modes.group_size, zero_points=modes.zero_points
            )

    def bench(self, cell: Cell) -> LayerBench:
        """See `run.Workshop`."""
        gc.collect()
        torch.cuda.empty_cache()
        tokens = cell.problem.num_tokens

        def expect(configs: list[Row]) -> None:
            for config in configs:
                self._number(cell, config)

        def verdict(config: Row) -> str:
            return self._ahead.verdict(self._number(cell, config))

        try:
            with torch.no_grad():
                return LayerBench(self._source, self._weights, tokens, verdict, expect)
        except torch.OutOfMemoryError:
            raise InvalidInput(
                f"tokens: {tokens} tokens do not fit into the device's memory beside the weights"
            ) from None

    def _number(self, cell: Cell, config: Row) -> int:
        key = f"{cell.problem.num_tokens} {sorted(config.items())}"
        if key not in self._jobs:
            job = Job(cell.problem, self._zero_points, config, self._capability, self._shared)
            self._jobs[key] = self._ahead.add(job)
        return self._jobs[key]
