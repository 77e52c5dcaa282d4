"""The smallest value of a function of a few numbers that knows no slopes (Nelder and Mead)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Point = NDArray[np.float64]
Function = Callable[[Point], float]

FLAT = 1e-6
"""A simplex whose values differ by less has arrived."""


def search(value: Function, start: Point, sizes: Sequence[float], moves: int) -> Point:
    """Search from `start`, once with a simplex of each size, from the best so far.

    A new simplex gets out of the small hollows that a simulation's values are full of: who is
    preempted changes from one moment to the next. Each makes so many moves at most.
    """
    best = start
    for size in sizes:
        best = _descend(value, best, size, moves)
    return best


def _descend(value: Function, start: Point, size: float, moves: int) -> Point:
    points = np.vstack([start, start + size * np.eye(len(start))])
    values = np.array([value(point) for point in points])
    for _ in range(moves):
        order = np.argsort(values, kind="stable")
        points, values = points[order], values[order]
        if values[-1] - values[0] < FLAT:
            break
        _move(value, points, values)
    return points[values.argmin()]


def _move(value: Function, points: Point, values: Point) -> None:
    """Replace the worst point, the last one, by a better; where there is none, shrink."""
    worst = points[-1].copy()
    centre = points[:-1].mean(axis=0)
    other = centre + (centre - worst)  # as far on the other side
    found = value(other)
    if found < values[0]:
        farther = centre + 2.0 * (centre - worst)
        beyond = value(farther)
        points[-1], values[-1] = (farther, beyond) if beyond < found else (other, found)
    elif found < values[-2]:
        points[-1], values[-1] = other, found
    else:
        nearer = (centre + (other if found < values[-1] else worst)) / 2.0
        between = value(nearer)
        if between < min(found, values[-1]):
            points[-1], values[-1] = nearer, between
        else:
            points[1:] = (points[0] + points[1:]) / 2.0
            values[1:] = [value(point) for point in points[1:]]


PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)


def spread(count: int, numbers: int) -> list[Point]:
    """Points from -1 to 1 in each of some numbers that lie evenly everywhere (Halton)."""
    places = np.arange(1, count + 1)
    return list(2.0 * np.stack([_radical(places, PRIMES[one]) for one in range(numbers)], 1) - 1.0)


def _radical(places: NDArray[np.int64], base: int) -> Point:
    """The digits of each place, mirrored at the point."""
    found, unit = np.zeros(len(places)), 1.0
    while places.any():
        unit /= base
        found += unit * (places % base)
        places = places // base
    return found
