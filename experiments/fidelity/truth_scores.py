"""How far predictions are from what was measured, in groups."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from pagedsim.fidelity.step_tables.times import Point

Floats = NDArray[np.float64]
Key = TypeVar("Key", bound=Hashable)

ONE, SEVERAL, PROMPTS, FIRST = "tokens, 1 GPU", "tokens, several GPUs", "prompt steps", "TTFT"
CLASSES = (ONE, SEVERAL, PROMPTS, FIRST)
WITHIN: Mapping[str, float] = {ONE: 0.10, SEVERAL: 0.15, PROMPTS: 0.20}
"""What the median error of each is to be within. TTFT is a server's, with clients of whom the
tables do not tell, so that nothing is asked of it."""


def class_of(point: Point) -> str:
    """What a number tells of; batches and TPOT are of tokens."""
    if point.metric == "ttft":
        return FIRST
    if point.metric == "prompt":
        return PROMPTS
    return ONE if point.cell.tensor_parallel == 1 else SEVERAL


class Scored(NamedTuple):
    """A measured number and what was predicted."""

    point: Point
    predicted: float

    @property
    def error(self) -> float:
        """predicted / measured − 1."""
        return self.predicted / self.point.measured - 1


class Score(NamedTuple):
    """Errors of a group; shares."""

    rows: int
    median: float
    p90: float
    """Of |error|, as the median."""
    bias: float
    """The median of errors with their sign."""
    worst: Scored


def scored(points: Sequence[Point], predicted: Floats) -> list[Scored]:
    """Each with what was predicted."""
    return [Scored(*both) for both in zip(points, predicted.tolist(), strict=True)]


def score(group: Sequence[Scored]) -> Score:
    """Of a group that is not empty."""
    off = np.array([one.error for one in group])
    size = np.abs(off)
    return Score(
        len(group),
        float(np.median(size)),
        float(np.percentile(size, 90)),
        float(np.median(off)),
        group[int(size.argmax())],
    )


def by(every: Sequence[Scored], key: Callable[[Scored], Key]) -> dict[Key, list[Scored]]:
    """Groups, in the order in which they begin."""
    found: dict[Key, list[Scored]] = {}
    for one in every:
        found.setdefault(key(one), []).append(one)
    return found
