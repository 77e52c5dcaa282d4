"""Measured seconds between and beyond the sizes that were measured.

Between two sizes times are straight lines in logarithms. Beyond the last they grow as the work does
(the roofline's law), below the first they stay as they are, as launching a kernel takes its time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from functools import reduce
from itertools import pairwise
from math import exp, log

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


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

    def __init__(self, curves: Mapping[int, Curve], wide: float = 1.0) -> None:
        self._wide = wide
        self.counts = sorted(curves)
        self.curves = [curves[count] for count in self.counts]

    def __call__(self, count: float, length: float) -> float:
        count *= self._wide
        place = bisect_right(self.counts, count)
        if place == 0:
            return self.curves[0](length)
        low = self.counts[place - 1]
        if place == len(self.counts):
            return self.curves[-1](length) * count / low
        if low == count:
            return self.curves[place - 1](length)
        share = log(count / low) / log(self.counts[place] / low)
        below, above = self.curves[place - 1](length), self.curves[place](length)
        return exp((1.0 - share) * log(below) + share * log(above))

    def lengths(self, count: float) -> list[float]:
        """The lengths that were measured at the numbers next to this one."""
        place = bisect_right(self.counts, count * self._wide)
        near = self.curves[max(place - 1, 0) : place + 1]
        return sorted({length for curve in near for length in curve.sizes})


class Products:
    """Seconds of products of `rows` × `inputs` by `inputs` × `outputs`, at any of the two widths.

    `measured` has the rows and the seconds of each (outputs, inputs).
    """

    def __init__(self, measured: Mapping[tuple[int, int], tuple[Floats, Floats]]) -> None:
        self._measured = measured
        self._outputs = sorted({outputs for outputs, _ in measured})
        self._inputs = sorted({inputs for _, inputs in measured})

    @classmethod
    def of(cls, outputs: Floats, inputs: Floats, rows: Floats, seconds: Floats) -> Products:
        """From the columns of a table; of several kernels for a shape the fastest counts."""
        order = np.lexsort((seconds, rows, inputs, outputs))
        keys = np.stack([outputs[order], inputs[order], rows[order]])
        first = np.append(True, (keys[:, 1:] != keys[:, :-1]).any(axis=0))
        keys, kept = keys[:, first], seconds[order][first]
        begins = np.flatnonzero(np.append(True, (keys[:2, 1:] != keys[:2, :-1]).any(axis=0)))
        ends = [*begins[1:], keys.shape[1]]
        return cls(
            {
                (int(keys[0, begin]), int(keys[1, begin])): (keys[2, begin:end], kept[begin:end])
                for begin, end in zip(begins, ends, strict=True)
            }
        )

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """The measured widths: (outputs, inputs)."""
        return list(self._measured)

    def curve(
        self, outputs: float, inputs: float, without: tuple[int, int] | None = None
    ) -> Curve | None:
        """Seconds by rows, from the measured widths around these.

        `without` leaves a shape out, and with it both lines of the grid that cross there.
        """
        near = [
            ((wide, deep), share * part)
            for wide, share in _around(self._outputs, outputs, without and without[0])
            for deep, part in _around(self._inputs, inputs, without and without[1])
            if (wide, deep) in self._measured
        ]
        total = sum(share for _, share in near)
        if not near or not total:
            return None
        columns = [(*self._measured[shape], share / total) for shape, share in near]
        common = reduce(np.intersect1d, [rows for rows, *_ in columns])
        beyond = max(outputs / self._outputs[-1], 1.0) * max(inputs / self._inputs[-1], 1.0)
        summed = np.full(len(common), log(beyond))
        for rows, seconds, share in columns:
            summed += share * np.log(seconds[np.isin(rows, common)])
        return Curve(common.tolist(), np.exp(summed).tolist()) if len(common) else None


def _around(sizes: list[int], size: float, without: int | None) -> list[tuple[int, float]]:
    """The sizes next to this one, each with its share in it."""
    if without is not None:
        sizes = [other for other in sizes if other != without]
    place = bisect_right(sizes, size)
    if place == 0:
        return [(sizes[0], 1.0)]
    low = sizes[place - 1]
    if place == len(sizes) or low == size:
        return [(low, 1.0)]
    share = log(size / low) / log(sizes[place] / low)
    return [(low, 1.0 - share), (sizes[place], share)]
