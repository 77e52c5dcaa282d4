"""Stretches of time of clients, such as those in which each had requests waiting."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Whole = NDArray[np.int64]


@dataclass(frozen=True)
class Spans:
    """Stretches of time; those of one client are in order and do not touch."""

    client: Whole
    begin: Floats
    end: Floats

    def of(self, client: int) -> Spans:
        """Those of one client."""
        some = slice(*np.searchsorted(self.client, (client, client + 1)))
        return Spans(self.client[some], self.begin[some], self.end[some])

    def which(self, times: Floats, before: bool = False) -> Whole:
        """For one client: in which of them each time is, -1: in none.

        Both ends belong to it; with `before` the beginning does not.
        """
        span = np.searchsorted(self.begin, times, "left" if before else "right") - 1
        inside = (span >= 0) & (times <= self.end[span]) if len(self.end) else span >= 0
        return np.where(inside, span, -1)


def covered(client: Whole, begin: Floats, end: Floats, depth: int = 1) -> Spans:
    """When at least `depth` of a client's stretches of time overlap; what touches is one."""
    some = end > begin
    who = np.tile(client[some], 2)
    times = np.concatenate([begin[some], end[some]])
    change = np.repeat([1, -1], len(times) // 2)
    order = np.lexsort((-change, times, who))
    now = np.cumsum(change[order])
    before = now - change[order]
    opens, closes = (now == depth) & (before < depth), (now < depth) & (before == depth)
    who, times = who[order], times[order]
    spans = Spans(who[opens], times[opens], times[closes])
    long = spans.end > spans.begin
    return Spans(spans.client[long], spans.begin[long], spans.end[long])


def together(one: Spans, other: Spans) -> Spans:
    """When both of two clients have a stretch of time."""
    begin, end = np.append(one.begin, other.begin), np.append(one.end, other.end)
    return covered(np.zeros(len(begin), dtype=np.int64), begin, end, 2)
