"""Arithmetic on curves of latency over rate: sustained rates, crossings, and points in between."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

Curve = Mapping[float, float]
"""Rate: latency."""


def passes(curve: Curve, level: float) -> float:
    """The first x at which y rises past `level`, on lines between points; NaN for none.

    >>> passes({1: 0, 2: 4}, 1)
    1.25
    """
    for low, high in pairwise(sorted(curve)):
        below, above = curve[low], curve[high]
        if below <= level <= above:
            return low + (high - low) * (level - below) / ((above - below) or 1)
    return math.nan


def sustained(curve: Curve, bound: float) -> float:
    """The rate at which the latency first passes `bound`, on lines in its logarithm.

    NaN where the rates that were run do not bracket it.

    >>> sustained({1: 0.1, 2: 1.0, 3: 10.0}, 1.0)
    2.0
    >>> round(sustained({1: 0.1, 2: 10.0}, 1.0), 3)
    1.5
    """
    return passes({rate: math.log(value) for rate, value in curve.items()}, math.log(bound))


def mean_curve(curves: Sequence[Curve]) -> dict[float, float]:
    """The mean of several over each x."""
    return {x: float(np.mean([curve[x] for curve in curves])) for x in curves[0]}
