"""Measured seconds between and beyond the sizes that were measured.

Between two sizes times are straight lines in logarithms. Beyond the last they grow as the work does
(the roofline's law), below the first they stay as they are, as launching a kernel takes its time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from math import exp, log


class Curve:
    """Seconds of a kernel by one size. `law` is the power with which its work grows.

    >>> curve = Curve([1, 4], [1.0, 2.0])
    >>> [round(curve(size), 3) for size in (0.5, 1, 2, 4, 8)]
    [1.0, 1.0, 1.414, 2.0, 4.0]
    """

    def __init__(self, sizes: Iterable[float], seconds: Iterable[float], law: float = 1.0) -> None:
        self.sizes, self.seconds = list(map(float, sizes)), list(map(float, seconds))
        self._law = law
        self._logs = list(zip(map(log, self.sizes), map(log, self.seconds), strict=True))
        self._powers = [(b - a) / (x - w) for (w, a), (x, b) in pairwise(self._logs)]

    def __call__(self, size: float) -> float:
        place = bisect_right(self.sizes, size)
        if place == 0:
            return self.seconds[0]
        if place == len(self.sizes):
            return self.seconds[-1] * float((size / self.sizes[-1]) ** self._law)
        at, logarithm = self._logs[place - 1]
        return exp(logarithm + (log(size) - at) * self._powers[place - 1])


class Surface:
    """Seconds of attention by the number of sequences and the length of each, of `wide` times as
    many heads as were measured, which is as of so many times the sequences.

    >>> surface = Surface({1: Curve([10, 20], [1.0, 2.0]), 4: Curve([10, 20], [2.0, 4.0])})
    >>> [round(surface(count, 20), 3) for count in (1, 2, 4, 8)]
    [2.0, 2.828, 4.0, 8.0]
    """

    def __init__(self, curves: Mapping[float, Curve], wide: float = 1.0) -> None:
        self._wide = wide
        self.counts, self.curves = sorted(curves), curves

    def __call__(self, count: float, length: float) -> float:
        count *= self._wide
        seconds = 1.0
        for edge, share in around(self.counts, count):
            seconds *= self.curves[edge](length) ** share
        return seconds * max(count / self.counts[-1], 1.0)

    def lengths(self, count: float) -> list[float]:
        """The lengths that were measured at the numbers next to this one."""
        near = [self.curves[edge] for edge, _ in around(self.counts, count * self._wide)]
        return sorted({length for curve in near for length in curve.sizes})


def around(sizes: Sequence[float], size: float) -> list[tuple[float, float]]:
    """The sizes of a grid next to this one, each with its share in it.

    >>> [(edge, round(share, 2)) for edge, share in around([1, 4, 16], 8)]
    [(4, 0.5), (16, 0.5)]
    """
    place = bisect_right(sizes, size)
    low = sizes[max(place - 1, 0)]
    if place in (0, len(sizes)) or low == size:
        return [(low, 1.0)]
    share = log(size / low) / log(sizes[place] / low)
    return [(low, 1.0 - share), (sizes[place], share)]


def blended(curves: Sequence[tuple[Curve, float]], times: float = 1.0) -> Curve:
    """The geometric mean of curves by their shares, so many times as long."""
    whole = sum(share for _, share in curves)
    sizes = sorted({size for curve, _ in curves for size in curve.sizes})
    return Curve(
        sizes,
        [
            times * exp(sum(share / whole * log(curve(size)) for curve, share in curves))
            for size in sizes
        ],
    )
