"""How far a fitted constant may move, others making up for it, and the log be fitted as well."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pagedsim.fidelity.external_score import Column, scales
from pagedsim.fidelity.external_slopes import least, slopes_at
from pagedsim.fidelity.external_trials import Trials
from pagedsim.fidelity.simplex import Point

AS_GOOD = 0.25
"""A fit is as good where it is farther off by no more than this part: so much is chance, which
changes from point to point who is preempted or waits for another round,"""
LEAST = 0.005
"""or by so much: no server repeats itself more exactly than 0.5 %."""
DECIDED = 1.25
"""The upper end of a range over the lower: more, and the log does not decide."""
STEPS = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
"""In units, to each side."""
CORRECTIONS = 3
"""Tries at a step."""
WORSE = 2
"""Steps in a row after which it goes no farther."""
PARTNER = 0.3
"""The part of one's move, in units, by which another must move along to be told."""


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


def ranges(trials: Trials, point: Point, distance: float) -> dict[str, Range]:
    """Of every free constant: all that was simulated and is as good as `point`.

    From there each is moved step by step, and the others to where slopes say that they make up for
    it.
    """
    enough = distance + max(LEAST, AS_GOOD * distance)
    valley = _Valley(point, scales(trials.misses(point)), slopes_at(trials, point))
    walks = [
        [_walk(trials, valley, index, side, enough) for side in (-1.0, 1.0)]
        for index in range(len(point))
    ]
    good = [
        trials.constants(tried)
        for tried, apart in zip(trials.points, trials.distances, strict=True)
        if apart <= enough
    ]
    found = {}
    for index, name in enumerate(trials.free):
        values = [constants[name] for constants in good]
        far = max((move for move, _ in walks[index]), key=lambda move: abs(float(move[index])))
        found[name] = Range(
            min(values),
            max(values),
            any(unended for _, unended in walks[index]),
            _partner(trials, far, index),
        )
    return found


class _Valley(NamedTuple):
    """Slopes around the point that fits best."""

    point: Point
    scale: Column
    slopes: Column

    def again(self, missed: Column, index: int) -> Point:
        """Moves of all constants but one under which these misses are smallest."""
        others = [one for one in range(self.slopes.shape[1]) if one != index]
        moves: Point = np.zeros(self.slopes.shape[1])
        moves[others] = least(self.scale * missed, self.scale[:, None] * self.slopes[:, others])
        return moves


def _walk(
    trials: Trials, valley: _Valley, index: int, side: float, enough: float
) -> tuple[Point, bool]:
    """The farthest move to one side that is as good, and whether nothing ended it."""
    name, worse, unended = trials.free[index], 0, False
    farthest, before = np.zeros(len(valley.point)), trials.constants(valley.point)[name]
    for step in STEPS:
        # The others go on as they went, and then to where misses ask them to go.
        move = farthest * (step / abs(farthest[index]) if farthest[index] else 0.0)
        move[index] = side * step
        now = trials.constants(valley.point + move)[name]
        if now == before:
            return farthest, False  # at an end beyond which nothing can be
        before = now
        for _ in range(CORRECTIONS):
            missed = np.concatenate(trials.misses(valley.point + move))
            if unended := trials.distances[-1] <= enough:
                farthest, worse = move, 0
                break
            move = move + valley.again(missed, index)
        # Between two that are as good, chance may well put one that is worse.
        worse += not unended
        if worse == WORSE:
            return farthest, False
    return farthest, unended


def _partner(trials: Trials, move: Point, index: int) -> str | None:
    """Who moved most along with one, if that is much."""
    others = np.abs(move)
    own, others[index] = float(others[index]), 0.0
    far = int(others.argmax())
    return trials.free[far] if others[far] > PARTNER * own > 0 else None
