"""A log of requests as `experiment=calibrate requests=` reads it."""

from __future__ import annotations

import csv
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from pagedsim.core import ConfigError

COLUMNS = {
    "arrived_at": "sent",
    "num_prefill_tokens": "prompt_tokens",
    "num_decode_tokens": "output_tokens",
    "first_token_at": "first_token",
    "finished_at": "finished",
    "client": "client",
}
"""Those of a log, and of the recorded requests: what the server saw arrive is what was sent."""


def check_log(path: Path) -> None:
    """Raise ConfigError where `write_log` could not write, or would write over something else."""
    if not path.parent.is_dir():
        raise ConfigError(f"record={path}: there is no folder {path.parent}")
    if path.is_dir():
        raise ConfigError(f"record={path}: is a folder, must be a file")
    if path.suffix != ".csv":
        raise ConfigError(f"record={path}: must end in .csv")
    if path.exists() and path.stat().st_size and not _is_log(path):
        raise ConfigError(f"record={path}: is there already, and no log that was recorded so")


def _is_log(path: Path) -> bool:
    with path.open("rb") as file:
        return file.readline().strip() == ",".join(COLUMNS).encode()


def write_log(path: Path, requests: pa.Table) -> int:
    """Write the requests that were answered, in order of arrival; returns how many they are."""
    whole = requests.filter(pc.equal(requests["state"].cast(pa.string()), "finished"))
    rows = whole.select([*COLUMNS.values()]).sort_by(COLUMNS["arrived_at"])
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(zip(*(_texts(column) for column in rows.columns), strict=True))
    return rows.num_rows


def _texts(column: pa.ChunkedArray) -> list[str]:
    """Times to a microsecond, everything else as it is."""
    floats = pa.types.is_floating(column.type)
    return [f"{value:.6f}" if floats else str(value) for value in column.to_pylist()]
