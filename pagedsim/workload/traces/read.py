"""Read a slice of a trace file of any format, given or detected, into one set of columns."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import inf
from os.path import isdir
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedsim.core import ConfigError
from pagedsim.core.errors import unknown
from pagedsim.core.request import NO_EXTRA
from pagedsim.workload.traces.agentic import Agentic
from pagedsim.workload.traces.agents import Agents
from pagedsim.workload.traces.csvfile import (
    Azure,
    BurstGPT,
    CsvFormat,
    LengthsOnly,
    OwnTimes,
    Plain,
    names_of,
    read_header,
)
from pagedsim.workload.traces.jsonlines import Bailian, Log, Mooncake, ShareGPT, Turns, VllmLog
from pagedsim.workload.traces.results import RESULTS
from pagedsim.workload.traces.rows import (
    Chunk,
    Format,
    Link,
    Options,
    existing,
    opened,
    readable,
    refuse_bad,
    refuse_unsorted,
    wrong,
)
from pagedsim.workload.traces.sessions import Session, SessionFormat
from pagedsim.workload.traces.timed import OpenTelemetry, TraceLab

# The first of equally good matches is chosen, so formats with more columns come first: `plain`
# before `lengths`, `bailian` before `mooncake`.
FORMATS: Mapping[str, Format] = {
    "azure": Azure(),
    "burstgpt": BurstGPT(),
    "plain": Plain(),
    "lengths": LengthsOnly(),
    "bailian": Bailian(),
    "mooncake": Mooncake(),
    "turns": Turns(),
    "log": Log(),
    "vllm": VllmLog(),
    "sharegpt": ShareGPT(),
    **RESULTS,
}

SESSIONS: Mapping[str, SessionFormat] = {
    kind.name: kind for kind in (Agents(), TraceLab(), OpenTelemetry(), Agentic())
}
"""Formats of whole sessions."""
LIKELY = 0.5
"""The share of a format's columns from which on a file is taken for one that lacks the others."""
_KEY = re.compile(r'"(\w+)":')
NAMES = (".json", ".jsonl", ".json.gz", ".jsonl.gz")
"""How files of sessions are called, of which a folder may be full."""

Paths = str | Path | Sequence[str | Path] | None


def session_files(path: Paths, name: str) -> tuple[list[Path], SessionFormat | None]:
    """The files at a path, of a list of paths or of a folder, and the format of sessions that is
    called `name` or is that of the first; None for a file of requests."""
    several = True
    if path and isdir(str(path)):
        folder = Path(str(path))
        files = sorted(file for file in folder.iterdir() if file.name.endswith(NAMES))
        if not files:
            what = f"is a folder without traces of sessions ({', '.join(NAMES)})"
            raise ConfigError(f"path={path}: {what}")
    else:
        several = path is not None and not isinstance(path, str | Path)
        every: Sequence[Any] = path or [None] if several else [path]  # type: ignore[assignment]
        files = [existing(one) for one in every]
    with readable(files[0]), opened(files[0]) as file:
        head = "" if name != "auto" else file.read(1 << 16).lstrip()
    fitting = [kind for kind in SESSIONS.values() if kind.name == name or kind.fits(head)]
    if several and not fitting:
        what = f"{files[0].name} is no trace of sessions" if name == "auto" else f"format={name}"
        known = f"a folder or several must be of {', '.join(SESSIONS)}"
        raise ConfigError(f"path={path}: {what}: {known}")
    return files, fitting[0] if fitting else None


def read_sessions(
    files: Sequence[Path], kind: SessionFormat, block_tokens: int, markers: str
) -> list[Session]:
    """The sessions of all files, in order."""
    sessions = list[Session]()
    for file in files:
        with readable(file):
            sessions += kind.sessions(file, block_tokens=block_tokens, markers=markers)
    if not sessions:
        raise ConfigError(f"{files[0]}: holds no calls")
    return sessions


