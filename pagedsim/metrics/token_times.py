"""When each token of each request came: by the ends of decode steps, without a record per token.

A decoding request gets a token at the end of every decode step of its server, so its tokens are
*stretches* over consecutive decode steps: one from its first token on, and another from each token
that came after a pause, in which it was preempted, held back by the batching, or on its way to
another replica. The recorder has where those begin, so token times are exact. The sequences of a
request get their tokens together, and count once.

Where that does not lead to the last token, since the steps are those of another server or take no
time, tokens are *spread* evenly over the time from the first to the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Counts = NDArray[Any]
Mask = NDArray[np.bool_]

AT_ONCE = 1 << 18
"""Steps per vectorised chunk."""


class Resumptions(NamedTuple):
    """Stretches as they are recorded, in the order of each request's tokens."""

    request: Counts
    """Row of the request."""
    before: Counts
    """Tokens that it had before."""
    start: Floats
    """When its next token came."""
    replica: Counts


@dataclass(frozen=True)
class Stretches:
    """The tokens of requests; a request without a token has no stretch.

    Columns have an entry per stretch, ordered by request and by its tokens.
    """

    ends: Floats
    """Ends of the decode steps of all replicas, one replica after another."""
    request: Counts
    """Row of the request."""
    before: Counts
    """Tokens of the request before the stretch."""
    count: Counts
    start: Floats
    """When the first of them came."""
    last: Floats
    """When the last of them came."""
    begin: Counts
    """Index in `ends` of the second token, which the others follow; -1: times are spread evenly."""
    offsets: Counts
    """The first stretch of each request, and the end."""

    @classmethod
    def of(
        cls,
        first: Floats,
        last: Floats,
        tokens: Counts,
        ends: Sequence[Floats],
        replica: Counts | None = None,
        resumed: Resumptions | None = None,
    ) -> Stretches:
        """The stretches of requests by the times of their first and last tokens, the latter NaN if
        not known, and the ends of each replica's decode steps."""
        request: Counts = np.flatnonzero((tokens > 0) & ~np.isnan(first))
        before: Counts = np.zeros_like(request)
        start: Floats = first[request]
        where = np.zeros_like(request) if replica is None else np.maximum(replica[request], 0)
        if resumed is not None:
            moved = np.isin(request, resumed.request[resumed.before == 0])
            unmoved = (request[~moved], before[~moved], start[~moved], where[~moved])
            request, before, start, where = map(np.concatenate, zip(unmoved, resumed, strict=True))
            order = np.lexsort((before, request))
            request, before, start, where = (
                column[order] for column in (request, before, start, where)
            )
        ending = np.diff(request, append=-1) != 0
        after = np.append(before[1:], 0)
        count = np.where(ending, tokens[request], after) - before
        begin, stop = _steps(start, count, ends, where)
        every = ends[0] if len(ends) == 1 else np.concatenate(ends)
        came = start.copy()
        known = (count == 1) | (begin >= 0)
        some = known & (count > 1)
        came[some] = every[stop[some] - 1]
        known &= ~(ending & ~np.isnan(last[request]) & (came != last[request]))
        spread = np.zeros(len(first), dtype=bool)
        spread[request[~known]] = True
        kept = ~spread[request] | (before == 0)
        columns = [column[kept] for column in (request, before, count, start, came, begin)]
        request, before, count, start, came, begin = columns
        some = spread[request]
        whole = request[some]
        count[some], begin[some] = tokens[whole], -1
        came[some] = np.where(np.isnan(last[whole]), start[some], last[whole])
        offsets = np.searchsorted(request, np.arange(len(first) + 1))
        return cls(every, request, before, count, start, came, begin, offsets)

    @cached_property
    def spread(self) -> Mask:
        """Which requests have several tokens that are spread evenly, since their times are not
        known."""
        spread = np.zeros(len(self.offsets) - 1, dtype=bool)
        spread[self.request[(self.begin < 0) & (self.count > 2)]] = True
        return spread

    def gaps(self, requests: Mask) -> tuple[Floats, Floats]:
        """All gaps between consecutive tokens of some requests, as values and weights.

        Requests that decode in the same step share the gap before it, so those of a whole run are
        one value and one count per step.
        """
        chosen = requests[self.request]
        pause = self._pauses[chosen[1:] & (self.before[1:] > 0)]
        several = chosen & (self.count > 1)
        spread = several & (self.begin < 0)
        steps = several & (self.begin >= 0)
        begin, count = self.begin[steps], self.count[steps]
        between = np.bincount(begin + 1, minlength=len(self.ends) + 2)
        between -= np.bincount(begin + count - 1, minlength=len(self.ends) + 2)
        between = np.cumsum(between, out=between)[1 : len(self.ends)]
        few = [pause, self._mean_gaps[spread], self.ends[begin] - self.start[steps]]
        at = sum(map(len, few))
        values = np.empty(at + int(np.count_nonzero(between)))
        weights = np.ones_like(values)
        values[:at] = np.concatenate(few)
        weights[len(pause) : len(pause) + len(few[1])] = self.count[spread] - 1
        for low in range(0, len(between), AT_ONCE):  # chunks limit copies of millions of steps
            counts = between[low : low + AT_ONCE]
            some = counts > 0
            to = at + int(np.count_nonzero(some))
            values[at:to] = np.diff(self.ends[low : low + AT_ONCE + 1])[some]
            weights[at:to] = counts[some]
            at = to
        return values, weights

    def longest_gaps(self) -> Floats:
        """The longest gap between two tokens of each request; 0 with fewer than two."""
        longest = np.zeros(len(self.offsets) - 1)
        steps = np.flatnonzero((self.begin >= 0) & (self.count > 1))
        begin = self.begin[steps]
        np.maximum.at(longest, self.request[steps], self.ends[begin] - self.start[steps])
        gaps = np.diff(self.ends, append=-np.inf)
        np.maximum.at(longest, self.request[steps], highest(gaps, begin, self.count[steps] - 2))
        spread = (self.begin < 0) & (self.count > 1)
        np.maximum.at(longest, self.request[spread], self._mean_gaps[spread])
        later = self.before[1:] > 0
        np.maximum.at(longest, self.request[1:][later], self._pauses[later])
        return longest

    def at(self, requests: Counts, numbers: Counts) -> Floats:
        """When these tokens of these requests came, counted from 0 and at most the last."""
        stretch = self.offsets[requests]
        several = np.diff(self.offsets)[requests] > 1
        if several.any():
            # The last stretch that begins at or before the token.
            width = int(self.before.max(initial=0)) + int(self.count.max(initial=0)) + 1
            keys = self.request * width + self.before
            stretch = np.searchsorted(keys, requests * width + numbers, side="right") - 1
        place = numbers - self.before[stretch]
        begin = self.begin[stretch]
        times = self.start[stretch] + place * self._mean_gaps[stretch]
        if len(self.ends):
            steps = np.minimum(np.where(begin < 0, 0, begin + place - 1), len(self.ends) - 1)
            times = np.where((place > 0) & (begin >= 0), self.ends[steps], times)
        return times

    @cached_property
    def _pauses(self) -> Floats:
        """The time from the last token of each stretch but the last one to the next stretch."""
        return self.start[1:] - self.last[:-1]

    @cached_property
    def _mean_gaps(self) -> Floats:
        time = self.last - self.start
        return np.divide(time, self.count - 1, out=np.zeros(len(time)), where=self.count > 1)


