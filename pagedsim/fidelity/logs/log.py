"""Request logs of external servers: arrival and answer times, prompt contents, and recording.

A log may state which prompts share their beginning, for a server with a prefix cache: `prefix_id`
with `prefix_tokens`, `hash_ids` of blocks as in Mooncake's traces, `prompt_token_ids`, or
`cached_tokens`, the server's own cache hits. Without any of these all prompts are different.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pagedsim.core import ConfigError
from pagedsim.core.errors import shown, unknown
from pagedsim.fidelity.rows import Row, read_rows
from pagedsim.workload.limits import LONGEST
from pagedsim.workload.tokens import BlockPrompts, PrefixedPrompts, Prompts
from pagedsim.workload.traces.results import RESULTS
from pagedsim.workload.traces.rows import CONTENTS, existing, opened, readable

Column = NDArray[np.float64]
Rows = Sequence[Row]


class Layout(NamedTuple):
    """What a log calls its columns; where two are named, either will do."""

    arrived: str
    prompt: str
    output: str
    first: tuple[str, ...]
    last: tuple[str, ...]
    queued: str | None = None
    """Where the server's own clock is another than that of the arrivals."""
    scheduled: str | None = None
    """When it was first in a step, by that clock."""
    client: str = "client"
    """The client of the request, where the log has it."""


PLAIN = Layout(
    arrived="arrived_at",
    prompt="num_prefill_tokens",
    output="num_decode_tokens",
    first=("first_token_at", "ttft"),
    last=("finished_at", "e2e"),
)
VLLM = Layout(
    arrived="arrival_time",
    prompt="input_toks",
    output="output_toks",
    first=("first_token_ts",),
    last=("last_token_ts",),
    queued="queued_ts",
    scheduled="scheduled_ts",
)
"""What vLLM keeps of each request."""

SPANS = ("ttft", "e2e")
"""Columns that count from the request's arrival."""
SLOWEST = 2.0
"""Bound of the median time per output token, in seconds; larger values are refused."""
QUEUE = "queue"
"""The column of a plain log with each request's time in the server's queue."""


@dataclass(frozen=True)
class Latencies:
    """Latencies of requests in one order, in seconds; NaN if there is none."""

    ttft: Column
    e2e: Column
    output: NDArray[np.int64]
    queue: Column | None = None
    """From the scheduler's receipt to the first step; None where the log does not have it."""

    @property
    def tpot(self) -> Column:
        """Mean time per output token after the first; NaN for answers of one token."""
        gaps = np.where(self.output > 1, self.output - 1, np.nan)
        return (self.e2e - self.ttft) / gaps


@dataclass(frozen=True)
class Log:
    """The requests of a log in order of arrival; the first arrives at 0."""

    path: Path
    places: Sequence[str]
    """The place of each request in the file."""
    arrived: Column
    prompt: NDArray[np.int64]
    latencies: Latencies
    client: Sequence[str]
    """The client of each request; "" where the log does not say."""
    contents: Prompts | None = None
    """Contents of the prompts; None if the log has none and all prompts differ."""
    failed: int = 0
    """Requests without an answer, which are left out."""

    @property
    def output(self) -> NDArray[np.int64]:
        return self.latencies.output

    def __len__(self) -> int:
        return len(self.places)


LAYOUTS: Mapping[str, Layout] = {"plain": PLAIN, "vllm": VLLM}
COLUMNS: Mapping[str, str] = {
    **{"arrival": PLAIN.arrived, "prompt": PLAIN.prompt, "output": PLAIN.output},
    **{name: name for name in (*PLAIN.first, *PLAIN.last, QUEUE, PLAIN.client)},
}
"""What `columns` may name in a file: the columns of a plain log, three as a trace has them."""


