"""A run's tables and summary on disk; equal runs give identical bytes.

pyarrow is imported where a table is read or written: JSON files need the standard library alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

    from pagedsim.metrics.steps import Batches

REQUESTS, STEPS, SUMMARY = "requests.parquet", "steps.parquet", "summary.json"
"""Files of a run, beside those of events."""
RESULT, COMPARISON, TIMELINE = "result.json", "comparison.csv", "timeline.json"
REPORT, TABLE = "report.html", "table.tex"
"""Files of a study."""


def write_run(
    folder: Path,
    requests: pa.Table,
    steps: Batches,
    summary: dict[str, Any],
    events: Mapping[str, pa.Table] | None = None,
) -> None:
    """Write requests.parquet, steps.parquet and summary.json into `folder`, which is created; and
    tables of events by their names, if there were any."""
    from pyarrow import parquet

    folder.mkdir(parents=True, exist_ok=True)
    parquet.write_table(requests, folder / REQUESTS, compression="zstd")
    with parquet.ParquetWriter(folder / STEPS, steps.schema, compression="zstd") as file:
        for part in steps.to_batches():
            file.write_batch(part)
    for name, rows in (events or {}).items():
        path = folder / f"{name}.parquet"
        if rows.num_rows:
            parquet.write_table(rows, path, compression="zstd")
        else:
            path.unlink(missing_ok=True)
    write_json(folder / SUMMARY, summary, ordered=True)  # clients are in the order of reports


def read_summary(folder: Path) -> dict[str, Any]:
    """The summary of a run; raises OSError or ValueError if a file of `write_run` is missing."""
    from pyarrow import parquet

    for name in (REQUESTS, STEPS):
        parquet.read_metadata(folder / name)  # at the end of a file, so the file is complete
    return read_json(folder / SUMMARY)


def read_table(path: Path, *columns: str) -> pa.Table:
    """One of a run's tables, or the given columns."""
    from pyarrow import parquet

    # For a single column, threads and pre-buffering cost more than they save.
    with parquet.ParquetFile(path, pre_buffer=False) as file:
        return file.read(columns or None, use_threads=len(columns) != 1)


def write_json(path: Path, content: dict[str, Any], ordered: bool = False) -> None:
    """Write with sorted keys unless `ordered`, and with null for NaN, which JSON lacks."""
    text = json.dumps(_without_nan(content), indent=2, sort_keys=not ordered, allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """Read a file of `write_json`, with NaN for null."""
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return _with_nan(content)


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _without_nan(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _with_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _with_nan(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_with_nan(inner) for inner in value]
    return math.nan if value is None else value
