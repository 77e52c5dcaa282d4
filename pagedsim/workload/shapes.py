"""What a session does: a chain of turns, or calls in parallel whose answers are put together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from pagedsim.core.errors import require_whole
from pagedsim.workload.draws import Draw, make_draw
from pagedsim.workload.settings import make


class Call(NamedTuple):
    """One request of a session. Others are named by their place in it, and come before it."""

    turn: int  # from 1 on; calls of one turn go in parallel
    after: tuple[int, ...] = ()  # those whose answers it waits for
    base: int = -1  # the one whose conversation it continues; -1: it begins a new one
    asks: int | None = None  # the one that asks the same of the same conversation
    quotes: tuple[int, ...] = ()  # those whose answers stand in its question


Calls = Sequence[Call]


class Shape(ABC):
    """A kind of session."""

    drawn = False
    """Whether chance has a part in it."""

    @abstractmethod
    def sessions(self, count: int, rng: np.random.Generator) -> list[Calls]:
        """The calls of so many sessions, turn by turn; fewer are the beginning of more."""


class Chain(Shape):
    """One call after another, each of the whole conversation so far: a chat, or a ReAct agent."""

    def __init__(self, turns: float | Mapping[str, Any] | Draw) -> None:
        self.turns = make_draw("turns", turns)
        self.drawn = self.turns.drawn

    def sessions(self, count: int, rng: np.random.Generator) -> list[Calls]:
        return [
            [Call(1), *(Call(turn + 1, (turn - 1,), turn - 1) for turn in range(1, turns))]
            for turns in self.turns.counts(count, rng).tolist()
        ]


class MapReduce(Shape):
    """`width` calls at once, each with a part of the work, and one that gets all their answers."""

    def __init__(self, width: float | Mapping[str, Any] | Draw) -> None:
        self.width = make_draw("width", width)
        self.drawn = self.width.drawn

    def sessions(self, count: int, rng: np.random.Generator) -> list[Calls]:
        made: list[Calls] = []
        for width in self.width.counts(count, rng).tolist():
            parts = tuple(range(width))
            made.append([*(Call(1) for _ in parts), Call(2, parts, quotes=parts)])
        return made


@dataclass(frozen=True)
class Tree(Shape):
    """Thoughts: `breadth` answers to the same question, of which the best `keep` are gone on from
    with as many each, down to `depth`; at last one answer on the best of all."""

    breadth: int
    depth: int
    keep: int = 1

    def __post_init__(self) -> None:
        require_whole("breadth", self.breadth, 1, 64)
        require_whole("depth", self.depth, 1, 64)
        require_whole("keep", self.keep, 1, self.breadth)

    def sessions(self, count: int, rng: np.random.Generator) -> list[Calls]:
        calls, last, kept = list[Call](), tuple[int, ...](), [-1]
        for level in range(self.depth):
            begin = len(calls)
            for base in kept:
                first = len(calls)
                calls += [Call(level + 1, last, base, first) for _ in range(self.breadth)]
            last = tuple(range(begin, len(calls)))
            kept = [last[place] for place in range(self.keep)]  # of equals, any are the best
        calls.append(Call(self.depth + 1, last, kept[0]))
        return [calls] * count


SHAPES: Mapping[str, Callable[..., Shape]] = {
    "chain": Chain,
    "map_reduce": MapReduce,
    "tree": Tree,
}


def make_shape(name: str, settings: dict[str, Any]) -> Shape:
    """A kind of session by its name."""
    return make("shape", name, SHAPES, settings)
