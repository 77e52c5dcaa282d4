"""Request logs of external servers: arrival and answer times, prompt contents, and recording.

A log may state which prompts begin alike, for a server with a prefix cache: `prefix_id` with
`prefix_tokens`, `hash_ids` of blocks as in Mooncake's traces, `prompt_token_ids`, or
`cached_tokens`, the server's own cache hits. Without any of these all prompts are different.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pagedsim.core import ConfigError
from pagedsim.workload.limits import LONGEST
from pagedsim.workload.tokens import BlockPrompts, PrefixedPrompts, Prompts
from pagedsim.workload.traces.rows import CONTENTS, file_at, opened, readable

Column = NDArray[np.float64]
Row = Mapping[str, Any]
Rows = Sequence[tuple[str, Row]]
"""Each row after the place where it stands."""
Contents = Sequence[Sequence[int]] | Prompts
"""By row, each prompt's tokens, or runs that are equal exactly where the tokens are."""


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

SEEN = 4096
"""Characters that tell what a file is."""
SPANS = ("ttft", "e2e")
"""Columns that count from the request's arrival."""
SLOWEST = 2.0
"""Seconds that the tokens of half of the answers may take."""
QUEUE = "queue"
"""The column of a plain log that says how long each request was in the server's queue."""


@dataclass(frozen=True)
class Latencies:
    """Of requests in one order, in seconds; NaN where there is none, or not yet."""

    ttft: Column
    e2e: Column
    output: NDArray[np.int64]
    queue: Column | None = None
    """From the scheduler's receipt to the first step; None where the log does not have it."""

    @property
    def without_queue(self) -> Latencies:
        """The same as a log tells it that does not say when requests were first in a step."""
        return Latencies(self.ttft, self.e2e, self.output)

    @property
    def tpot(self) -> Column:
        """The mean gap between tokens; an answer of one token has none."""
        gaps = np.where(self.output > 1, self.output - 1, np.nan)
        return (self.e2e - self.ttft) / gaps


@dataclass(frozen=True)
class Log:
    """Its requests in order of arrival; the first comes at 0."""

    path: Path
    places: Sequence[str]
    """Where each request stands in it."""
    arrived: Column
    prompt: NDArray[np.int64]
    latencies: Latencies
    client: Sequence[str]
    """The client of each request; "" where the log does not say."""
    contents: Contents | None = None
    """What is in each prompt; None where the log does not say, and all are unlike."""

    @property
    def output(self) -> NDArray[np.int64]:
        return self.latencies.output

    def __len__(self) -> int:
        return len(self.places)


def read_log(path: str | Path) -> Log:
    """A log in CSV, JSON lines or parquet; raises ConfigError with the place of what is wrong."""
    file = file_at(path, "requests")
    with readable(file):
        rows = list(_rows(file))
    if not rows:
        raise ConfigError(f"requests={path}: holds no requests")
    layout = VLLM if VLLM.arrived in rows[0][1] else PLAIN
    log = _log(file, layout, rows)
    gaps = log.latencies.tpot
    gap = float(np.nanmedian(gaps)) if np.isfinite(gaps).any() else 0.0
    if gap > SLOWEST:
        raise ConfigError(
            f"{log.path}: half of its answers take {gap:.3g} s a token and more: times must be in "
            "seconds, and these look like milliseconds"
        )
    return log


def _rows(path: Path) -> Iterator[tuple[str, Row]]:
    if path.suffix.lower() == ".parquet":
        from pyarrow import parquet

        try:
            rows = parquet.read_table(path).to_pylist()
        except pa.ArrowInvalid as error:
            raise ConfigError(f"{path}: cannot be read: {error}") from error
        yield from ((f"{path}, row {number}", row) for number, row in enumerate(rows, 1))
        return
    with opened(path) as file:
        begin = file.read(SEEN).lstrip()[:1]
    if begin == "[":
        raise ConfigError(f"{path}: is a JSON list: must be JSON lines, an object each")
    with opened(path) as file:
        if begin == "{":
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield f"{path}:{number}", _object(f"{path}:{number}", line)
            return
        table = csv.DictReader(file)
        for row in table:
            if None in row:
                raise ConfigError(f"{path}:{table.line_num}: has more fields than the header")
            yield f"{path}:{table.line_num}", row


