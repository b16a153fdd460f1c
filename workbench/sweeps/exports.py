"""Files of results that can be read again: JSON lines, Parquet, CSV."""

from __future__ import annotations

import csv
import io
import math

from workbench.record import Record
from workbench.sweeps.results import Results

RECORD_COLUMN = "record"


def jsonl(results: Results) -> str:
    """One record a line, strict JSON."""
    return "".join(record.to_json() + "\n" for record in results.records)


def _without_samples(record: Record) -> Record:
    metrics = {name: metric.model_copy(update={"samples": ()}) for name, metric in record.metrics.items()}
    return record.model_copy(update={"metrics": metrics})


def parquet(results: Results, *, samples: bool = True) -> bytes:
    """The flat table (NaN as null) and a last column with each record as JSON, so that reading gives equal records."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    records = results.records if samples else tuple(map(_without_samples, results.records))
    table = pa.Table.from_pandas(results.frame(), preserve_index=False).replace_schema_metadata(
        {"workbench.records": "1"}
    )
    texts = pa.array([record.to_json() for record in records], type=pa.string())
    table = table.append_column(RECORD_COLUMN, texts)
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="zstd", compression_level=9)
    return buffer.getvalue()


def _cell(value: object) -> str:
    if isinstance(value, float):
        return "" if math.isnan(value) else repr(value)
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None else str(value)


def csv_text(results: Results) -> str:
    """The flat table. Numbers are the shortest text that reads back as the same double; missing ones are empty."""
    frame = results.frame()
    out = io.StringIO()
    lines = csv.writer(out, lineterminator="\r\n")  # as RFC 4180 has it; so a lone CR or LF in a text is quoted
    lines.writerow(frame.columns)
    columns = [frame[name].astype(object).where(frame[name].notna(), None).tolist() for name in frame.columns]
    lines.writerows([_cell(value) for value in row] for row in zip(*columns, strict=True))
    return out.getvalue()