def read_log(
    path: str | Path, format: str = "auto", columns: Mapping[str, str] | None = None
) -> Log:
    """Read a log in CSV, JSON lines or parquet, or the results of a load generator.

    `format` is one of `LAYOUTS` or `RESULTS`, or auto to detect it; `columns` says what a plain log
    calls its columns. Raises ConfigError with the place of an error.
    """
    file = existing(path, "requests")
    if format not in (known := ("auto", *LAYOUTS, *RESULTS)):
        raise unknown("format", str(format), known)
    named = _columns(columns)
    kind = RESULTS.get(format)
    if format == "auto" and not named and file.suffix.lower() != ".parquet":
        with readable(file), opened(file) as text:
            head = text.read(1 << 16).lstrip()
        kind = max(RESULTS.values(), key=lambda one: one.fits(head))
        kind = kind if kind.fits(head) else None
    if kind is None:
        rows = _renamed(read_rows(path, "requests", "requests"), named)
        log = _log(file, _layout(rows[0], "plain" if named else format), rows)
    else:
        with readable(file):
            answered, failed = kind.answered(file)
        if not answered:
            raise ConfigError(f"{file}: none of its {failed} requests was answered")
        log = replace(_log(file, PLAIN, [Row(*row) for row in answered]), failed=failed)
    gaps = log.latencies.tpot
    gap = float(np.nanmedian(gaps)) if np.isfinite(gaps).any() else 0.0
    if gap > SLOWEST:
        raise ConfigError(
            f"{log.path}: half of its answers take {gap:.3g} s a token and more: times must be in "
            "seconds, and these look like milliseconds"
        )
    return log


def _columns(columns: Mapping[str, Any] | None) -> dict[str, str]:
    """The columns of a plain log by what a file calls them."""
    if not isinstance(columns or {}, Mapping):
        raise ConfigError(f"columns={shown(columns)}: must be a mapping of {', '.join(COLUMNS)}")
    for key in columns or {}:
        if key not in COLUMNS:
            raise unknown("columns", str(key), COLUMNS)
    return {str(name): COLUMNS[key] for key, name in (columns or {}).items() if name is not None}


def _renamed(rows: Rows, columns: Mapping[str, str]) -> list[Row]:
    """The rows with the names of `columns`, and with known names without regard to case."""
    if absent := [name for name in columns if name not in rows[0].values]:
        raise _missing(rows, absent[0])
    given = rows[0].values
    names = {name: name for name in given}
    for name in _NAMES:
        same = [other for other in given if other.casefold() == name]
        if name not in given and len(same) == 1:
            names[same[0]] = name
    names |= columns
    return [
        Row(place, {names.get(name, name): value for name, value in values.items()})
        for place, values in rows
    ]


def _layout(row: Row, format: str) -> Layout:
    """The layout called `format`, or the one whose lengths and arrivals a row has."""
    for layout in LAYOUTS.values() if format == "auto" else ():
        if row.values.keys() & {layout.arrived, layout.prompt, layout.output}:
            return layout  # reading it reports a missing column
    if format != "auto":
        return LAYOUTS[format]
    kinds: list[tuple[str, ...]] = [
        (name, of.arrived, of.prompt, of.output) for name, of in LAYOUTS.items()
    ]
    kinds += [(name, *kind.seen) for name, kind in RESULTS.items()]
    known = "; ".join(f"{name}: {', '.join(has)}" for name, *has in kinds)
    columns = ", ".join(map(str, row.values))
    raise ConfigError(
        f"{row.place}: no known format has {columns:.200} ({known}); study.columns.arrival, "
        ".prompt, .output, .ttft and .e2e name those of another"
    )


def _log(path: Path, layout: Layout, rows: Rows) -> Log:
    arrived = _column(rows, layout.arrived)
    ends = []
    for names in (layout.first, layout.last):
        name = next((name for name in names if name in rows[0].values), None)
        if name is None:
            raise _missing(rows, " or ".join(names))
        ends.append(_column(rows, name) + (arrived if name in SPANS else 0.0))
    first, last = ends
    if layout.queued is not None:
        # No request is queued before it arrives, so the shortest wait between the two is taken for
        # none: that lays the server's clock over the clients'.
        shift = float((arrived - _column(rows, layout.queued)).max())
        first, last = first + shift, last + shift
    prompt, output = (_tokens(rows, name) for name in (layout.prompt, layout.output))
    for row, come, start, ended in zip(rows, arrived, first, last, strict=True):
        if not come < start <= ended:
            raise ConfigError(
                f"{row.place}: arrives at {come:g}, has its first token at {start:g} and its last "
                f"at {ended:g} s: must come in this order"
            )
    order = np.argsort(arrived, kind="stable")
    queue = _queue(layout, rows)
    ordered = [rows[row] for row in order.tolist()]
    latencies = Latencies(
        (first - arrived)[order],
        (last - arrived)[order],
        output[order],
        None if queue is None else queue[order],
    )
    return Log(
        path,
        [row.place for row in ordered],
        (arrived - arrived.min())[order],
        prompt[order],
        latencies,
        [row.text(layout.client) for row in ordered],
        contents_of(ordered, prompt[order]),
    )


