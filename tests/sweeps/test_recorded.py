"""The recorded sweeps that come with the package: they still load, and new fields of a spec leave their keys alone."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from workbench.modes import Reduction
from workbench.sweeps.loader import RECORDINGS, load


@pytest.mark.parametrize("path", sorted(RECORDINGS.glob("*.parquet")), ids=lambda path: path.stem)
def test_recorded_keys_stay_as_they_were_written(path: Path) -> None:
    written = pq.read_table(path, columns=["key"])["key"].to_pylist()
    results = load(path)
    assert [record.key for record in results.records] == written
    assert [record.spec.key for record in results.records] == written
    frame = results.frame()
    assert set(frame["reduction"]) <= set(Reduction)
    assert frame["group_size"].dtype == "int64"
    assert str(frame["split_k"].dtype) == "Int64"
