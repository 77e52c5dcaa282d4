"""Trace files: opening (plain or gzip), chunks of rows as columns, and shared validation."""

from __future__ import annotations

import gzip
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from pagedsim.core import ConfigError
from pagedsim.workload.limits import LATEST, LONGEST


def existing(path: str | Path | None, key: str = "path") -> Path:
    """The path of an existing file; otherwise raises ConfigError with the closest file name."""
    if path is None or not str(path):
        raise ConfigError(f"{key}: must name a trace file")
    file = Path(str(path))
    with suppress(RuntimeError):  # unknown ~user: reported below as a missing folder
        file = file.expanduser()
    try:
        size = file.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        raise _missing(file, key) from None
    except OSError as error:
        raise ConfigError(f"{key}={path}: {error.strerror}") from None
    if file.is_dir():
        raise ConfigError(f"{key}={path}: is a folder, must be a file")
    if not file.is_file():
        raise ConfigError(f"{key}={path}: is not a plain file, which can be read twice")
    if not size:
        raise ConfigError(f"{file}: the file is empty")
    return file


def _missing(file: Path, key: str) -> ConfigError:
    if not file.parent.is_dir():
        return ConfigError(f"{key}={file}: there is no folder {file.parent}")
    close = get_close_matches(file.name, [p.name for p in file.parent.iterdir()], n=1)
    hint = f"; did you mean {file.parent / close[0]}?" if close else ""
    return ConfigError(f"{key}={file}: there is no such file{hint}")


def opened(path: Path) -> TextIO:
    """Open as text, decompressing gzip; keeps line ends and strips a byte order mark."""
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    if packed:
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Convert decoding and I/O errors of reading the file inside to ConfigError."""
    try:
        yield
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not a text file in UTF-8, nor one packed by gzip") from None
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise ConfigError(f"{path}: packed by gzip, but damaged or not whole") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None


Tokenizer = Callable[[str], Sequence[Any] | int]
"""Maps text to its tokens or their number."""


@dataclass(frozen=True)
class Clock:
    """Times of consecutive rows, including those filtered out by `where`."""

    lines: Sequence[int]
    seconds: NDArray[np.float64]
    dated: bool = False
    """Whether they are dates, of which the first becomes time 0."""


COLUMNS = ("arrival", "prompt", "output", "client", "priority", "session")
"""What a column of a table can hold, apart from `extra` values of requests."""

Link = tuple[Hashable, Hashable]
"""A row's name, and the name of the row it continues: the last one above with that name."""


@dataclass(frozen=True)
class Chunk:
    """Consecutive rows of a file as columns."""

    lines: Sequence[int]  # of the file, from 1
    clock: Clock | None  # None where the file has no times
    arrival: NDArray[np.float64] | None  # seconds, after filtering
    prompt_len: NDArray[np.int64]
    output_len: NDArray[np.int64]
    client: list[str] | None = None
    priority: NDArray[np.float64] | None = None
    blocks: list[list[int]] | None = None  # block ids of the prompts
    block_tokens: int = 0  # block size
    links: list[Link] | None = None
    extra: list[Mapping[str, Any]] | None = None  # read-only
    unread: tuple[str, ...] = ()
    """Columns of prompt contents that the format ignores."""
    failed: int = 0
    """Requests without an answer, which are no rows."""


@dataclass(frozen=True)
class Options:
    """Options of a reader."""

    where: Mapping[str, str] = field(default_factory=dict)
    columns: Mapping[str, str] = field(default_factory=dict)
    """Names in the file by names of `COLUMNS`."""
    extra: Mapping[str, str] = field(default_factory=dict)
    """Names in the file by names in `Request.extra`."""
    block_tokens: int = 512
    tokenizer: str | Tokenizer | None = None

    @property
    def given(self) -> dict[str, Any]:
        """Options that differ from their defaults."""
        default = Options()
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {key: value for key, value in values.items() if value != getattr(default, key)}


class Format(ABC):
    """A trace file format."""

    name: str
    time: str | None  # the column of arrivals, if any
    prompt: str
    output: str
    options: tuple[str, ...]  # the supported fields of `Options`
    epoch = False  # whether times are absolute, so that the first row becomes time 0
    is_table = False  # whether it has a header line

    @property
    def needs(self) -> tuple[str, ...]:
        """The required columns or fields."""
        names = (self.time, self.prompt, self.output)
        return tuple(name for name in names if name is not None)

    @abstractmethod
    def fits(self, head: str) -> float:
        """How well the beginning of a file matches this format, from 0 to 1."""

    @abstractmethod
    def chunks(self, path: Path, options: Options) -> Iterator[Chunk]:
        """The file's rows in order, in chunks of thousands."""

    def wrong(self, path: Path, line: int, what: str) -> ConfigError:
        """An error in a row, by the format's numbering."""
        return wrong(path, line, what)


CONTENTS = ("prefix_id", "hash_ids", "prompt_token_ids", "cached_tokens")
"""Columns of prompt contents in a log for `experiment=calibrate`."""


def unread_contents(names: Iterable[str]) -> tuple[str, ...]:
    """The columns of prompt contents among `names`."""
    present = set(names)
    return tuple(name for name in CONTENTS if name in present)


def wrong(path: Path, line: int, what: str) -> ConfigError:
    """An error with its location as `path:line`, which editors and terminals link."""
    return ConfigError(f"{path}:{line}: {what}")


def refuse_bad(path: Path, format: Format, chunk: Chunk, least: int) -> None:
    """Raise ConfigError for lengths below `least` tokens and for times out of bounds."""
    named = ((format.prompt, chunk.prompt_len), (format.output, chunk.output_len))
    for name, column in named:
        bad = np.flatnonzero((column < least) | (column > LONGEST))
        if len(bad):
            value, line = int(column[bad[0]]), chunk.lines[bad[0]]
            allowed = f"at most {LONGEST}" if value > 0 else f"at least {least}"
            empty = "an empty cell counts as 0; " if format.is_table else ""
            hint = "" if value else f" ({empty}drop_empty=true leaves such rows out)"
            raise format.wrong(path, line, f"{name}={value}: must be {allowed}{hint}")
    if chunk.clock is not None:
        times, absolute = chunk.clock.seconds, format.epoch or chunk.clock.dated
        earliest = -LATEST if absolute else 0.0
        bad = np.flatnonzero((times < earliest) | (times > LATEST))
        if len(bad):
            value, line = times[bad[0]], chunk.clock.lines[bad[0]]
            what = f"{format.time} is {value:g} s: must be from {earliest:g} to {LATEST:g} s"
            raise format.wrong(path, line, what)


def refuse_unsorted(path: Path, format: Format, clock: Clock, last: float) -> None:
    """Raise ConfigError for a time before that of the previous row, initially `last`."""
    back = np.flatnonzero(np.diff(clock.seconds, prepend=last) < 0)
    if len(back):
        row = int(back[0])
        late = (clock.seconds[row - 1] if row else last) - clock.seconds[row]
        what = f"{format.time} is {late:g} s before the row above: times must not decrease"
        raise format.wrong(path, clock.lines[row], f"{what} (sort=true puts them in order)")
