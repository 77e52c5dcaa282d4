"""Traces in CSV: a header, then a row a request."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from pagedsim.workload.traces.rows import Chunk, Format, Options, wrong

CHUNK = 1 << 16
T = TypeVar("T")
Row = list[str]


class CsvFormat(Format):
    """A CSV layout: which columns hold the time and the lengths."""

    def __init__(self, name: str, time: str | None, prompt: str, output: str) -> None:
        self.name = name
        self.time = time
        self.prompt = prompt
        self.output = output

    def seconds(
        self, path: Path, lines: Sequence[int], texts: Sequence[str]
    ) -> NDArray[np.float64]:
        """The times as seconds."""
        assert self.time is not None
        return numbers(path, lines, self.time, texts, float, np.float64)

    def chunks(self, path: Path, options: Options) -> Iterator[Chunk]:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file)
            header = [name.strip() for name in next(reader, [])]
            places = [_place(path, header, self, name) for name in self.needs]
            asked = (options.client_column, options.priority_column)
            labels = [_place(path, header, self, name) if name else None for name in asked]
            filters = {_place(path, header, self, key): v for key, v in options.where.items()}
            for lines, rows in _batches(path, reader, len(header)):
                if filters:
                    kept = [all(row[i] == v for i, v in filters.items()) for row in rows]
                    lines = [line for line, keep in zip(lines, kept, strict=True) if keep]
                    rows = [row for row, keep in zip(rows, kept, strict=True) if keep]
                yield self._chunk(path, lines, rows, places, labels, options)

    def _chunk(
        self,
        path: Path,
        lines: Sequence[int],
        rows: Sequence[Row],
        places: Sequence[int],
        labels: Sequence[int | None],
        options: Options,
    ) -> Chunk:
        texts = [[row[place] for row in rows] for place in places]
        client, priority = ([row[i] for row in rows] if i is not None else None for i in labels)
        return Chunk(
            lines,
            self.seconds(path, lines, texts[0]) if self.time else None,
            numbers(path, lines, self.prompt, texts[-2], int, np.int64),
            numbers(path, lines, self.output, texts[-1], int, np.int64),
            client,
            None
            if priority is None
            else numbers(path, lines, str(options.priority_column), priority, float, np.float64),
        )


def read_header(path: Path) -> list[str]:
    """The names in a CSV file's first line."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        return [name.strip() for name in next(csv.reader(file), [])]


def _place(path: Path, header: Sequence[str], format: Format, name: str) -> int:
    if name in header:
        return header.index(name)
    close = get_close_matches(name, header, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    has = ", ".join(header) or "none"
    raise wrong(path, 1, f"no column {name!r} (format {format.name}): its columns are {has}{hint}")


def _batches(
    path: Path, reader: Iterator[Row], width: int
) -> Iterator[tuple[Sequence[int], list[Row]]]:
    """Rows with their line numbers; lines with nothing on them are left out."""
    first = 2
    try:
        while rows := list(islice(reader, CHUNK)):
            lines: Sequence[int] = range(first, first + len(rows))
            first += len(rows)
            if set(map(len, rows)) != {width}:
                lines = [line for line, row in zip(lines, rows, strict=True) if row]
                rows = [row for row in rows if row]
                for line, row in zip(lines, rows, strict=True):
                    if len(row) != width:
                        what = f"{len(row)} columns: must be {width}, as in the header"
                        raise wrong(path, line, what)
            yield lines, rows
    except csv.Error as error:
        raise wrong(path, first, f"not CSV from here on: {error}") from None


def numbers(
    path: Path,
    lines: Sequence[int],
    column: str,
    texts: Sequence[str],
    kind: type[int] | type[float],
    dtype: type[Any],
) -> NDArray[Any]:
    """A column of numbers; raises ConfigError with the line of the first text that is none."""
    try:
        return np.array(list(map(kind, texts)), dtype)
    except (ValueError, OverflowError):
        parse: Callable[[str], float] = float if kind is float else _tokens
        wanted = "a number" if kind is float else "a whole number of tokens"
        found = each(path, lines, column, texts, parse, wanted)
        return np.array(found, dtype)


def each(
    path: Path,
    lines: Sequence[int],
    column: str,
    texts: Sequence[str],
    parse: Callable[[str], T],
    wanted: str,
) -> list[T]:
    """Parse one by one; raises ConfigError for the first text that is not `wanted`."""
    found = []
    for line, text in zip(lines, texts, strict=True):
        try:
            found.append(parse(text))
        except (ValueError, OverflowError):
            raise wrong(path, line, f"{column}={text!r}: must be {wanted}") from None
    return found


def _tokens(text: str) -> int:
    """A number of tokens; tools that know only floats write 374 as 374.0."""
    value = float(text)
    if not value.is_integer() or abs(value) >= 2**62:
        raise ValueError(text)
    return int(value)