def format_of(path: Path, name: str, columns: Mapping[str, str] | None = None) -> Format:
    """The format called `name`, with these columns; `auto` detects it from the file."""
    formats = {
        key: layout.mapped(columns) if columns and isinstance(layout, CsvFormat) else layout
        for key, layout in FORMATS.items()
    }
    if columns and "arrival" in columns:  # of one's own, whichever of the two ways it is named
        formats["plain"] = OwnTimes().mapped(columns)
    if name != "auto":
        if name not in formats:
            raise unknown("format", str(name), [*formats, *SESSIONS, "auto"])
        return formats[name]
    with opened(path) as file:
        head = file.read(1 << 16).lstrip()
    if not head:
        raise ConfigError(f"{path}: the file is empty")
    if columns and "arrival" in columns and not head.startswith(("{", "[")):
        return formats["plain"]
    best = max(formats.values(), key=lambda format: format.fits(head))
    if best.fits(head) >= LIKELY:
        return best  # reading it reports a missing column, if any
    is_table = not head.startswith(("{", "["))
    kinds = (format for format in FORMATS.values() if format.is_table == is_table)
    known = "; ".join(f"{format.name}: {', '.join(format.needs)}" for format in kinds)
    own = "columns.arrival, .prompt and .output name those of another"
    if is_table:
        seen = f"columns {names_of(read_header(path))}"
        raise wrong(path, 1, f"no known format has {seen} ({known}); {own}")
    fields = dict.fromkeys(_KEY.findall(head.partition("\n")[0]))
    raise wrong(path, 1, f"no known format has fields {', '.join(fields):.200} ({known})")


def refuse_ignored(format: Format, options: Options) -> None:
    """Raise ConfigError for an option that the format does not support."""
    for key, value in options.given.items():
        if key not in format.options:
            users = ", ".join(
                sorted(layout.name for layout in FORMATS.values() if key in layout.options)
            )
            key = "columns.extra" if key == "extra" else key
            given = key if callable(value) else f"{key}={value}"
            what = f"{given}: format {format.name} has no use for it"
            raise ConfigError(f"{what}; formats that have: {users}")
    if format.time is None and "arrival" in options.columns:
        raise ConfigError(f"columns.arrival: format {format.name} has no times")


Tokens = NDArray[np.int32]


@dataclass(frozen=True)
class Slice:
    """Rows to read: `window` seconds from `start` on, at most `limit`."""

    start: float = 0.0
    window: float | None = None
    limit: int | None = None

    @property
    def end(self) -> float:
        return inf if self.window is None else self.start + self.window


@dataclass(frozen=True)
class Table:
    """Columns of the slice, in order of arrival."""

    arrival: NDArray[np.float64] | None  # seconds from the start of the slice
    prompt_len: Tokens
    output_len: Tokens
    client: list[str] | None
    priority: NDArray[np.float64] | None
    block_ids: NDArray[np.int64] | None  # of all prompts, concatenated, renumbered from 0
    block_starts: NDArray[np.int64] | None  # offset of each row's blocks, and the end
    block_tokens: int
    links: list[Link] | None
    extra: list[Mapping[str, Any]] | None  # read-only
    dropped: int
    cut: bool
    """Whether `limit` left out rows of the slice."""
    unread: tuple[str, ...] = ()
    """Columns of prompt contents that the format ignores."""


def read_table(
    path: str | Path | None,
    format: str = "auto",
    options: Options | None = None,
    part: Slice | None = None,
    *,
    timed: bool = False,
    drop_empty: bool = False,
    sort: bool = False,
) -> Table:
    """Read a trace up to the end of the slice.

    `timed` refuses a format without times before tokenisation, which can take long.
    """
    file = existing(path)
    with readable(file):
        options = options or Options()
        kind = format_of(file, format, options.columns)
        refuse_ignored(kind, options)
        if timed and kind.time is None:
            raise ConfigError(
                f"{file}: has lengths but no times: set arrivals= (poisson, gamma, fixed, burst, "
                "closed), and rate= in requests/s"
            )
        return _read(file, kind, options, part or Slice(), drop_empty, sort)


def read_lengths(
    path: str | Path | None, prompt_column: str | None = None, output_column: str | None = None
) -> tuple[Tokens, Tokens]:
    """Prompt and output lengths of any trace, or of two columns of a CSV file."""
    file = existing(path, "lengths.path")
    with readable(file):
        if prompt_column is None and output_column is None:
            kind = format_of(file, "auto")
            if "tokenizer" in kind.options:
                raise ConfigError(f"lengths.path={path}: holds text: must be a file of lengths")
        elif prompt_column is None or output_column is None:
            raise ConfigError("lengths: prompt_column and output_column go together")
        else:
            kind = LengthsOnly().mapped({"prompt": prompt_column, "output": output_column})
        table = _read(file, kind, Options(), Slice(), False, True)
    return table.prompt_len, table.output_len


