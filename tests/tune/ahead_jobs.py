"""Stand for the compiler, in the processes that compile: what a job's configuration says is what happens."""

from __future__ import annotations

import os
import time


def play(job) -> int:
    """Needs as much shared memory as its configuration says, or fails as it says."""
    what = job.config.get("what", "")
    if what == "illegal":
        raise ValueError("BLOCK_SIZE_K of up must be 64 or 128\nsecond line")
    if what == "odd":
        raise RuntimeError("no such attribute")
    if what == "crash":
        os._exit(3)
    if what == "hang":
        time.sleep(1000)
    if what == "where":
        raise ValueError(os.environ["CUDA_VISIBLE_DEVICES"] + str(os.getpid()))
    return int(job.config.get("shared", 0))


def crash(job) -> int:
    """Ends its process whatever the job is."""
    os._exit(4)
