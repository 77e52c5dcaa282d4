"""CSV traces: a header, then one row per request; Azure, BurstGPT and the plain layout.

This uses the standard library's reader. pyarrow.csv is three times as fast, but reports rows
instead of lines in its errors (wrong after multi-line cells and empty lines) and does not accept
374.0 as 374 tokens, so every failure would need this reader as a fallback.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from datetime import UTC, datetime
from difflib import get_close_matches
from io import StringIO
from itertools import accumulate, compress, islice
from math import isfinite
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from pagedsim.workload.traces.rows import (
    Chunk,
    Clock,
    Format,
    Options,
    opened,
    unread_contents,
    wrong,
)

CHUNK = 1 << 16
_LINE_END = re.compile(r"\r\n|\r|\n")
T = TypeVar("T")
Row = list[str]


class Cells(NamedTuple):
    """The cells of a column in some rows of a file."""

    path: Path
    lines: Sequence[int]
    name: str
    texts: list[str]

    def parsed(self, parse: Callable[[str], T], wanted: str) -> list[T]:
        """Parse the texts one by one; raises ConfigError for the first that is not as `wanted`."""
        values = []
        for line, text in zip(self.lines, self.texts, strict=True):
            try:
                values.append(parse(text))
            except (ValueError, OverflowError):
                what = f"{self.name}={text!r:.60}: must be {wanted}"
                raise wrong(self.path, line, what) from None
        return values


class CsvFormat(Format):
    """A CSV layout: the columns of the time and the lengths."""

    options = ("where", "columns", "extra")
    is_table = True

    def mapped(self, columns: Mapping[str, str]) -> Self:
        """This layout with other columns of times and lengths, by names of `COLUMNS`."""
        layout = copy(self)
        if self.time is not None:
            layout.time = columns.get("arrival", self.time)
        layout.prompt = columns.get("prompt", self.prompt)
        layout.output = columns.get("output", self.output)
        return layout

    def fits(self, head: str) -> float:
        """Share of the required columns that the header has."""
        try:
            header = next(_headers(csv.reader(StringIO(head, newline=""))), [])
        except csv.Error:
            return 0.0
        names = {name.casefold() for name in header}
        return len(names.intersection(map(str.casefold, self.needs))) / len(self.needs)

    def clock(self, cells: Cells) -> Clock:
        """Times: finite seconds, or dates where the first is one."""
        dated = bool(cells.texts) and is_date(cells.texts[0])
        return Clock(cells.lines, (dates if dated else numbers)(cells), dated)

    def chunks(self, path: Path, options: Options) -> Iterator[Chunk]:
        with opened(path) as file:
            reader = csv.reader(file)
            header = _header(path, reader)
            roles = {"arrival": self.time, "prompt": self.prompt, "output": self.output}
            named = {**roles, **options.columns} if options.columns else {}
            setting = {name: f"columns.{key}: " for key, name in named.items() if name is not None}
            setting |= dict.fromkeys(options.extra.values(), "columns.extra: ")
            places = {
                name: self._place(path, reader.line_num, header, name, setting.get(name, ""))
                for name in (*self.needs, *setting, *options.where)
            }
            for lines, rows in _batches(path, reader, len(header)):
                yield self._chunk(path, lines, rows, places, options)

    def _chunk(
        self,
        path: Path,
        lines: Sequence[int],
        rows: Sequence[Row],
        places: Mapping[str, int],
        options: Options,
    ) -> Chunk:
        clock = arrival = None
        if self.time is not None:
            texts = [row[places[self.time]] for row in rows]
            clock = self.clock(Cells(path, lines, self.time, texts))
            arrival = clock.seconds
        if options.where:
            filters = [(places[name], text) for name, text in options.where.items()]
            kept = [all(row[place] == text for place, text in filters) for row in rows]
            lines, rows = list(compress(lines, kept)), list(compress(rows, kept))
            arrival = None if clock is None else clock.seconds[np.array(kept, bool)]

        def column(name: str) -> Cells:
            place = places[name]
            return Cells(path, lines, name, [row[place] for row in rows])

        client, priority, session = map(options.columns.get, ("client", "priority", "session"))
        return Chunk(
            lines,
            clock,
            arrival,
            tokens(column(self.prompt)),
            tokens(column(self.output)),
            column(client).texts if client else None,
            numbers(column(priority)) if priority else None,
            links=[(name, name) for name in column(session).texts] if session else None,
            extra=_extra({key: places[name] for key, name in options.extra.items()}, rows),
        )

    def _place(self, path: Path, line: int, header: Sequence[str], name: str, setting: str) -> int:
        """The position of a column; `setting` says which setting it is the name of, if any."""
        if name not in header:  # without regard to case
            same = [other for other in header if other.casefold() == name.casefold()]
            name = same[0] if len(set(same)) == 1 else name
        times = header.count(name)
        if times == 1:
            return header.index(name)
        if times:
            what = f"column {name!r} is there {times} times: must be there once"
            raise wrong(path, line, setting + what)
        close = get_close_matches(name, header, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        whose = "" if setting else f" (format {self.name})"
        columns = f"its columns are {names_of(header)}{hint}"
        raise wrong(path, line, f"{setting}no column {name!r}{whose}: {columns}")


def _extra(places: Mapping[str, int], rows: Sequence[Row]) -> list[Mapping[str, Any]] | None:
    """The columns in `places` as one mapping per row; rows with equal texts share an object."""
    if not places:
        return None
    mappings: dict[tuple[str, ...], Mapping[str, Any]] = {}
    extra = []
    for row in rows:
        texts = tuple(row[place] for place in places.values())
        if texts not in mappings:
            mappings[texts] = MappingProxyType(dict(zip(places, texts, strict=True)))
        extra.append(mappings[texts])
    return extra


def read_header(path: Path) -> list[str]:
    """The names in a CSV file's first line."""
    with opened(path) as file:
        return _header(path, csv.reader(file))


