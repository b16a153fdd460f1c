"""Lets tests import `attention_problems`, which stands beside them, and interpret kernels over unwritten rows."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


def pytest_configure(config: pytest.Config) -> None:
    # Kernels compute on rows that nobody wrote or reads; numpy warns where such memory holds a signalling NaN.
    if os.environ.get("TRITON_INTERPRET") == "1":
        config.addinivalue_line("filterwarnings", "ignore:invalid value encountered:RuntimeWarning")
