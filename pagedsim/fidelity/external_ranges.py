"""How far a fitted constant may move, others making up for it, and the log be fitted as well."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from pagedsim.fidelity.external_score import Column
from pagedsim.fidelity.simplex import Point

AS_GOOD = 0.1
"""A fit is as good where it is farther off by no more than this part,"""
LEAST = 0.001
"""or by so much: 0.1 %, what chance moves."""
DECIDED = 1.5
"""The upper end of a range over the lower: more, and the log does not decide."""
STEPS = (0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
"""In logarithms, to each side."""
NUDGE = 0.1
"""In logarithms: of the slopes, which tell how the others make up for one."""
FARTHEST = STEPS[-1]
"""Where slopes ask for more, they are too flat to say."""
PARTNER = 0.3
"""The part of its own effect that another must make up for, to be told."""
ROUNDS, SOFT, RIDGE = 30, 1e-3, 1e-4


class Range(NamedTuple):
    """Where a constant may lie for a fit that is as good."""

    low: float
    high: float
    open: bool
    """Whether it may be higher or lower still than what was tried."""
    trades: str | None
    """The constant that moves along, if one does."""

    @property
    def decided(self) -> bool:
        """Whether the log says what it is."""
        return not self.open and self.low > 0 and self.high / self.low <= DECIDED


class Tried(Protocol):
    """What `external_fit.Trials` offers."""

    free: Sequence[str]
    points: list[Point]
    distances: list[float]

    @property
    def reach(self) -> Point: ...

    def constants(self, point: Point) -> Mapping[str, float]: ...

    def misses(self, point: Point) -> list[Column]: ...


def ranges(trials: Tried, point: Point, distance: float) -> dict[str, Range]:
    """Of every free constant: all that was simulated and is as good as `point`.

    From there each is moved by itself, step by step, and the others to where slopes say that they
    make up for it, until the fit is worse.
    """
    enough = distance + max(LEAST, AS_GOOD * distance)
    here = np.concatenate(trials.misses(point))
    slopes = np.stack([_slope(trials, point, index) for index in range(len(point))], 1)
    ends = {
        index: [_walk(trials, point, here, slopes, index, side, enough) for side in (-1.0, 1.0)]
        for index in range(len(point))
    }
    good = [
        trials.constants(tried)
        for tried, apart in zip(trials.points, trials.distances, strict=True)
        if apart <= enough
    ] + [trials.constants(point)]
    found = {}
    for index, name in enumerate(trials.free):
        values = [constants[name] for constants in good]
        moves = [move for move, _ in ends[index]]
        far = max(moves, key=lambda move: abs(float(move[index])))
        found[name] = Range(
            min(values),
            max(values),
            any(to_the_end for _, to_the_end in ends[index]),
            _partner(trials, far * np.abs(slopes).mean(0), index),
        )
    return found


def _slope(trials: Tried, point: Point, index: int) -> Column:
    """How the misses change with a constant's logarithm."""
    step = np.zeros(len(point))
    step[index] = NUDGE / trials.reach[index]
    up, down = (np.concatenate(trials.misses(point + side * step)) for side in (1.0, -1.0))
    return np.asarray((up - down) / (2 * NUDGE))


def _walk(
    trials: Tried,
    point: Point,
    here: Column,
    slopes: Column,
    index: int,
    side: float,
    enough: float,
) -> tuple[Point, bool]:
    """The farthest good move to one side, in logarithms, and whether nothing ended it."""
    last = np.zeros(len(point))
    for step in STEPS:
        move = _made_up(here, slopes, index, side * step)
        there = point + move / trials.reach
        before = trials.constants(point + last / trials.reach)
        if trials.constants(there)[trials.free[index]] == before[trials.free[index]]:
            return last, False  # at the data sheet's end
        trials.misses(there)
        if trials.distances[-1] > enough:
            return last, False
        last = move
    return last, True


def _made_up(here: Column, slopes: Column, index: int, move: float) -> Point:
    """One constant's move, and those of the others under which misses are smallest again.

    Least absolute misses, by least squares that are weighted anew in each round.
    """
    others = [one for one in range(slopes.shape[1]) if one != index]
    target = here + slopes[:, index] * move
    across = slopes[:, others]
    found: Point = np.zeros(len(others))
    for _ in range(ROUNDS):
        weight = 1.0 / np.maximum(np.abs(target + across @ found), SOFT)
        left = (across * weight[:, None]).T @ across
        left += RIDGE * weight.sum() * np.eye(len(others))
        found = np.asarray(
            np.linalg.solve(left, -(across * weight[:, None]).T @ target), np.float64
        )
    moves = np.zeros(slopes.shape[1])
    moves[index], moves[others] = move, np.clip(found, -FARTHEST, FARTHEST)
    return moves


def _partner(trials: Tried, effects: Point, index: int) -> str | None:
    """Who makes up for most of one's effect, by what each does to the misses."""
    others = np.abs(effects)
    own, others[index] = float(others[index]), 0.0
    far = int(others.argmax())
    return trials.free[far] if others[far] > PARTNER * own > 0 else None
