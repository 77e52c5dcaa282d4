"""Session shapes: a chain of turns, map-reduce, or a tree of parallel calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from pagedsim.core.errors import require_whole
from pagedsim.workload.draws import Draw, make_draw
from pagedsim.workload.limits import make


class Call(NamedTuple):
    """One request of a session; refers to earlier requests by their index in the session."""

    turn: int  # from 1; calls of one turn run in parallel
    after: tuple[int, ...] = ()  # calls whose answers it waits for
    base: int = -1  # the call whose conversation it continues; -1: a new conversation
    asks: int | None = None  # the call with the same question in the same conversation
    quotes: tuple[int, ...] = ()  # calls whose answers are part of its question


Calls = Sequence[Call]


class Shape(ABC):
    """The structure of a session."""

    drawn = False
    """Whether it is random."""

    @abstractmethod
    def sessions(self, count: int, rng: np.random.Generator) -> list[Calls]:
        """The calls of `count` sessions, by turn; a smaller count gives a prefix of a larger."""


class Chain(Shape):
    """Sequential calls, each with the whole conversation as its prompt: a chat or ReAct agent."""

    def __init__(self, turns: float | Mapping[str, Any] | Draw) -> None:
        self.turns = make_draw("turns", turns)
        self.drawn = self.turns.drawn

    def sessions(self, count: int, rng: np.random.Generator) -> list[Calls]:
        return [
            [Call(1), *(Call(turn + 1, (turn - 1,), turn - 1) for turn in range(1, turns))]
            for turns in self.turns.counts(count, rng).tolist()
        ]


class MapReduce(Shape):
    """`width` parallel calls, and one call with all their answers in its prompt."""

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
    """Tree of thoughts: `breadth` answers to a question, of which the best `keep` are expanded
    likewise down to `depth`, and a final answer that continues the best."""

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
            kept = [last[place] for place in range(self.keep)]  # no scores: the first are kept
        calls.append(Call(self.depth + 1, last, kept[0]))
        return [calls] * count


SHAPES: Mapping[str, Callable[..., Shape]] = {
    "chain": Chain,
    "map_reduce": MapReduce,
    "tree": Tree,
}


def make_shape(name: str, settings: dict[str, Any]) -> Shape:
    """A session shape by name."""
    return make("shape", name, SHAPES, settings)
