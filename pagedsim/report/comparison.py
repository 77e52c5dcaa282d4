"""The comparison as rows, for comparison.csv and W&B."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pagedsim.metrics.arms import Arms
from pagedsim.metrics.catalogue import keys_of
from pagedsim.metrics.compare import compare, estimate, groups_of, values_of

COLUMNS = (
    *("client", "metric", "arm", "baseline", "seeds", "ours", "theirs"),
    *("difference", "difference_low", "difference_high", "ratio", "ratio_low", "ratio_high"),
    "sure",
)


def comparison_rows(study: Arms) -> list[list[Any]]:
    """One row per arm, metric and client, against the baseline; None for unknown values."""
    return [
        [
            *(one.client or "all", one.key, one.arm, one.baseline, one.seeds),
            *map(_number, (one.ours, one.theirs, *one.difference, *one.ratio)),
            one.sure,
        ]
        for one in compare(study)
    ]


def write_comparison(study: Arms, path: Path) -> None:
    """Write the rows as CSV; for a single arm, its metrics."""
    if len(study.arms) == 1:
        write_rows(_alone(study), path)
        return
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([COLUMNS, *comparison_rows(study)])


def _alone(study: Arms) -> list[dict[str, object]]:
    (arm,) = study.arms
    rows: list[dict[str, object]] = []
    for client in groups_of(study):
        for key in keys_of(study.metrics):
            values = list(values_of(study, arm, key, client).values())
            row: dict[str, object] = {"client": client or "all", "metric": key, "arm": arm}
            rows.append(row | {"seeds": len(values)} | estimate(values)._asdict())
    return rows


def write_rows(rows: Sequence[Mapping[str, object]], path: Path) -> None:
    """Write rows as CSV; missing and NaN values are empty."""
    columns, cells = columns_of(rows)
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([columns, *cells])


def columns_of(rows: Sequence[Mapping[str, object]]) -> tuple[list[str], list[list[object]]]:
    """The union of the rows' names, and the values of each row; None for missing and NaN values."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    return columns, [[_known(row.get(name)) for name in columns] for row in rows]


def _known(value: object) -> object:
    return None if isinstance(value, float) and math.isnan(value) else value


def _number(value: float) -> float | None:
    return None if math.isnan(value) else float(value)