def _header(path: Path, reader: Iterator[Row]) -> list[str]:
    try:
        return next(_headers(reader), [])
    except csv.Error as error:
        raise wrong(path, 1, f"not CSV: {error}") from None


def _headers(reader: Iterator[Row]) -> Iterator[list[str]]:
    """Non-empty rows as lists of names; the first is the header."""
    return ([name.strip() for name in row] for row in reader if _filled(row))


def names_of(header: Sequence[str]) -> str:
    """The columns of a header for a message, unprintable names escaped."""
    names = (name if name.isprintable() else repr(name) for name in header)
    text = ", ".join(names) or "none"
    text = text if len(text) <= 200 else f"{text[:200]}..."
    joined = len(header) == 1 and (";" in header[0] or "\t" in header[0])
    return f"{text} (columns must be separated by commas)" if joined else text


def _filled(row: Row) -> bool:
    """Whether the row has a non-blank cell."""
    return any(not cell.isspace() for cell in row if cell)


def _batches(path: Path, reader: Any, width: int) -> Iterator[tuple[Sequence[int], list[Row]]]:
    """Batches of rows with their line numbers, without blank lines."""
    first = reader.line_num + 1
    try:
        while rows := list(islice(reader, CHUNK)):
            lines = _lines(rows, first, reader.line_num)
            first = reader.line_num + 1
            if set(map(len, rows)) != {width}:
                filled = list(map(_filled, rows))
                lines, rows = list(compress(lines, filled)), list(compress(rows, filled))
                for line, row in zip(lines, rows, strict=True):
                    if len(row) != width:
                        what = f"{len(row)} columns: must be {width}, as in the header"
                        raise wrong(path, line, what)
            if rows:
                yield lines, rows
    except csv.Error as error:
        raise wrong(path, reader.line_num, f"not CSV from here on: {error}") from None


def _lines(rows: Sequence[Row], first: int, last: int) -> Sequence[int]:
    """The line number of each row, of rows on lines `first` to `last`."""
    if last - first + 1 == len(rows):
        return range(first, last + 1)
    sizes = (1 + len(_LINE_END.findall(",".join(row))) for row in rows)  # or in quotes
    return list(accumulate(sizes, initial=first))[: len(rows)]


def tokens(cells: Cells) -> NDArray[np.int64]:
    """Parse a column of token counts, 0 for an empty cell; raises ConfigError with the first
    invalid line."""
    try:
        return np.array(list(map(int, _plain(cells.texts))), np.int64)
    except (ValueError, OverflowError):
        return np.array(cells.parsed(_whole, "a whole number of tokens"), np.int64)


def numbers(cells: Cells) -> NDArray[np.float64]:
    """Parse a column of finite numbers; raises ConfigError with the first invalid line.

    >>> numbers(Cells(Path("x.csv"), [2, 3], "arrived_at", ["0", "1e-1"])).tolist()
    [0.0, 0.1]
    """
    try:
        parsed = np.array(list(map(float, _plain(cells.texts))), np.float64)
        if np.isfinite(parsed).all():
            return parsed
    except ValueError:
        pass
    return np.array(cells.parsed(_finite, "a finite number"), np.float64)