def _object(where: str, line: str) -> Row:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{where}: must be an object, one a line")
    return found


def _log(path: Path, layout: Layout, rows: Rows) -> Log:
    arrived = _column(rows, layout.arrived)
    ends = []
    for names in (layout.first, layout.last):
        name = next((name for name in names if name in rows[0][1]), None)
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
    for (where, _), come, begun, ended in zip(rows, arrived, first, last, strict=True):
        if not come < begun <= ended:
            raise ConfigError(
                f"{where}: arrives at {come:g}, has its first token at {begun:g} and its last at "
                f"{ended:g} s: must come in this order"
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
        [where for where, _ in ordered],
        (arrived - arrived.min())[order],
        prompt[order],
        latencies,
        [_text(row.get(layout.client)) for _, row in ordered],
        contents_of(ordered, prompt[order]),
    )


def _queue(layout: Layout, rows: Rows) -> Column | None:
    """Seconds in the server's queue, where the log has them."""
    name = layout.scheduled or QUEUE
    if name not in rows[0][1]:
        return None
    queue = _column(rows, name)
    if layout.queued is not None:
        queue = queue - _column(rows, layout.queued)
    if (queue < 0).any():
        at = int(queue.argmin())
        raise ConfigError(
            f"{rows[at][0]}: {name}={rows[at][1][name]}: the request is {queue[at]:g} s in the "
            "queue: must be 0 or more"
        )
    return queue


def _column(rows: Rows, name: str) -> Column:
    if name not in rows[0][1]:
        raise _missing(rows, name)
    return np.array([_number(where, name, row.get(name)) for where, row in rows])


def _missing(rows: Rows, name: str) -> ConfigError:
    where, row = rows[0]
    return ConfigError(f"{where}: has no {name}, only {', '.join(map(str, row)):.200}")


def _number(where: str, name: str, value: Any) -> float:
    try:
        number = float("nan" if isinstance(value, bool) else value)
    except (TypeError, ValueError):
        number = float("nan")
    if not isfinite(number):
        raise ConfigError(
            f"{where}: {name}={value!r:.60}: must be a number (requests that were not answered "
            "must be left out)"
        )
    return number


def _text(value: Any) -> str:
    return "" if value is None else str(value).strip()


def _tokens(rows: Rows, name: str) -> NDArray[np.int64]:
    column = _column(rows, name)
    for (where, row), value in zip(rows, column, strict=True):
        if not (1 <= value <= LONGEST and value.is_integer()):
            allowed = f"a whole number of tokens from 1 to {LONGEST}"
            raise ConfigError(f"{where}: {name}={row[name]}: must be {allowed}")
    return column.astype(np.int64)


# -- contents of prompts ---------------------------------------------------------------------------

PREFIX, HASHES, IDS, CACHED = CONTENTS
PREFIX_TOKENS = "prefix_tokens"
STATED = f"{PREFIX} with {PREFIX_TOKENS}, {HASHES}, {IDS} or {CACHED}"
"""The columns that say which prompts begin alike."""
BLOCKS = tuple(1 << power for power in range(12, -1, -1))
"""Tokens that a hash id may stand for, the most likely where several fit being the largest."""


def contents_of(rows: Rows, prompt: NDArray[np.int64]) -> Contents | None:
    """What the rows say of prompts of these lengths; None where they say nothing.

    Raises ConfigError with the place of what is wrong.
    """
    there = [name for name in CONTENTS if name in rows[0][1]]
    if len(there) > 1:
        raise ConfigError(f"{rows[0][0]}: has {' and '.join(there)}: must have one of them")
    if not there:
        return None
    if there == [PREFIX]:
        return _prefixed(rows, prompt)
    if there == [CACHED]:
        shared = _lengths(rows, CACHED, prompt)
        return PrefixedPrompts(np.where(shared > 0, 0, -1), shared, _narrow(prompt))
    if there == [HASHES]:
        return _hashed(rows, prompt)
    found = [_integers(where, IDS, row[IDS]) for where, row in rows]
    for (where, _), ids, length in zip(rows, found, prompt.tolist(), strict=True):
        if len(ids) != length:
            raise ConfigError(f"{where}: {IDS} has {len(ids)} tokens, and the prompt {length}")
    return found


