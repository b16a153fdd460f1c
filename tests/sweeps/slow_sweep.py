"""A process that runs a slow sweep and says after every point that it is on disk; killed by the test that starts it."""

from __future__ import annotations

import sys
from pathlib import Path

from stand_in import StandIn, no_graphs

from workbench.sweeps.runner import SweepProgress, sweep
from workbench.sweeps.spec import SweepSpec

SWEEP = SweepSpec(name="slow", axes={"quant": ["fp32", "bf16"], "num_tokens": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]})


def main(folder: Path, delay_s: float) -> None:
    """Run `SWEEP` into `folder`."""

    def said(progress: SweepProgress) -> None:
        if progress.record is not None:
            print("point", flush=True)

    sweep(SWEEP, out=folder, engine=StandIn(delay_s=delay_s), progress=said, exports=False, find=no_graphs)


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
