"""A histogram that is told the same number many times at once."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate


class Histogram:
    """Counts numbers by the bucket that they fall in.

    >>> histogram = Histogram([1, 10])
    >>> histogram.add(0.5)
    >>> histogram.add(20, 3)
    >>> histogram.cumulative, histogram.sum
    ([('1.0', 1), ('10.0', 1), ('+Inf', 4)], 60.5)
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.sum = 0.0
        self._counts = [0] * (len(bounds) + 1)

    def add(self, value: float, times: int = 1) -> None:
        """Count a number so many times."""
        self._counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    @property
    def cumulative(self) -> list[tuple[str, int]]:
        """Upper bounds, as Prometheus writes them, with how many numbers do not exceed them."""
        names = [*(str(float(bound)) for bound in self.bounds), "+Inf"]
        return list(zip(names, accumulate(list(self._counts)), strict=True))


def one_two_five(most: float) -> list[float]:
    """1, 2, 5, 10, 20, ... as long as they do not exceed `most`.

    >>> one_two_five(60)
    [1, 2, 5, 10, 20, 50]
    """
    values, power = list[float](), 1
    while power <= most:
        values += [first * power for first in (1, 2, 5) if first * power <= most]
        power *= 10
    return values