def _plain(texts: Sequence[str]) -> Sequence[str]:
    """The texts; raises ValueError for underscores such as 1_000, which only Python accepts."""
    if "_" in "".join(texts):
        raise ValueError("_")
    return texts


def _finite(text: str) -> float:
    value = float(*_plain([text]))
    if not isfinite(value):
        raise ValueError(text)
    return value


def _whole(text: str) -> int:
    """A token count; some tools write 374 as 374.0, and nothing for 0."""
    value = _finite(text.strip() or "0")
    if not value.is_integer() or abs(value) >= 2**62:
        raise ValueError(text)
    return int(value)


class Azure(CsvFormat):
    """Azure's LLM inference traces: TIMESTAMP, ContextTokens, GeneratedTokens.

    https://github.com/Azure/AzurePublicDataset, CC-BY-4.0. Times are dates, in 2023 as
    `2023-11-16 18:15:46.6805900`, in 2024 as `2024-05-10 00:00:00.009930+00:00`; the first row is
    time 0.
    """

    name = "azure"
    time = "TIMESTAMP"
    prompt = "ContextTokens"
    output = "GeneratedTokens"
    epoch = True

    def clock(self, cells: Cells) -> Clock:
        return Clock(cells.lines, dates(cells), dated=True)


def is_date(text: str) -> bool:
    """Whether a text begins as a date with a time does."""
    return _PLAIN.match(text) is not None


def dates(cells: Cells) -> NDArray[np.float64]:
    """Parse a column of dates and times as seconds since one point in time."""
    plain = [text.removesuffix("+00:00") for text in cells.texts]
    try:
        if not all(map(_PLAIN.fullmatch, plain)):
            raise ValueError("a time zone, or no time at all")
        moments = np.array(plain, "datetime64[ns]")
    except ValueError:
        moments = np.array(cells.parsed(_moment, _WANTED), "datetime64[ns]")
    seconds: NDArray[np.float64] = (moments - _ORIGIN) / np.timedelta64(1, "s")
    return seconds


# numpy parses 0 or 2023 as a year, and wraps around years out of the range of its nanoseconds.
_PLAIN = re.compile(r"(1[7-9]|2[01])[0-9]{2}-[0-9]{2}-[0-9]{2}[ T][0-9]{2}:[0-9]{2}:[0-9.]+")

_WANTED = "a date and time of the years 1700 to 2199, as in 2023-11-16 18:15:46.68"

# Close to the traces: seconds since 1970 would leave a float too few digits for their 0.1 µs.
_ORIGIN = np.datetime64("2023-01-01", "ns")


def _moment(text: str) -> datetime:
    if not _PLAIN.match(text):
        raise ValueError(text)
    moment = datetime.fromisoformat(text)
    return moment if moment.tzinfo is None else moment.astimezone(UTC).replace(tzinfo=None)


class BurstGPT(CsvFormat):
    """BurstGPT: Timestamp (s), Model, Request tokens, Response tokens, Total tokens, Log Type.

    https://github.com/HPMLL/BurstGPT, CC-BY-4.0. Its third file adds Session ID and Elapsed time,
    and counts from the start of all three; the first row is time 0. A response of 0 tokens is a
    failed request.
    """

    name = "burstgpt"
    time = "Timestamp"
    prompt = "Request tokens"
    output = "Response tokens"
    epoch = True


class Plain(CsvFormat):
    """The plain CSV layout of simulators: arrived_at (s), num_prefill_tokens, num_decode_tokens.

    Times are kept as they are.
    """

    name = "plain"
    time = "arrived_at"
    prompt = "num_prefill_tokens"
    output = "num_decode_tokens"

    def chunks(self, path: Path, options: Options) -> Iterator[Chunk]:
        unread = unread_contents(read_header(path))
        return (replace(chunk, unread=unread) for chunk in super().chunks(path, options))


class OwnTimes(Plain):
    """The plain CSV layout with arrivals in a column of one's own.

    The first row is time 0, since such times often count from 1970.
    """

    epoch = True


class LengthsOnly(CsvFormat):
    """The plain CSV layout without arrivals."""

    name = "lengths"
    time = None
    prompt = "num_prefill_tokens"
    output = "num_decode_tokens"
