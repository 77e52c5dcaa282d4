"""Positive constants by least squares in their logarithms, robust against outliers."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

ROBUST = 0.1
"""Residuals beyond this have less weight."""
MOVES, ENOUGH, DIFFERENCE, STUCK = 60, 1e-5, 1e-3, 1e6
"""Most moves; least relative gain of a move; step of difference quotients; damping at the end."""


class Minimum(NamedTuple):
    """The constants found, and what residuals say of them."""

    values: Floats
    residuals: Floats
    deviations: Floats
    """Standard deviation of each logarithm, as the residuals scatter."""


def minimized(
    residuals: Callable[[Floats], Floats],
    begin: Floats,
    most: Floats | float = np.inf,
    pull: float = 0.0,
) -> Minimum:
    """The constants, up to `most`, with the least robust sum of squares.

    `residuals` are of logarithms, given constants. `pull` holds what no residual depends on where
    it begins: a factor of e has the weight of a residual of so much.
    """
    origin, ceiling = np.log(begin), np.log(np.broadcast_to(most, begin.shape))

    def at(x: Floats) -> Floats:
        return residuals(np.exp(x))

    def cost(x: Floats, errors: Floats) -> float:
        robust = ROBUST**2 * (np.sqrt(1 + (errors / ROBUST) ** 2) - 1)
        return float(robust.sum() + pull**2 * ((x - origin) ** 2).sum() / 2)

    x = np.minimum(origin, ceiling)
    errors = at(x)
    now, damping, curvature = cost(x, errors), 1e-2, np.eye(len(x))
    for _ in range(MOVES):
        slopes = np.stack(
            [(errors - at(x - DIFFERENCE * unit)) / DIFFERENCE for unit in np.eye(len(x))], axis=1
        )
        weighted = slopes / np.sqrt(1 + (errors / ROBUST) ** 2)[:, None]
        curvature = slopes.T @ weighted + (pull**2 + 1e-12) * np.eye(len(x))
        downhill = -weighted.T @ errors - pull**2 * (x - origin)
        free = (ceiling - x > 0) | (downhill < 0)  # what is at its bound stays there
        while damping < STUCK:
            damped = curvature + damping * np.diag(np.diag(curvature))
            move = np.zeros(len(x))
            move[free] = np.linalg.solve(damped[np.ix_(free, free)], downhill[free])
            moved = np.minimum(x + move, ceiling)
            moved_errors = at(moved)
            if (then := cost(moved, moved_errors)) < now:
                break
            damping *= 10
        else:
            break
        gain = now - then
        x, errors, now, damping = moved, moved_errors, then, damping / 10
        if gain < ENOUGH * now:
            break
    scatter = 1.4826 * float(np.median(np.abs(errors)))
    deviations = scatter * np.sqrt(np.diag(np.linalg.inv(curvature)))
    return Minimum(np.exp(x), errors, deviations)
