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
    common: Mapping[int, Common] = field(default_factory=dict)
    """Streams of tools and system prompts by what they hold."""
    block: int | None = None
    """Tokens of a block, where contents are known by block."""
    begin: float = 0.0
    """Seconds since the first session began."""
    clocked: bool = True
    """Whether the starts of all calls were recorded, and not only delays."""
    orphans: int = 0
    """Sub-agents left out, since no call of their parent comes before them."""
    late: int = 0
    """Calls that began before the sub-agents that they wait for had returned."""
    agents: int = 0
    """Sub-agents."""
    unknown: int = 0
    """Calls of whose prompt nothing is known."""
    undated: int = 0
    """Calls left out, since nothing says when they were."""


class SessionFormat(ABC):
    """A format of files that hold whole sessions."""

    name: str
    options: tuple[str, ...] = ()
    """Settings of `trace` that it takes beside those of all."""

    @abstractmethod
    def fits(self, head: str) -> float:
        """How well the beginning of a file matches; above 1 for a match."""

    @abstractmethod
    def sessions(self, path: Path, **options: Any) -> Iterator[Session]:
        """The sessions of a file, in order."""


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
        if self.values.get(name) is None:
            return ConfigError(f"{self.where}: no field {name!r}: must be {must}")
        return ConfigError(f"{self.where}: {name}={shown(self.values[name]):.60}: must be {must}")

    def seconds(
        self, name: str, low: float = 0.0, default: float | None = None, unit: float = 1.0
    ) -> float:
        """Seconds of a field that may be `default` where it is missing or null, in `unit`s."""
        found = self.optional_seconds(name, low, unit)
        if found is None and default is None:
            raise self.wrong(name, "a number of seconds")
        return default if found is None else found  # type: ignore[return-value]

    def optional_seconds(self, name: str, low: float = 0.0, unit: float = 1.0) -> float | None:
        value = self.values.get(name)
        if value is None:
            return None
        if type(value) not in (int, float) or not low <= value * unit <= LATEST:
            raise self.wrong(name, f"a number from {low:g} to {LATEST / unit:g}")
        return float(value) * unit

    def tokens(self, name: str, low: int, default: int | None = None) -> int:
        value = self.values.get(name, default)
        if value is None and default is not None:
            value = default
        if type(value) is not int or not low <= value <= LONGEST:
            raise self.wrong(name, f"a whole number of tokens from {low} to {LONGEST}")
        return int(value)

    def objects(self, name: str) -> Iterator[Fields]:
        """The objects of a list, each with its place."""
        value = self.values.get(name)
        if not isinstance(value, list):
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
            raise ConfigError(
                f"{self.where}: {name} has {len(ids)} blocks for {prompt} tokens: must be one for "
                f"each {block} tokens ({prompt // block})"
            )
        return ids


def lines_of(path: Path) -> Iterator[Fields]:
    """The objects of a file with one a line."""
    with opened(path) as file:
        for line, text in enumerate(file, 1):
            if not text.isspace():
                yield Fields.of(parsed(path, line, text), f"{path}:{line}")


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
    """What prompts of a space hold, from the names of their blocks."""

    space: Space
    block: int
    kinds: NDArray[np.int32]
    """Of each block: 0, or the part of an agent's beginning that it is of."""
    common: dict[int, Common] = field(default_factory=dict)
    _parts: int = 0

    @classmethod
    def of(cls, space: Space, block: int, lists: Sequence[Blocks]) -> Contents:
        size = max((int(ids.max()) + 1 for ids in lists if len(ids)), default=0)
        space.streams += size
        return cls(space, block, np.zeros(size, np.int32))

    def begins(self, ids: Blocks, tools: int, system: int) -> None:
        """An agent's first prompt, of which so many tokens are tools and the system prompt."""
        bounds = (0, tools // self.block, (tools + system) // self.block)
        for names, start, end in zip(
            (("tools", tools), ("system", tools, system)), bounds, bounds[1:], strict=False
        ):
            self._parts += 1
            for place, name in enumerate(ids[start:end].tolist(), start):
                if not self.kinds[name]:
                    self.kinds[name] = self._parts
                    self.common[name] = (*names, place)

    def runs(self, ids: Blocks, prompt: int) -> tuple[list[int], list[int]]:
        """Streams and ends of a prompt of these blocks; tokens beyond them are its own."""
        streams, ends = list[int](), list[int]()
        if len(ids):
            turns = (np.diff(ids) != 1) | (np.diff(self.kinds[ids]) != 0)
            starts = np.flatnonzero(turns) + 1
            streams = ids[np.concatenate(([0], starts))].tolist()
            ends = [*(starts * self.block).tolist(), min(len(ids) * self.block, prompt)]
        if not ends or ends[-1] < prompt:
            streams.append(self.space.new())
            ends.append(prompt)
        return streams, ends


def continued(
    before: Call | None, shared: int, prompt: int, space: Space
) -> tuple[list[int], list[int]]:
    """Streams and ends of a prompt that begins with so many tokens of the one before, at most."""
    streams, ends, shared = list[int](), list[int](), min(shared, prompt)
    if before is not None:
        for stream, end in zip(before.streams, before.ends, strict=True):
            if not ends or ends[-1] < shared:
                streams.append(stream)
                ends.append(min(end, shared))
        if not shared:
            streams, ends = [], []
    if not ends or ends[-1] < prompt:
        streams.append(space.new())
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
