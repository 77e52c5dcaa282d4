"""Recorded sessions of agents: calls that wait for one another, and what their prompts share.

A session is a tree of agents. Each makes its calls one after another; a sub-agent begins after a
call of its parent and holds a later one. What prompts share is kept as runs of streams, as
`SymbolicPrompt` has them: a block that always follows another is of the same stream, so that the
thousands of blocks of a prompt are a few numbers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedsim.core import ConfigError
from pagedsim.core.errors import shown
from pagedsim.workload.limits import LATEST, LONGEST
from pagedsim.workload.traces.jsonlines import parsed
from pagedsim.workload.traces.rows import opened

Blocks = NDArray[np.int64]
Common = tuple[Any, ...]
"""Names the tokens of tools or of a system prompt; equal in sessions of one client's version."""
Runs = tuple[list[int], list[int]]
"""The streams of a prompt's runs, and the tokens up to the end of each."""

SOON = 1e-6
"""Seconds that recorded times may be off."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a session; refers to others by their place in it."""

    at: float  # seconds since the session began
    end: float  # of its answer; `at` where that is not known
    think: float | None  # seconds since the answer before, as the client counts them
    prompt: int  # tokens
    output: int
    streams: Sequence[int]  # of each run of the prompt
    ends: Sequence[int]  # tokens up to the end of each run
    after: tuple[int, ...]  # calls whose answers it waits for, all before it
    agent: int  # 0: the session's own
    model: str = ""


@dataclass(eq=False)
class Space:
    """A range of streams: sessions of one space share what they call alike."""

    streams: int = 0

    def new(self) -> int:
        """A stream that no other has."""
        self.streams += 1
        return self.streams - 1


@dataclass(frozen=True, kw_only=True)
class Session:
    """A recorded session, its calls in order of time and each after those it waits for."""

    name: str
    calls: Sequence[Call]
    space: Space
    common: Mapping[int, Common] = field(default_factory=dict)  # by stream
    block: int | None = None  # tokens of a block, where contents are known by block
    begin: float = 0.0  # seconds
    clocked: bool = True  # whether the starts of all calls were recorded, and not only delays
    orphans: int = 0  # sub-agents left out, since no call of their parent comes before them
    late: int = 0  # calls before the return of a sub-agent that they wait for
    unknown: int = 0  # calls of whose prompt nothing is known
    undated: int = 0  # calls left out, since nothing says when they were


class SessionFormat(ABC):
    """A format of files that hold whole sessions."""

    name: str

    @abstractmethod
    def fits(self, head: str) -> bool:
        """Whether the beginning of a file looks like it."""

    @abstractmethod
    def sessions(self, path: Path, block_tokens: int, markers: str) -> Iterator[Session]:
        """The sessions of a file, in order; the settings are those of formats that have them."""


@dataclass(frozen=True)
class Fields:
    """An object in a file, and where it stands: gets values, or raises ConfigError in a line."""

    values: Mapping[str, Any]
    where: str

    @classmethod
    def of(cls, value: Any, where: str) -> Fields:
        if not isinstance(value, dict):
            raise ConfigError(f"{where}: {shown(value):.60}: must be an object")
        return cls(value, where)

    def wrong(self, name: str, must: str) -> ConfigError:
        value = self.values.get(name)
        has = f"no field {name!r}" if value is None else f"{name}={shown(value):.60}"
        return ConfigError(f"{self.where}: {has}: must be {must}")

    def seconds(self, name: str, default: float | None = None, unit: float = 1.0) -> float:
        """Seconds of a field in `unit`s, or `default` where it is missing or null."""
        value = self.optional_seconds(name, unit)
        if value is None and default is None:
            raise self.wrong(name, "a number of seconds")
        return value if value is not None else default or 0.0

    def optional_seconds(self, name: str, unit: float = 1.0) -> float | None:
        value = self.values.get(name)
        if value is None:
            return None
        if type(value) not in (int, float) or not 0 <= value * unit <= LATEST:
            raise self.wrong(name, f"a number from 0 to {LATEST / unit:g}")
        return float(value) * unit

    def tokens(self, name: str, low: int, default: int | None = None) -> int:
        value = self.values.get(name)
        value = default if value is None else value
        if type(value) is not int or not low <= value <= LONGEST:
            raise self.wrong(name, f"a whole number of tokens from {low} to {LONGEST}")
        return value

    def objects(self, name: str, required: bool = True) -> Iterator[Fields]:
        """The objects of a list, each with its place."""
        value = self.values.get(name)
        if not isinstance(value, list):
            if value is None and not required:
                return
            raise self.wrong(name, "a list of objects")
        for place, entry in enumerate(value):
            yield Fields.of(entry, f"{self.where}: {name}[{place}]")

    def text(self, name: str) -> str:
        value = self.values.get(name)
        return "" if value is None else str(value)

    def blocks(self, name: str, prompt: int, block: int) -> list[int]:
        """Names of the prompt's blocks: one for each that is full, and perhaps for the last; none
        where they are not known."""
        ids = self.values.get(name)
        if ids is None:
            return []
        if type(ids) is not list or set(map(type, ids)) - {int}:
            raise self.wrong(name, "a list of whole numbers")
        if ids and not prompt // block <= len(ids) <= -(-prompt // block):
            must = f"must be one for each {block} tokens ({prompt // block})"
            has = f"{name} has {len(ids)} block{'s' * (len(ids) != 1)} for {prompt} tokens"
            raise ConfigError(f"{self.where}: {has}: {must}")
        return ids