def _queue(layout: Layout, rows: Rows) -> Column | None:
    """Seconds in the server's queue, where the log has them."""
    name = layout.scheduled or QUEUE
    if name not in rows[0].values:
        return None
    queue = _column(rows, name)
    if layout.queued is not None:
        queue = queue - _column(rows, layout.queued)
    if (queue < 0).any():
        row, seconds = rows[int(queue.argmin())], queue.min()
        raise ConfigError(
            f"{row.place}: {name}={row.text(name)}: the request is {seconds:g} s in the queue: "
            "must be 0 or more"
        )
    return queue


def _column(rows: Rows, name: str) -> Column:
    if name not in rows[0].values:
        raise _missing(rows, name)
    must = "a number (requests that were not answered must be left out)"
    return np.array([row.seconds(name, must) for row in rows])


def _missing(rows: Rows, name: str) -> ConfigError:
    columns = ", ".join(map(str, rows[0].values))
    return ConfigError(f"{rows[0].place}: has no {name}, only {columns:.200}")


def _tokens(rows: Rows, name: str) -> NDArray[np.int64]:
    if name not in rows[0].values:
        raise _missing(rows, name)
    must = f"a whole number of tokens from 1 to {LONGEST}"
    return np.array([int(row.number(name, must, low=1, high=LONGEST, whole=True)) for row in rows])


_NAMES = sorted(
    {name for of in LAYOUTS.values() for name in (*of.first, *of.last, of.arrived, of.prompt)}
    | {name for of in LAYOUTS.values() for name in (of.output, of.queued, of.scheduled) if name}
    | {"client", QUEUE, "prefix_tokens", *CONTENTS}
)
"""All names of columns."""

# -- contents of prompts ---------------------------------------------------------------------------

PREFIX, HASHES, IDS, CACHED = CONTENTS
PREFIX_TOKENS = "prefix_tokens"
STATED = f"{PREFIX} with {PREFIX_TOKENS}, {HASHES}, {IDS} or {CACHED}"
"""The columns that state shared beginnings of prompts."""
BLOCKS = tuple(1 << power for power in range(12, -1, -1))
"""Tokens that a hash id may stand for, larger ones first: of several that fit, the largest."""


def contents_of(rows: Rows, prompt: NDArray[np.int64]) -> Prompts | None:
    """Contents of prompts of these lengths by the columns of a log; None without such columns.

    Raises ConfigError with the place of an error.
    """
    place, values = rows[0]
    stated = [name for name in CONTENTS if name in values]
    if len(stated) > 1:
        raise ConfigError(f"{place}: has {' and '.join(stated)}: must have one of them")
    if not stated:
        return None
    if stated == [PREFIX]:
        return _prefixed(rows, prompt)
    if stated == [CACHED]:
        shared = _lengths(rows, CACHED, prompt)
        return PrefixedPrompts(np.where(shared > 0, 0, -1), shared, _narrow(prompt))
    ids = [_integers(row, stated[0]) for row in rows]
    return _of_blocks(rows, ids, prompt) if stated == [HASHES] else _of_tokens(rows, ids, prompt)


def _prefixed(rows: Rows, prompt: NDArray[np.int64]) -> Prompts:
    """Rows of one `prefix_id` share their first `prefix_tokens`; rows without an id share
    nothing."""
    if PREFIX_TOKENS not in rows[0].values:
        raise ConfigError(f"{rows[0].place}: has {PREFIX} without {PREFIX_TOKENS}: needs both")
    number: dict[str, int] = {}
    names = [row.text(PREFIX) for row in rows]
    which = np.array(
        [number.setdefault(name, len(number)) if name else -1 for name in names], np.int32
    )
    shared = _lengths(rows, PREFIX_TOKENS, prompt, needed=[bool(name) for name in names])
    return PrefixedPrompts(which, shared, _narrow(prompt))