def _steps(
    start: Floats, count: Counts, ends: Sequence[Floats], replica: Counts
) -> tuple[Counts, Counts]:
    """The decode steps of each stretch's tokens after the first, as [begin, stop) over the steps of
    all replicas; -1 where there are too few steps."""
    begin, stop = np.full((2, len(start)), -1)
    offset = 0
    for index, steps in enumerate(ends):
        some = np.flatnonzero(replica == index) if len(ends) > 1 else slice(None)
        low = np.searchsorted(steps, start[some], side="right")
        high = low + count[some] - 1
        complete = (high <= len(steps)) & (count[some] > 1)
        begin[some] = np.where(complete, low + offset, -1)
        stop[some] = np.where(complete, high + offset, -1)
        offset += len(steps)
    return begin, stop


def highest(values: Floats, begin: Counts, count: Counts) -> Floats:
    """The maximum of `count` values from `begin` on, minus infinity for none; `values` has one
    entry more than is used."""
    maxima = np.full(len(begin), -np.inf)
    some = np.flatnonzero(count > 0)
    some = some[np.argsort(begin[some], kind="stable")]
    pairs = np.stack([begin[some], begin[some] + count[some]], axis=1).ravel()
    maxima[some] = np.maximum.reduceat(values, pairs)[::2] if len(some) else 0.0
    return maxima
