"""How far each constant may move for a fit that is as good, and which make up for each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from pagedsim.fidelity.logs.constants import Constants
from pagedsim.fidelity.logs.log import Column
from pagedsim.fidelity.logs.score import scales
from pagedsim.fidelity.logs.trials import ALIKE, Point, Trials, curvature, slopes_at

DEVIATIONS = 2.0
"""Standard deviations to each side within which a fit is as good."""
DECIDED = 1.25
"""The upper end of a range over the lower: more, and neither log nor tables decide."""
PARTNER, CORRELATED = 0.5, 0.9
"""Correlations from which on a partner of an undecided constant is named, and any pair."""


class Range(NamedTuple):
    """Where a constant may lie for a fit that is as good."""

    low: float
    high: float
    trades: str | None
    """The constant that compensates its moves, if one does."""

    @property
    def text(self) -> str:
        """Such as "0.1 to 0.5"."""
        return f"{self.low:.3g} to {self.high:.3g}"

    @property
    def decided(self) -> bool:
        return self.low > 0 and self.high / self.low <= DECIDED


class Pair(NamedTuple):
    """Two constants, and the correlation of the seconds that they stand for."""

    one: str
    other: str
    correlation: float


class Evidence(NamedTuple):
    """What logs and tables tell of the constants."""

    ranges: Mapping[str, Range]
    """For each constant that the logs depend on."""
    ends: Sequence[Constants]
    """Constants that are as good, at both ends of each principal axis."""
    pairs: Sequence[Pair]
    """Constants that are hardly told apart."""


def evidence(trials: Trials, point: Point) -> Evidence:
    """How sure the constants are at the point that fits best, by the slopes around it.

    A log counts as `ALIKE` independent requests whose misses have a Laplace distribution, and
    constants are as likely as its `Prior` says.
    """
    missed = trials.misses(point)
    scale = scales(missed)
    # Smaller misses than the mean, or than `SMALLEST`, are chance.
    weight = 1.0 / np.maximum(np.abs(scale * np.concatenate(missed)), 1.0)
    slopes = scale[:, None] * slopes_at(trials, point)
    bend = curvature(slopes, weight, trials.prior.at(point)) / len(weight)
    covariance = np.linalg.inv(bend) / (ALIKE * len(trials.parts))
    variances, axes = np.linalg.eigh(covariance)
    moves = [*(DEVIATIONS * np.sqrt(variances) * axes).T]
    together = correlations(covariance)
    ranges = {}
    for index, name in enumerate(trials.free):
        move = np.zeros(len(point))
        move[index] = DEVIATIONS * np.sqrt(covariance[index, index])
        low, high = sorted(trials.constants(point + side * move)[name] for side in (-1, 1))
        others = np.abs(together[index]) - np.eye(len(point))[index]
        partner = int(others.argmax())
        ranges[name] = Range(low, high, trials.free[partner] if others[partner] > PARTNER else None)
    ends = [trials.constants(point + side * move) for move in moves for side in (-1, 1)]
    return Evidence(ranges, ends, pairs(trials.free, together))


def correlations(covariance: Column) -> Column:
    """The correlations that covariances stand for."""
    deviations = np.sqrt(np.diag(covariance))
    return np.asarray(covariance / np.outer(deviations, deviations))


def pairs(names: Sequence[str], together: Column) -> list[Pair]:
    """The pairs of so correlated constants that are hardly told apart."""
    high = np.argwhere(np.triu(np.abs(together), 1) > CORRELATED).tolist()
    return [Pair(names[one], names[other], float(together[one, other])) for one, other in high]
