"""The service of one client over time, and how far it comes to be from another's."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagedsim.metrics.spans import Spans, together

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Looks:
    """Times at which to look, and what had been got then; `before`: just before."""

    times: Floats
    clock: Floats
    values: Floats
    before: bool


@dataclass(frozen=True)
class Curve:
    """From each of `times` on, of which the first is before all, `slope` a tick of `clock`."""

    times: Floats
    clock: Floats
    level: Floats
    slope: Floats
    waits: Spans
    looks: tuple[Looks, ...]
    """Beginning and end of what it waits, its knots within, and what was before they jumped."""

    def at(self, looks: Looks) -> Floats:
        """What it had got, at the times of another's looks."""
        place = np.searchsorted(self.times, looks.times, "left" if looks.before else "right") - 1
        return self.level[place] + self.slope[place] * (looks.clock - self.clock[place])


def widest_gap(one: Curve, other: Curve) -> float | None:
    """The largest difference between what two got within any time in which both waited; None if
    they never did."""
    both = together(one.waits, other.waits)
    if not len(both.begin):
        return None
    groups, values = [], []
    for mine, its, sign in ((one, other, 1.0), (other, one, -1.0)):
        for looks in mine.looks:
            group = both.which(looks.times, looks.before)
            some = group >= 0
            here = Looks(looks.times[some], looks.clock[some], looks.values[some], looks.before)
            groups.append(group[some])
            values.append(sign * (here.values - its.at(here)))
    return _widest(np.concatenate(groups), np.concatenate(values))


def _widest(group: NDArray[np.int64], values: Floats) -> float:
    """The largest difference between two values of one group."""
    order = np.argsort(group, kind="stable")
    starts = np.flatnonzero(np.diff(group[order], prepend=-1))
    some = values[order]
    return float((np.maximum.reduceat(some, starts) - np.minimum.reduceat(some, starts)).max())