def _read(
    path: Path, format: Format, options: Options, part: Slice, drop_empty: bool, sort: bool
) -> Table:
    if format.time is None and (part.start or part.window is not None):
        raise ConfigError(f"{path}: format {format.name} has no times: start and window need them")
    chunks: list[Chunk] = []
    usable, origin, last = 0, 0.0, -inf
    for chunk in format.chunks(path, options):
        refuse_bad(path, format, chunk, least=0 if drop_empty else 1)
        full = _full(chunk.prompt_len, chunk.output_len)
        if chunk.clock is not None and chunk.arrival is not None and not sort:
            refuse_unsorted(path, format, chunk.clock, last)
            if not chunks and (format.epoch or chunk.clock.dated):
                origin = float(chunk.clock.seconds[0])
            last = float(chunk.clock.seconds[-1])
            full &= chunk.arrival - origin >= part.start
        chunks.append(chunk)
        usable += int(np.count_nonzero(full))
        enough = part.limit is not None and usable >= part.limit
        if not (sort and format.time) and (enough or last - origin >= part.end):
            break
    if not any(len(chunk.lines) for chunk in chunks):
        only = ", ".join(f"{key}={value}" for key, value in options.where.items())
        raise ConfigError(f"{path}: no row has {only}" if only else f"{path}: holds no requests")
    return _select(path, format, chunks, part)


def _select(path: Path, format: Format, chunks: Sequence[Chunk], part: Slice) -> Table:
    prompt = np.concatenate([chunk.prompt_len for chunk in chunks])
    output = np.concatenate([chunk.output_len for chunk in chunks])
    full = _full(prompt, output)
    order = np.arange(len(full))
    arrival = None
    if format.time is not None:
        arrival = np.concatenate([chunk.arrival for chunk in chunks if chunk.arrival is not None])
        order = np.argsort(arrival, kind="stable")
        clocks = [chunk.clock for chunk in chunks if chunk.clock is not None]
        if format.epoch or any(clock.dated for clock in clocks):
            arrival = arrival - min(clock.seconds.min() for clock in clocks)
        inside = (arrival[order] >= part.start) & (arrival[order] < part.end)
        order = order[inside]
    usable = order[full[order]]
    rows = usable[: part.limit]
    if not len(rows):
        span = "" if arrival is None else f", of {arrival.max():g} s"
        raise ConfigError(f"{path}: no request is left of {len(full)} rows{span}")
    # Empty rows after the last selected one do not count as dropped.
    reached = len(order) if len(rows) != part.limit else int(np.flatnonzero(order == rows[-1])[0])
    ids, starts = _blocks(chunks, rows)
    client = [name for chunk in chunks for name in chunk.client or ()]
    links = [link for chunk in chunks for link in chunk.links or ()]
    priority = [chunk.priority for chunk in chunks if chunk.priority is not None]
    return Table(
        arrival=None if arrival is None else arrival[rows] - part.start,
        prompt_len=prompt[rows].astype(np.int32),
        output_len=output[rows].astype(np.int32),
        client=[client[row] for row in rows.tolist()] if client else None,
        priority=np.concatenate(priority)[rows] if priority else None,
        block_ids=ids,
        block_starts=starts,
        block_tokens=chunks[0].block_tokens,
        links=[links[row] for row in rows.tolist()] if links else None,
        extra=_extra(chunks, rows),
        dropped=int(np.count_nonzero(~full[order[:reached]])) + sum(c.failed for c in chunks),
        cut=len(rows) < len(usable),
        unread=chunks[0].unread,
    )


def _full(prompt: NDArray[np.int64], output: NDArray[np.int64]) -> NDArray[np.bool_]:
    return (prompt > 0) & (output > 0)


def _extra(chunks: Sequence[Chunk], rows: NDArray[np.int64]) -> list[Mapping[str, Any]] | None:
    if all(chunk.extra is None for chunk in chunks):
        return None
    every = [extra for chunk in chunks for extra in chunk.extra or [NO_EXTRA] * len(chunk.lines)]
    return [every[row] for row in rows.tolist()]


def _blocks(
    chunks: Sequence[Chunk], rows: NDArray[np.int64]
) -> tuple[NDArray[np.int64] | None, NDArray[np.int64] | None]:
    if chunks[0].blocks is None:
        return None, None
    names = [row for chunk in chunks for row in chunk.blocks or ()]
    chosen = [names[row] for row in rows.tolist()]
    starts = np.zeros(len(chosen) + 1, np.int64)
    np.cumsum([len(row) for row in chosen], out=starts[1:])
    # Ids may be hashes of any size; only equality matters.
    number: dict[int, int] = {}
    ids = (number.setdefault(name, len(number)) for name in chain.from_iterable(chosen))
    return np.fromiter(ids, np.int64, starts[-1]), starts
