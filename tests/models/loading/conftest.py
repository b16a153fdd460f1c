"""Lets tests import `load_cases`, which stands beside them, and `network_cases` of the folder next to it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

for folder in (Path(__file__).parent, Path(__file__).parent.parent / "network"):
    sys.path.insert(0, str(folder))


@pytest.fixture(autouse=True)
def one_thread(request: pytest.FixtureRequest) -> Iterator[None]:
    """Matrices here are so small that threads only wait for one another; those of a real checkpoint are not."""
    before = torch.get_num_threads()
    if request.node.get_closest_marker("slow") is None:
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
