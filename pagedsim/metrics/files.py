"""A run's tables and summary on disk; the same run gives the same bytes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa

from pagedsim.metrics.steps import Batches

REQUESTS, STEPS, SUMMARY = "requests.parquet", "steps.parquet", "summary.json"
"""Of a run."""
RESULT, COMPARISON, TIMELINE = "result.json", "comparison.csv", "timeline.json"
REPORT = "report.html"
"""Of a study."""


def write_run(folder: Path, requests: pa.Table, steps: Batches, summary: dict[str, Any]) -> None:
    """Write requests.parquet, steps.parquet and summary.json into `folder`, made if need be."""
    from pyarrow import parquet

    folder.mkdir(parents=True, exist_ok=True)
    parquet.write_table(requests, folder / REQUESTS, compression="zstd")
    with parquet.ParquetWriter(folder / STEPS, steps.schema, compression="zstd") as file:
        for part in steps.to_batches():
            file.write_batch(part)
    write_json(folder / SUMMARY, summary, ordered=True)  # clients are in the order of reports


def read_summary(folder: Path) -> dict[str, Any]:
    """The summary of a run; OSError or ValueError unless all that `write_run` wrote is there."""
    from pyarrow import parquet

    for name in (REQUESTS, STEPS):
        parquet.read_metadata(folder / name)  # stands at the end of a file, so it is whole
    return read_json(folder / SUMMARY)


def read_table(path: Path, *columns: str) -> pa.Table:
    """One of a run's tables, or some of its columns."""
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        return file.read(columns or None)


def write_json(path: Path, content: dict[str, Any], ordered: bool = False) -> None:
    """Sorted keys, unless their order is told too, and null for NaN, which JSON does not know."""
    text = json.dumps(_without_nan(content), indent=2, sort_keys=not ordered, allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """What `write_json` wrote, with NaN for null."""
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
