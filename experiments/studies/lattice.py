"""The least of many: which numbers of replicas meet an objective, at the least cost.

More replicas are taken never to be worse: where some numbers miss the objective, so do all that are
at most as large in each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

Counts = tuple[int, ...]
"""Replicas of each kind."""

_SAME = 1e-9
"""Costs no further apart are the same."""


class Lattice:
    """All numbers of replicas up to `most` of each kind, and what is known of each.

    Short runs look for the cheapest that meets the objective, long runs confirm it and try one
    replica less of each kind. Where long runs miss it, the cheapest that is left is next. What is
    asked depends on the answers alone, so the same answers ask the same.
    """

    def __init__(self, prices: Sequence[float], most: int) -> None:
        """`prices`: of a replica of each kind."""
        lines = [price * np.arange(1, most + 1, dtype=np.float64) for price in prices]
        self._costs: NDArray[np.float64] = reduce(np.add.outer, lines)
        self._open = np.ones(self._costs.shape, dtype=np.bool_)  # not known to miss
        self._floor = np.ones(len(prices), dtype=np.int64)
        self.short: dict[Counts, bool] = {}
        self.long: dict[Counts, bool] = {}

    def tell(self, counts: Counts, met: bool, long: bool) -> None:
        (self.long if long else self.short)[counts] = met
        if not met:
            self._open[tuple(slice(count) for count in counts)] = False

    def take(self, kind: int, least: int | None) -> None:
        """At least `least` replicas of a kind are needed; None: more than `most`."""
        line = np.moveaxis(self._open, kind, 0)
        line[: None if least is None else least - 1] = False
        self._floor[kind] = len(line) if least is None else least

    def cost(self, counts: Counts) -> float:
        return float(self._costs[_place(counts)])

    @property
    def least(self) -> int | None:
        """Fewest replicas of the first kind that are not known to miss; None if all are."""
        left = np.argwhere(self._open)
        return int(left[:, 0].min()) + 1 if len(left) else None

    @property
    def best(self) -> Counts | None:
        """The cheapest confirmed by long runs."""
        return self._cheapest(self.long)

    @property
    def likely(self) -> Counts | None:
        """The cheapest that meets it as far as is known."""
        left = {counts: met and self._open[_place(counts)] for counts, met in self.short.items()}
        return self.best or self._cheapest(left)

    @property
    def bound(self) -> float:
        """Lower bound of the cost; infinite if nothing meets it."""
        if self.best is not None:
            return self.cost(self.best)
        return float(np.where(self._open, self._costs, inf).min())

    @property
    def expected(self) -> float:
        """The cost of the best known fleet, or of the next one once long runs have missed it."""
        if self.long and self.best is None:
            return self.bound
        return inf if self.likely is None else self.cost(self.likely)

    def next_short(self, limit: float) -> Counts | None:
        """What a short run is to try, if anything that costs `limit` at most is worth it."""
        if self.long:
            return None
        under = inf if self.likely is None else self.cost(self.likely) - _SAME
        asked = self._open & (self._costs < under) & (self._costs <= limit + _SAME)
        if not asked.any():
            return None
        if self.likely is None:  # 1, 2, 4, ... times the least of each kind
            for power in range(len(asked).bit_length()):
                counts = _counts(np.minimum(self._floor << power, len(asked)) - 1)
                if asked[_place(counts)]:
                    return counts
        # A miss settles all that are at most as large, and a hit all that are at least as dear: the
        # one that settles most, whatever comes of it.
        below = asked.astype(np.int64)
        for axis in range(asked.ndim):
            below = below.cumsum(axis)
        costs = np.sort(self._costs[asked])
        above = len(costs) - np.searchsorted(costs, self._costs - _SAME)
        settled = np.where(asked, np.minimum(below, above), -1)
        return _counts(np.unravel_index(int(settled.argmax()), settled.shape))

    def next_long(self, limit: float) -> list[Counts]:
        """What long runs are to try: what seems cheapest, then its neighbours with a replica
        less."""
        if self.expected > limit + _SAME:
            return []
        if (best := self.best) is not None:
            less = [
                tuple(count - (number == kind) for number, count in enumerate(best))
                for kind, count in enumerate(best)
                if count > 1
            ]
            return [counts for counts in less if counts not in self.long]
        if not self.long:
            return [] if self.likely is None else [self.likely]
        left = np.argwhere(self._open & (self._costs <= self.bound + _SAME))
        alike = [_counts(place) for place in left]
        # Of these that cost the same, what short runs have found, or else the most even.
        return [max(alike, key=lambda counts: (self.short.get(counts, False), min(counts)))]

    def _cheapest(self, known: dict[Counts, bool]) -> Counts | None:
        met = [counts for counts, yes in known.items() if yes]
        return min(met, key=lambda counts: (round(self.cost(counts), 9), counts), default=None)


def _place(counts: Counts) -> Counts:
    return tuple(count - 1 for count in counts)


def _counts(place: Iterable[np.integer[Any]]) -> Counts:
    return tuple(int(index) + 1 for index in place)