def _prefixed(rows: Rows, prompt: NDArray[np.int64]) -> Contents:
    """Rows of one `prefix_id` share their first `prefix_tokens`; those without one share none."""
    if PREFIX_TOKENS not in rows[0][1]:
        raise ConfigError(f"{rows[0][0]}: has {PREFIX} without {PREFIX_TOKENS}: needs both")
    number: dict[str, int] = {}
    names = [_text(row[PREFIX]) for _, row in rows]
    which = np.array(
        [number.setdefault(name, len(number)) if name else -1 for name in names], np.int32
    )
    shared = _lengths(rows, PREFIX_TOKENS, prompt, empty=[not name for name in names])
    return PrefixedPrompts(which, shared, _narrow(prompt))


def _hashed(rows: Rows, prompt: NDArray[np.int64]) -> Contents:
    ids = [_integers(where, HASHES, row[HASHES]) for where, row in rows]
    counts = np.array([len(each) for each in ids])
    block = next((size for size in BLOCKS if (-(-prompt // size) == counts).all()), None)
    if block is None:
        raise ConfigError(
            f"{rows[0][0]}: {HASHES} has {len(ids[0])} blocks for {prompt[0]} tokens: must have as "
            "many as the prompt has blocks of one size, the same in all rows, such as 16 or 512"
        )
    number: dict[int, int] = {}
    flat = np.array([number.setdefault(name, len(number)) for each in ids for name in each])
    starts = np.concatenate([[0], np.cumsum(counts)])
    return BlockPrompts(flat, starts, _narrow(prompt), block)


def _narrow(lengths: NDArray[np.int64]) -> NDArray[np.int32]:
    return lengths.astype(np.int32)


def _lengths(
    rows: Rows, name: str, prompt: NDArray[np.int64], empty: Sequence[bool] | None = None
) -> NDArray[np.int32]:
    """Tokens at the beginning of each prompt; none where the row may leave them out."""
    found = np.zeros(len(rows), np.int32)
    for at, (where, row) in enumerate(rows):
        text = row.get(name)
        if (text is None or text == "") and (empty is None or empty[at]):
            continue
        try:
            value = float("nan" if isinstance(text, bool) or text is None else text)
        except (TypeError, ValueError):
            value = float("nan")
        if not (0 <= value <= prompt[at] and value.is_integer()):
            raise ConfigError(
                f"{where}: {name}={text!r:.60}: must be a whole number from 0 to the "
                f"{prompt[at]} tokens of the prompt"
            )
        found[at] = int(value)
    return found


def _integers(where: str, name: str, value: Any) -> list[int]:
    """A list of whole numbers, as such or in JSON, or separated by spaces."""
    if isinstance(value, str):
        text = value.strip()
        try:
            value = json.loads(text) if text[:1] == "[" else [int(one) for one in text.split()]
        except ValueError:
            value = text
    whole = isinstance(value, list) and all(type(one) is int for one in value)
    if not whole:
        raise ConfigError(f"{where}: {name}={value!r:.60}: must be a list of whole numbers")
    found: list[int] = value
    return found


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
    """Raise ConfigError where `write_log` could not write, or would write over something else."""
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
    """Write the requests that were answered, in order of arrival; returns how many they are."""
    whole = requests.filter(pc.equal(requests["state"].cast(pa.string()), "finished"))
    rows = whole.select([*RECORDED.values()]).sort_by(RECORDED["arrived_at"])
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(RECORDED)
        writer.writerows(zip(*(_texts(column) for column in rows.columns), strict=True))
    return rows.num_rows


def _texts(column: pa.ChunkedArray) -> list[str]:
    """Times to a microsecond, everything else as it is."""
    floats = pa.types.is_floating(column.type)
    return [f"{value:.6f}" if floats else str(value) for value in column.to_pylist()]
