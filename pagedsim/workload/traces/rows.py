"""Rows of a trace file as columns, and the checks that every format shares."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedsim.core import ConfigError
from pagedsim.workload.limits import LATEST, LONGEST

Tokenizer = Callable[[str], Sequence[Any] | int]
"""Text to its tokens, or to how many they are."""


@dataclass(frozen=True)
class Clock:
    """The times of consecutive rows, also of those that `where` leaves out."""

    lines: Sequence[int]
    seconds: NDArray[np.float64]


Link = tuple[Hashable, Hashable]
"""What a row is called, and what the row is called that it goes on from: the last such above it."""


@dataclass(frozen=True)
class Chunk:
    """Consecutive rows of a file as columns."""

    lines: Sequence[int]  # of the file, from 1
    clock: Clock | None  # None where the file has no times
    arrival: NDArray[np.float64] | None  # seconds, of these rows alone
    prompt_len: NDArray[np.int64]
    output_len: NDArray[np.int64]
    client: list[str] | None = None
    priority: NDArray[np.float64] | None = None
    blocks: list[list[int]] | None = None  # names of the prompts' blocks
    block_tokens: int = 0  # of each
    links: list[Link] | None = None
    unread: tuple[str, ...] = ()
    """Columns that say which prompts begin alike, and that the format has no use for."""


@dataclass(frozen=True)
class Options:
    """What a reader may be asked for, beyond the rows."""

    where: Mapping[str, str] = field(default_factory=dict)
    client_column: str | None = None
    priority_column: str | None = None
    session_column: str | None = None
    block_tokens: int = 512
    tokenizer: str | Tokenizer | None = None

    @property
    def given(self) -> dict[str, Any]:
        """Those that are not as they are without being set."""
        default = Options()
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return {key: value for key, value in values.items() if value != getattr(default, key)}


class Format(ABC):
    """One kind of trace file."""

    name: str
    time: str | None  # what it calls the arrival, if it has any
    prompt: str
    output: str
    options: tuple[str, ...]  # which of `Options` it has a use for
    epoch = False  # whether times count from some date, so that the first row becomes time 0
    is_table = False  # whether it begins with a line of column names

    @property
    def needs(self) -> tuple[str, ...]:
        """The columns or fields that it must have."""
        names = (self.time, self.prompt, self.output)
        return tuple(name for name in names if name is not None)

    @abstractmethod
    def fits(self, head: str) -> float:
        """How well a file that begins so has this format, from 0, not at all, to 1."""

    @abstractmethod
    def chunks(self, path: Path, options: Options) -> Iterator[Chunk]:
        """The file's rows in order, some thousands at a time."""

    def wrong(self, path: Path, line: int, what: str) -> ConfigError:
        """An error in the row that the format numbers so."""
        return wrong(path, line, what)


def wrong(path: Path, line: int, what: str) -> ConfigError:
    """An error that says where, as editors and terminals link it."""
    return ConfigError(f"{path}:{line}: {what}")


def refuse_bad(path: Path, format: Format, chunk: Chunk, least: int) -> None:
    """Raise ConfigError for lengths below `least` tokens, and for times out of bounds."""
    named = ((format.prompt, chunk.prompt_len), (format.output, chunk.output_len))
    for name, column in named:
        bad = np.flatnonzero((column < least) | (column > LONGEST))
        if len(bad):
            value, line = int(column[bad[0]]), chunk.lines[bad[0]]
            allowed = f"at most {LONGEST}" if value > 0 else f"at least {least}"
            hint = "" if value else " (drop_empty=true leaves such rows out)"
            raise format.wrong(path, line, f"{name}={value}: must be {allowed}{hint}")
    if chunk.clock is not None:
        times, earliest = chunk.clock.seconds, -LATEST if format.epoch else 0.0
        bad = np.flatnonzero((times < earliest) | (times > LATEST))
        if len(bad):
            value, line = times[bad[0]], chunk.clock.lines[bad[0]]
            what = f"{format.time} is {value:g} s: must be from {earliest:g} to {LATEST:g} s"
            raise format.wrong(path, line, what)


def refuse_unsorted(path: Path, format: Format, clock: Clock, last: float) -> None:
    """Raise ConfigError where a time is before that of the row above; `last` is above them all."""
    back = np.flatnonzero(np.diff(clock.seconds, prepend=last) < 0)
    if len(back):
        row = int(back[0])
        late = (clock.seconds[row - 1] if row else last) - clock.seconds[row]
        what = f"{format.time} is {late:g} s before the row above: times must not decrease"
        raise format.wrong(path, clock.lines[row], f"{what} (sort=true puts them in order)")
