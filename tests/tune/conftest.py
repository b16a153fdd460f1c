"""Makes the stand-in for a GPU importable here, and keeps the user's folders out."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def no_folders(monkeypatch):
    monkeypatch.delenv("MOE_WORKBENCH_CONFIG_DIR", raising=False)
