"""Tables of a study, shared by the terminal, the page and W&B; its comparison as rows of a CSV."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pagedsim.metrics.arms import Arms
from pagedsim.metrics.catalogue import keys_of, label_of, metric_of, scale_of
from pagedsim.metrics.compare import (
    Column,
    Comparison,
    Estimate,
    baseline_of,
    column_of,
    compare,
    groups_of,
)
from pagedsim.metrics.result import Listing, Result, Row
from pagedsim.report.numbers import number, signed, span


def tables(result: Result) -> list[Listing]:
    """All tables; the first compares with published numbers."""
    if not result.rows:
        return list(result.listings)
    held = any(row.published is not None for row in result.rows)
    theirs, ours = result.beside
    head = ["", theirs, ours, "difference"] if held else ["", ours]
    rows = [_cells(row) if held else [row.what, number(row.ours, row.unit)] for row in result.rows]
    title = f"{theirs.capitalize()} and {ours}" if held else "Results"
    return [Listing(title, head, rows), *result.listings]


def reasons(result: Result) -> list[str]:
    """Reasons for differences from published numbers, a line each."""
    return [f"{row.what}: {row.why}" for row in result.rows if row.why]


def published_text(row: Row) -> str:
    """The published number, such as "1.3 s", "2 to 3 s" or "up to 15 ×"; a dash without one."""
    if isinstance(row.published, tuple):
        return span(*row.published, row.unit)
    return span(None if row.up_to else row.published, row.published, row.unit)


def _cells(row: Row) -> list[str]:
    close = isinstance(row.published, tuple) and row.difference == 0
    difference = "within" if close else signed(row.difference)
    return [row.what, published_text(row), number(row.ours, row.unit), difference]


@dataclass(frozen=True)
class Cell:
    """One metric of one arm."""

    estimate: Estimate
    text: str
    """The mean over seeds, with its unit."""
    geometric: bool
    """Whether it is a geometric mean."""
    margin: str
    """The confidence interval about the mean, such as "± 3", without a unit; empty where there is
    none."""
    best: bool
    versus: Comparison | None
    """None for the baseline, and if there is nothing to compare."""

    @property
    def change(self) -> str:
        """The change against the baseline, such as "-87 %" or "×4.2"; empty for the baseline.

        Without a ratio it is the difference, such as "+3" or, for a share, "+1.5 pp".
        """
        if self.versus is None:
            return ""
        if self.versus.ours == self.versus.theirs:
            return "same"
        ratio = self.versus.ratio.mean
        if math.isnan(ratio):
            return _difference(self.versus)
        if ratio >= 2:
            return f"×{ratio:.1f}" if ratio < 100 else f"×{ratio:.0f}"
        percent = (ratio - 1) * 100
        if abs(percent) < 0.05:
            return "±0 %"
        digits = 1 if abs(percent) < 10 or -100 < percent < -99 else 0
        return signed(max(ratio - 1, -0.999) if digits else ratio - 1, digits)

    @property
    def marked(self) -> str:
        """The change, in brackets where it is not sure: colours are lost in a pipe and in print."""
        return f"({self.change})" if self.change and self.verdict == "unsure" else self.change

    @property
    def verdict(self) -> str:
        """How to show the change: better, worse, or unsure (also without a better direction)."""
        change = self.versus
        if change is None or change.gain is None or (change.difference.known and not change.sure):
            return "unsure"
        return "better" if change.gain else "worse"


@dataclass(frozen=True)
class Section:
    """The rows of one group of requests."""

    client: str | None
    """None: all requests together."""
    keys: list[str]
    rows: dict[str, dict[str, Cell]]
    """By arm and key."""
    at: str = ""
    """The values of the conditions, if arms are compared within them."""

    @property
    def title(self) -> str:
        whose = "all requests" if self.client is None else self.client or "unnamed client"
        if self.at and self.client is None:
            return self.at
        return f"{self.at}: {whose}" if self.at else whose


def keys_in(parts: Iterable[Section]) -> list[str]:
    """The columns of any of these sections, in the order of the widest."""
    widest = sorted(parts, key=lambda part: -len(part.keys))
    return list(dict.fromkeys(key for part in widest for key in part.keys))


def means_over(study: Arms, parts: Sequence[Section]) -> str:
    """What means a table has, for a note under it."""
    rows = (row for part in parts for row in part.rows.values())
    cells = [(key, cell.geometric) for row in rows for key, cell in row.items()]
    return kinds_of_means(max(len(study.of(arm)) for arm in study.arms), cells)


def kinds_of_means(seeds: int, kinds: Sequence[tuple[str, bool]]) -> str:
    """What means over seeds there are of metrics, by whether they are geometric.

    >>> kinds_of_means(3, [("ttft_mean", True), ("preemptions", False)])
    'Geometric means over 3 seeds (arithmetic where a value is not positive: Preemptions)'
    """
    if seeds == 1:
        return "One seed, no confidence intervals"
    if not any(geometric for _, geometric in kinds):
        return f"Means over {seeds} seeds"
    plain = ", ".join(dict.fromkeys(label_of(key) for key, geometric in kinds if not geometric))
    other = f" (arithmetic where a value is not positive: {plain})" if plain else ""
    return f"Geometric means over {seeds} seeds{other}"


def versus(study: Arms) -> str:
    """What arms are held against, for a note under their table."""
    if not study.variation.conditions:
        return baseline_of(study)
    settings = (setting.rpartition(".")[2] for setting in study.variation.conditions)
    return f"{study.within(study.cells[0]).baseline} at the same {' and '.join(settings)}"


def _difference(comparison: Comparison) -> str:
    difference = comparison.difference.mean
    scale = scale_of(comparison.key, (difference,))
    suffix = scale.suffix.replace("%", "pp")  # "%" would be read as a relative change
    sign = "+" if difference > 0 else "−"
    return f"{sign}{scale.number(abs(difference))} {suffix}".rstrip()


def sections(study: Arms) -> list[Section]:
    """A section for each client, if the study distinguishes several, and one for all requests; so
    for each cell of the conditions."""
    if study.variation.conditions:
        return [
            replace(section, at=study.variation.at(cell))
            for cell in study.cells
            for section in _sections(study.within(cell), study.within(cell).compared)
        ]
    return _sections(study, compared=True)


def _sections(study: Arms, compared: bool) -> list[Section]:
    baseline = baseline_of(study) if compared and study.arms else None
    parts = []
    for client in groups_of(study):
        every = [column_of(study, key, client) for key in keys_of(study.metrics)]
        columns = {column.key: _cells_of(column, baseline) for column in every if column.arms}
        rows = {arm: {key: of[arm] for key, of in columns.items()} for arm in study.arms}
        parts.append(Section(client, list(columns), rows))
    return parts


def _cells_of(column: Column, baseline: str | None) -> dict[str, Cell]:
    """The cells of a column, with changes against the baseline if there is one."""
    values = {arm: column.estimate(arm) for arm in column.values}
    means = [value.mean for value in values.values() if not math.isnan(value.mean)]
    scale = scale_of(column.key, means)
    way = metric_of(column.key).better
    texts = {scale.text(mean) for mean in means}
    # Values that print as equal are marked alike.
    best = scale.text((max if way > 0 else min)(means)) if way and len(texts) > 1 else None
    return {
        arm: Cell(
            value,
            scale.text(value.mean),
            column.geometric,
            margin_of(value, scale.number),
            scale.text(value.mean) == best,
            None if baseline in (None, arm) else column.compare(arm, str(baseline)),
        )
        for arm, value in values.items()
    }


def margin_of(value: Estimate, number: Callable[[float], str]) -> str:
    """How far the interval about a mean reaches, such as "± 3" or "− 2 + 5"; empty without one."""
    if not value.known:
        return ""
    below, above = map(number, value.sides)
    return f"± {above}" if below == above else f"− {below} + {above}"


_AVERAGE = {True: "geometric", False: "arithmetic"}
"""What kind of means over seeds a row has."""
_OF_A_CHANGE = (
    *("client", "metric", "arm", "baseline", "seeds", "average", "ours", "theirs"),
    *("difference", "difference_low", "difference_high", "ratio", "ratio_low", "ratio_high"),
    "sure",
)


Columns = tuple[Sequence[str], list[list[Any]]]
"""The names of columns, and the rows; None for missing and NaN values."""


def comparison_of(study: Arms) -> Columns:
    """A row per arm, metric and client, against the baseline, with a column for each setting that
    arms vary; of a single arm, its metrics."""
    if len(study.arms) == 1:
        return columns_of(_alone(study))
    settings = study.variation.settings
    rows = [
        [
            *(change.client or "all", change.key, change.arm, change.baseline, change.seeds),
            _AVERAGE[change.geometric],
            *map(_known, (change.ours, change.theirs, *change.difference, *change.ratio)),
            change.sure,
            *(study.variation.values[change.arm].get(setting) for setting in settings),
        ]
        for change in compare(study)
    ]
    return [*_OF_A_CHANGE, *settings], rows


def _alone(study: Arms) -> list[dict[str, object]]:
    (arm,) = study.arms
    rows: list[dict[str, object]] = []
    for client in groups_of(study):
        for key in keys_of(study.metrics):
            column = column_of(study, key, client)
            row: dict[str, object] = {"client": client or "all", "metric": key, "arm": arm}
            row |= {"seeds": len(column.of(arm)), "average": _AVERAGE[column.geometric]}
            rows.append(row | column.estimate(arm)._asdict())
    return rows


def columns_of(rows: Sequence[Mapping[str, object]]) -> Columns:
    """The union of the rows' names, and the values of each row."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    return columns, [[_known(row.get(name)) for name in columns] for row in rows]


def _known(value: object) -> object:
    return None if isinstance(value, float) and math.isnan(value) else value


def write_columns(table: Columns, path: Path) -> None:
    """Write as CSV; missing values are empty."""
    columns, rows = table
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([columns, *rows])
