"""How misses change with each constant, and the move under which they would be smallest."""

from __future__ import annotations

import numpy as np

from pagedsim.fidelity.external_score import Column
from pagedsim.fidelity.external_trials import Trials
from pagedsim.fidelity.simplex import Point

NUDGE = 0.25
"""In units, to both sides: wide enough that chance does not make the slope."""
FARTHEST = 3.0
"""In units: where slopes ask for more, they are too flat to say."""
ROUNDS, SOFT, RIDGE = 30, 0.05, 1e-4


def slopes_at(trials: Trials, point: Point) -> Column:
    """A column a constant: how all misses change with its move."""
    found = []
    for index in range(len(point)):
        step = np.zeros(len(point))
        step[index] = NUDGE
        up, down = (np.concatenate(trials.misses(point + side * step)) for side in (1.0, -1.0))
        found.append((up - down) / (2 * NUDGE))
    return np.stack(found, 1)


def least(target: Column, slopes: Column) -> Point:
    """The moves that bring the misses `target` nearest to nothing.

    Least absolute misses, by least squares that are weighted anew in each round: a request that is
    far off since another one was preempted is not to draw all others along.
    """
    found: Point = np.zeros(slopes.shape[1])
    for _ in range(ROUNDS):
        weight = 1.0 / np.maximum(np.abs(target + slopes @ found), SOFT)
        weighted = slopes * weight[:, None]
        left = weighted.T @ slopes + RIDGE * float(weight.sum()) * np.eye(slopes.shape[1])
        found = np.asarray(np.linalg.solve(left, -weighted.T @ target), np.float64)
    return np.clip(found, -FARTHEST, FARTHEST)
