"""Capture the preset checkpoint's layer ahead of time, so that the first sweep is spared it."""

from __future__ import annotations

import sys

from workbench.devices import find_device
from workbench.models.layer import load_layer_source
from workbench.spec import RunSpec


def main() -> None:
    """Load the default model's layer on the CPU; it stays in the cache folder."""
    source = load_layer_source(RunSpec(), find_device("cpu"))
    resolved = source.resolved
    sys.stdout.write(f"Ready: weights {resolved['weights']}; inputs {resolved['inputs']}.\n")


if __name__ == "__main__":
    main()