def _of_tokens(rows: Rows, ids: Sequence[Sequence[int]], prompt: NDArray[np.int64]) -> Prompts:
    for row, tokens, length in zip(rows, ids, prompt.tolist(), strict=True):
        if len(tokens) != length:
            count = len(tokens)
            raise ConfigError(f"{row.place}: {IDS} has {count} tokens, and the prompt {length}")
    return _named(ids, prompt, 1)


def _of_blocks(rows: Rows, ids: Sequence[Sequence[int]], prompt: NDArray[np.int64]) -> Prompts:
    counts = np.array([len(tokens) for tokens in ids])
    block = next((size for size in BLOCKS if (-(-prompt // size) == counts).all()), None)
    if block is None:
        raise ConfigError(
            f"{rows[0].place}: {HASHES} has {len(ids[0])} blocks for {prompt[0]} tokens: must have "
            "as many as the prompt has blocks of one size, the same in all rows, such as 16 or 512"
        )
    return _named(ids, prompt, block)


def _named(ids: Sequence[Sequence[int]], prompt: NDArray[np.int64], size: int) -> Prompts:
    """Prompts by the names of their blocks of `size` tokens."""
    number: dict[int, int] = {}
    flat = np.array([number.setdefault(name, len(number)) for tokens in ids for name in tokens])
    starts = np.concatenate([[0], np.cumsum([len(tokens) for tokens in ids])])
    return BlockPrompts(flat, starts, _narrow(prompt), size)


def _narrow(lengths: NDArray[np.int64]) -> NDArray[np.int32]:
    return lengths.astype(np.int32)


def _lengths(
    rows: Rows, name: str, prompt: NDArray[np.int64], needed: Sequence[bool] | None = None
) -> NDArray[np.int32]:
    """Tokens at the beginning of each prompt; none where the row may leave them out."""
    lengths = np.zeros(len(rows), np.int32)
    for at, (row, most) in enumerate(zip(rows, prompt.tolist(), strict=True)):
        if row.text(name) or (needed is not None and needed[at]):
            must = f"a whole number from 0 to the {most} tokens of the prompt"
            lengths[at] = row.number(name, must, low=0, high=most, whole=True)
    return lengths


def _integers(row: Row, name: str) -> list[int]:
    """A list of whole numbers: a list, JSON, or text separated by spaces."""
    value = row.values.get(name)
    if isinstance(value, str):
        text = value.strip()
        try:
            value = json.loads(text) if text[:1] == "[" else [int(word) for word in text.split()]
        except (ValueError, RecursionError):
            value = None
    if not (isinstance(value, list) and all(type(number) is int for number in value)):
        raise row.wrong(name, "a list of whole numbers")
    return value


# -- recording -------------------------------------------------------------------------------------

RECORDED = {
    "arrived_at": "sent",
    "num_prefill_tokens": "prompt_tokens",
    "num_decode_tokens": "output_tokens",
    "first_token_at": "first_token",
    "finished_at": "finished",
    "client": "client",
}
"""Those of a log, and of the recorded requests: what the server saw arrive is what was sent."""


def check_log(path: Path) -> None:
    """Raise ConfigError if `write_log` could not write to the path, or would overwrite another
    file."""
    if not path.parent.is_dir():
        raise ConfigError(f"record={path}: there is no folder {path.parent}")
    if path.is_dir():
        raise ConfigError(f"record={path}: is a folder, must be a file")
    if path.suffix != ".csv":
        raise ConfigError(f"record={path}: must end in .csv")
    if path.exists() and path.stat().st_size:
        with path.open("rb") as file:
            if file.readline().strip() != ",".join(RECORDED).encode():
                raise ConfigError(
                    f"record={path}: is there already, and no log that was recorded so"
                )


def write_log(path: Path, requests: pa.Table) -> int:
    """Write the requests that were answered, in order of arrival; returns their number."""
    whole = requests.filter(pc.equal(requests["state"].cast(pa.string()), "finished"))
    rows = whole.select([*RECORDED.values()]).sort_by(RECORDED["arrived_at"])
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(RECORDED)
        writer.writerows(zip(*(_texts(column) for column in rows.columns), strict=True))
    return rows.num_rows


def _texts(column: pa.ChunkedArray) -> list[str]:
    """Values as texts, times to a microsecond."""
    floats = pa.types.is_floating(column.type)
    return [f"{value:.6f}" if floats else str(value) for value in column.to_pylist()]
