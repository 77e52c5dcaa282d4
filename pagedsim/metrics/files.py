"""A run's tables and summary on disk; the same run gives the same bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from pagedsim.metrics.jsons import read_json, write_json
from pagedsim.metrics.steps import Batches

REQUESTS, STEPS, SUMMARY = "requests.parquet", "steps.parquet", "summary.json"
PREEMPTIONS = "preemptions.parquet"
"""Of a run."""
RESULT, COMPARISON, TIMELINE = "result.json", "comparison.csv", "timeline.json"
REPORT = "report.html"
"""Of a study."""


def write_run(
    folder: Path,
    requests: pa.Table,
    steps: Batches,
    summary: dict[str, Any],
    preemptions: pa.Table | None = None,
) -> None:
    """Write requests.parquet, steps.parquet and summary.json into `folder`, made if need be; and
    preemptions.parquet where there were any."""
    folder.mkdir(parents=True, exist_ok=True)
    parquet.write_table(requests, folder / REQUESTS, compression="zstd")
    with parquet.ParquetWriter(folder / STEPS, steps.schema, compression="zstd") as file:
        for part in steps.to_batches():
            file.write_batch(part)
    if preemptions is not None and preemptions.num_rows:
        parquet.write_table(preemptions, folder / PREEMPTIONS, compression="zstd")
    else:
        (folder / PREEMPTIONS).unlink(missing_ok=True)
    write_json(folder / SUMMARY, summary, ordered=True)  # clients are in the order of reports


def read_summary(folder: Path) -> dict[str, Any]:
    """The summary of a run; OSError or ValueError unless all that `write_run` wrote is there."""
    for name in (REQUESTS, STEPS):
        parquet.read_metadata(folder / name)  # stands at the end of a file, so it is whole
    return read_json(folder / SUMMARY)


def read_table(path: Path, *columns: str) -> pa.Table:
    """One of a run's tables, or some of its columns."""
    # A column alone is read sooner than threads begin, or parts of the file are gathered.
    with parquet.ParquetFile(path, pre_buffer=False) as file:
        return file.read(columns or None, use_threads=len(columns) != 1)