def lines_of(path: Path) -> Iterator[Fields]:
    """The objects of a file with one a line."""
    with opened(path) as file:
        for line, text in enumerate(file, 1):
            if not text.isspace():
                yield Fields.of(parsed(path, line, text), f"{path}:{line}")


def whole_of(path: Path) -> Fields:
    """The object over all lines of a file."""
    with opened(path) as file:
        return Fields.of(parsed(path, None, file.read()), str(path))


def numbered(lists: Sequence[Sequence[int]]) -> list[Blocks]:
    """Names of blocks as numbers in the order of their first use, unless they are nearly so."""
    most = 2 * sum(map(len, lists)) + 1024
    if all(min(ids) >= 0 and max(ids) < most for ids in lists if ids):
        return [np.array(ids, np.int64) for ids in lists]
    numbers: dict[int, int] = {}
    return [
        np.array([numbers.setdefault(name, len(numbers)) for name in ids], np.int64)
        for ids in lists
    ]


@dataclass(eq=False)
class Contents:
    """What prompts of a space hold, from the names of their blocks or of the prompt before."""

    space: Space
    block: int
    kinds: NDArray[np.int32]
    """Of each block: 0, or the part of an agent's beginning that it is of."""
    common: dict[int, Common] = field(default_factory=dict)
    unknown: int = 0
    _parts: int = 0

    @classmethod
    def of(cls, block: int, lists: Sequence[Blocks]) -> Contents:
        size = max((int(ids.max()) + 1 for ids in lists if len(ids)), default=0)
        return cls(Space(size), block, np.zeros(size, np.int32))

    def begins(self, ids: Blocks, tools: int, system: int) -> None:
        """An agent's first prompt, of which so many tokens are tools and the system prompt."""
        start = 0
        for names, end in ((("tools", tools), tools), (("system", tools, system), tools + system)):
            self._parts += 1
            for place, name in enumerate(ids[start : end // self.block].tolist(), start):
                if not self.kinds[name]:
                    self.kinds[name] = self._parts
                    self.common[name] = (*names, place)
            start = end // self.block

    def runs(self, ids: Blocks, prompt: int, before: Call | None = None, shared: int = 0) -> Runs:
        """Of a prompt of these blocks; or of one that begins with so many tokens of another, at
        most. What is known of neither is its own."""
        streams, ends = list[int](), list[int]()
        if len(ids):
            turns = (np.diff(ids) != 1) | (np.diff(self.kinds[ids]) != 0)
            starts = np.flatnonzero(turns) + 1
            streams = ids[np.concatenate(([0], starts))].tolist()
            ends = [*(starts * self.block).tolist(), min(len(ids) * self.block, prompt)]
        elif before is not None and (shared := min(shared, prompt, before.prompt)):
            kept = int(np.searchsorted(before.ends, shared)) + 1
            streams, ends = list(before.streams[:kept]), [*before.ends[: kept - 1], shared]
        else:
            self.unknown += prompt >= self.block > 1
        if not ends or ends[-1] < prompt:
            streams.append(self.space.new())
            ends.append(prompt)
        return streams, ends


def in_order(calls: Sequence[Call]) -> tuple[float, list[Call]]:
    """When a session begins, and its calls by time since then, each behind those it waits for."""
    ready = list[float]()
    for call in calls:
        ready.append(max([call.at, *(ready[place] for place in call.after)]))
    order = sorted(range(len(calls)), key=lambda place: (ready[place], place))
    place_of = {old: new for new, old in enumerate(order)}
    begin = ready[order[0]]
    moved = []
    for old in order:
        call, at = calls[old], ready[old] - begin
        after = tuple(sorted(place_of[place] for place in call.after))
        moved.append(replace(call, at=at, end=max(call.end - begin, at), after=after))
    return begin, moved


def from_zero(sessions: Sequence[Session]) -> Iterator[Session]:
    """Sessions by time, the first of which begins at 0."""
    first = min((session.begin for session in sessions), default=0.0)
    for session in sorted(sessions, key=lambda session: session.begin):
        yield replace(session, begin=session.begin - first)
