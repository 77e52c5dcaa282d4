"""How far each constant may move for a fit that is as good, and which make up for each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from pagedsim.fidelity.logs.constants import Constants
from pagedsim.fidelity.logs.log import Column
from pagedsim.fidelity.logs.score import scales
from pagedsim.fidelity.logs.trials import (
    SOFT,
    Point,
    Slope,
    Trials,
    curvature,
    least,
    slopes_at,
)

AS_GOOD = 0.25
"""A fit is as good if its error is larger by at most this share: differences up to it are due to
which requests happen to be preempted or delayed,"""
CHANCE = 0.005
"""or by so much: no server repeats itself more exactly than 0.5 %."""
DECIDED = 1.25
"""The upper end of a range over the lower: more, and the log does not decide."""
STEPS = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
"""In units, to each side."""
CORRECTIONS = 3
"""Tries at a step."""
WORSE = 2
"""Steps in a row that are worse, after which a walk ends."""
CORRELATED = 0.9
"""From this correlation on, constants are named as a pair."""
PARTNER = 0.3
"""Least ratio of a partner's move to a constant's, in units, for the partner to be named."""


class Range(NamedTuple):
    """Where a constant may lie for a fit that is as good."""

    low: float
    high: float
    open: bool
    """Whether the interval may extend beyond the tried values."""
    trades: str | None
    """The constant that compensates its moves, if one does."""

    @property
    def text(self) -> str:
        """Such as "0.1 to 0.5"."""
        return f"{self.low:.3g} to {self.high:.3g}"

    @property
    def decided(self) -> bool:
        """Whether the log determines the constant."""
        return not self.open and self.low > 0 and self.high / self.low <= DECIDED


class Pair(NamedTuple):
    """Two constants, and the correlation of the seconds that they stand for."""

    one: str
    other: str
    correlation: float


class Evidence(NamedTuple):
    """What the logs tell of the constants."""

    ranges: Mapping[str, Range]
    """For each constant that the logs depend on."""
    as_good: Sequence[Constants]
    """All that were tried and fit as well."""
    pairs: Sequence[Pair]
    """Constants that the logs hardly tell apart."""


def evidence(trials: Trials, point: Point) -> Evidence:
    """Intervals of all free constants: the values of all simulated points that are as good as
    `point`.

    From there each constant is moved step by step, and the others to where slopes compensate it.
    """
    missed = trials.misses(point)
    scale, distance = scales(missed), trials.distances[-1]
    enough = distance + max(CHANCE, AS_GOOD * distance)
    valley = _Valley(point, scale, slopes_at(trials, point))
    weight = 1.0 / np.maximum(np.abs(scale * np.concatenate(missed)), SOFT)
    bend = curvature(scale[:, None] * valley.slopes, weight, trials.prior.at(point))
    walks = [
        [_walk(trials, valley, index, side, enough) for side in (-1.0, 1.0)]
        for index in range(len(point))
    ]
    good = [
        trials.constants(tried)
        for tried, distance in zip(trials.points, trials.distances, strict=True)
        if distance <= enough
    ]
    intervals = {}
    for index, name in enumerate(trials.free):
        values = [constants[name] for constants in good]
        far = max((move for move, _ in walks[index]), key=lambda move: abs(float(move[index])))
        intervals[name] = Range(
            min(values),
            max(values),
            any(unended for _, unended in walks[index]),
            _partner(trials, far, index),
        )
    return Evidence(intervals, good, pairs(trials.free, bend))


def pairs(names: Sequence[str], bend: Column) -> list[Pair]:
    """The pairs whose correlation is more than `CORRELATED` where an error bends so."""
    spread = np.linalg.inv(bend)
    deviations = np.sqrt(np.diag(spread))
    together = spread / np.outer(deviations, deviations)
    high = np.argwhere(np.triu(np.abs(together), 1) > CORRELATED).tolist()
    return [Pair(names[one], names[other], float(together[one, other])) for one, other in high]


class _Valley(NamedTuple):
    """Slopes around the point that fits best."""

    point: Point
    scale: Column
    slopes: Column

    def corrections(self, missed: Column, index: int, prior: Slope) -> Point:
        """Moves of all constants but `index` that minimise the misses."""
        others = [column for column in range(self.slopes.shape[1]) if column != index]
        moves: Point = np.zeros(self.slopes.shape[1])
        likely = Slope(prior.first[others], prior.second[others])
        slopes = self.scale[:, None] * self.slopes[:, others]
        moves[others] = least(self.scale * missed, slopes, likely)
        return moves


def _walk(
    trials: Trials, valley: _Valley, index: int, side: float, enough: float
) -> tuple[Point, bool]:
    """The farthest move to one side that is as good, and whether it was still as good at the last
    step."""
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
            prior = trials.prior.at(valley.point + move)
            move = move + valley.corrections(missed, index, prior)
        # Between two that are as good, chance may well put one that is worse.
        worse += not unended
        if worse == WORSE:
            return farthest, False
    return farthest, unended


def _partner(trials: Trials, move: Point, index: int) -> str | None:
    """The constant that moved most along with `index`, if it moved far enough."""
    others = np.abs(move)
    mine, others[index] = float(others[index]), 0.0
    far = int(others.argmax())
    return trials.free[far] if others[far] > PARTNER * mine > 0 else None
