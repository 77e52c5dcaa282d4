"""Rows of logs and of tables of measurements, each with its place in the file."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator, Mapping
from math import inf, isfinite, nan
from pathlib import Path
from typing import Any, NamedTuple

from pagedsim.core import ConfigError
from pagedsim.workload.traces.csvfile import Cells, dates, is_date
from pagedsim.workload.traces.jsonlines import parsed
from pagedsim.workload.traces.rows import existing, opened, readable

SEEN = 4096
"""Characters from which the format of a file is recognised."""


class Row(NamedTuple):
    """A row of a file."""

    place: str
    values: Mapping[str, Any]

    def text(self, name: str) -> str:
        value = self.values.get(name)
        return "" if value is None else str(value).strip()

    def number(
        self,
        name: str,
        must: str = "a number",
        *,
        low: float = -inf,
        above: float = -inf,
        high: float = inf,
        whole: bool = False,
    ) -> float:
        """A finite number within the bounds; raises ConfigError that says what it `must` be."""
        value = self.values.get(name)
        try:
            number = nan if isinstance(value, bool) or value is None else float(value)
        except (TypeError, ValueError, OverflowError):  # of whole numbers beyond a float
            number = nan
        within = isfinite(number) and low <= number <= high and number > above
        if not within or (whole and not number.is_integer()):
            raise self.wrong(name, must)
        return number

    def seconds(self, name: str, must: str) -> float:
        """A time: a finite number, or a date, as seconds since some point in time."""
        if is_date(text := self.text(name)):
            return float(dates(Cells(Path(self.place), [0], name, [text]))[0])
        return self.number(name, must)

    def wrong(self, name: str, must: str) -> ConfigError:
        return ConfigError(f"{self.place}: {name}={self.text(name):.60}: must be {must}")


def read_rows(path: str | Path, where: str, what: str = "rows") -> list[Row]:
    """All rows of a CSV, JSON lines or parquet file; at least one.

    Raises ConfigError with the place of an error; `where` is the setting that names the file.
    """
    file = existing(path, where)
    with readable(file):
        rows = list(_rows(file))
    if not rows:
        raise ConfigError(f"{where}={path}: holds no {what}")
    return rows


def _rows(path: Path) -> Iterator[Row]:
    if path.suffix.lower() == ".parquet":
        yield from _of_parquet(path)
        return
    with opened(path) as file:
        begin = file.read(SEEN).lstrip()[:1]
    if begin == "[":
        raise ConfigError(f"{path}: is a JSON list: must be JSON lines, an object each")
    with opened(path) as file:
        if begin == "{":
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _object(path, number, line)
            return
        yield from _of_csv(path, csv.DictReader(file))


def _of_csv(path: Path, table: csv.DictReader[str]) -> Iterator[Row]:
    try:
        names = Counter(table.fieldnames or ())
        if twice := [name for name, count in names.items() if count > 1]:
            what = f"column {twice[0]!r} is there {names[twice[0]]} times: must be there once"
            raise ConfigError(f"{path}:{table.line_num}: {what}")
        for row in table:
            if None in row:
                raise ConfigError(f"{path}:{table.line_num}: has more fields than the header")
            yield Row(f"{path}:{table.line_num}", row)
    except csv.Error as error:
        raise ConfigError(f"{path}:{table.reader.line_num}: is not CSV: {error}") from None


def _of_parquet(path: Path) -> Iterator[Row]:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        rows = parquet.read_table(path).to_pylist()
    except pa.ArrowInvalid as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    yield from (Row(f"{path}, row {number}", row) for number, row in enumerate(rows, 1))


def _object(path: Path, number: int, line: str) -> Row:
    content, place = parsed(path, number, line), f"{path}:{number}"
    if not isinstance(content, dict):
        raise ConfigError(f"{place}: must be an object, one a line")
    return Row(place, content)
