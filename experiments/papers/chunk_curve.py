"""Curves of latency over rate: where two of them cross, and what one is between its points."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

Curve = Mapping[float, float]
"""Rate: mean latency in seconds."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """Mean latencies that were published, in seconds, at a rate."""

    rate: float
    seconds: Mapping[str, float]
    """By budget."""


def crossing(curves: Mapping[str, Curve]) -> float:
    """The first rate at which the first curve falls below the second; NaN if none does.

    >>> crossing({"small": {1: 2.0, 3: 1.0}, "large": {1: 1.0, 3: 2.0}})
    2.0
    """
    first, second = curves.values()
    above = {rate: math.log(first[rate] / second[rate]) for rate in sorted(first)}
    for low, high in pairwise(above):
        if above[low] >= 0 > above[high]:
            return low + (high - low) * above[low] / (above[low] - above[high])
    return math.nan


def at(curve: Curve, rate: float) -> float:
    """The latency at a rate, on a line between two of them in its logarithm; NaN beyond all.

    >>> at({1: 1.0, 3: 100.0}, 2)
    10.0
    """
    for low, high in pairwise(sorted(curve)):
        if low <= rate <= high:
            part = (rate - low) / (high - low)
            return float(curve[low] ** (1 - part) * curve[high] ** part)
    return math.nan
