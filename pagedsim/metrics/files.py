"""A run's tables and summary on disk; the same run gives the same bytes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from pagedsim.metrics.steps import Batches


class Records(NamedTuple):
    """What a run folder holds."""

    requests: pa.Table
    steps: pa.Table
    summary: dict[str, Any]


def write_run(folder: Path, requests: pa.Table, steps: Batches, summary: dict[str, Any]) -> None:
    """Write requests.parquet, steps.parquet and summary.json into `folder`, made if need be."""
    from pyarrow import parquet

    folder.mkdir(parents=True, exist_ok=True)
    parquet.write_table(requests, folder / "requests.parquet", compression="zstd")
    with parquet.ParquetWriter(folder / "steps.parquet", steps.schema, compression="zstd") as file:
        for part in steps.to_batches():
            file.write_batch(part)
    write_json(folder / "summary.json", summary)


def read_run(folder: Path) -> Records:
    """What `write_run` wrote."""
    from pyarrow import parquet

    requests = parquet.read_table(folder / "requests.parquet")
    steps = parquet.read_table(folder / "steps.parquet")
    return Records(requests, steps, read_json(folder / "summary.json"))


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Sorted keys, and null for NaN, which JSON does not know."""
    text = json.dumps(_without_nan(content), indent=2, sort_keys=True, allow_nan=False)
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
