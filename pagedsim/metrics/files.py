"""A run's tables and summary on disk; equal runs give identical bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from pagedsim.metrics.jsons import read_json, write_json
from pagedsim.metrics.steps import Batches

REQUESTS, STEPS, SUMMARY = "requests.parquet", "steps.parquet", "summary.json"
PREEMPTIONS = "preemptions.parquet"
"""Files of a run."""
RESULT, COMPARISON, TIMELINE = "result.json", "comparison.csv", "timeline.json"
REPORT = "report.html"
"""Files of a study."""


def write_run(
    folder: Path,
    requests: pa.Table,
    steps: Batches,
    summary: dict[str, Any],
    preemptions: pa.Table | None = None,
) -> None:
    """Write requests.parquet, steps.parquet and summary.json into `folder`, which is created; and
    preemptions.parquet if there were any."""
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
    """The summary of a run; raises OSError or ValueError if a file of `write_run` is missing."""
    for name in (REQUESTS, STEPS):
        parquet.read_metadata(folder / name)  # at the end of a file, so the file is complete
    return read_json(folder / SUMMARY)


def read_table(path: Path, *columns: str) -> pa.Table:
    """One of a run's tables, or the given columns."""
    # For a single column, threads and pre-buffering cost more than they save.
    with parquet.ParquetFile(path, pre_buffer=False) as file:
        return file.read(columns or None, use_threads=len(columns) != 1)
