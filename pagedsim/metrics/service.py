"""The service that clients get over time, and how far apart they come to be.

Service is what the authors of VTC (2401.00588) count: 1 for each token of a prompt, all of it when
the first token is out, and 2 for each token of the answer. A client waits while any of its requests
is in the queue without ever having been scheduled; when one that was preempted waits again no table
tells, so that does not count.

Who decodes gets a token at each end of a decode step (`ends`); one that missed some steps has its
tokens spread evenly over those between its first and its last. Where `ends` are not known, as in
the log of another server, tokens come evenly over time. Either way the service of a client is a sum
of ramps and jumps, and differences are largest where some ramp begins or ends: so they are exact,
without a look at every step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

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


@dataclass(frozen=True)
class Looks:
    """Times at which to look, and what had been got then; `before`: just before."""

    times: Floats
    clock: Floats
    values: Floats
    before: bool


@dataclass(frozen=True)
class Curve:
    """From each of `times` on, of which the first is before all, `slope` a tick of `clock`."""

    times: Floats
    clock: Floats
    level: Floats
    slope: Floats
    waits: Spans
    looks: tuple[Looks, ...]
    """Beginning and end of what it waits, its knots within, and what was before they jumped."""

    def at(self, looks: Looks) -> Floats:
        """What it had got, at the times of another's looks."""
        place = np.searchsorted(self.times, looks.times, "left" if looks.before else "right") - 1
        return self.level[place] + self.slope[place] * (looks.clock - self.clock[place])


def widest_gap(one: Curve, other: Curve) -> float | None:
    """The largest difference between what two got within any time in which both waited; None if
    they never did."""
    both = together(one.waits, other.waits)
    if not len(both.begin):
        return None
    groups, values = [], []
    for mine, its, sign in ((one, other, 1.0), (other, one, -1.0)):
        for looks in mine.looks:
            group = both.which(looks.times, looks.before)
            some = group >= 0
            here = Looks(looks.times[some], looks.clock[some], looks.values[some], looks.before)
            groups.append(group[some])
            values.append(sign * (here.values - its.at(here)))
    return _widest(np.concatenate(groups), np.concatenate(values))


def _widest(group: NDArray[np.int64], values: Floats) -> float:
    """The largest difference between two values of one group."""
    order = np.argsort(group, kind="stable")
    starts = np.flatnonzero(np.diff(group[order], prepend=-1))
    some = values[order]
    return float((np.maximum.reduceat(some, starts) - np.minimum.reduceat(some, starts)).max())


PROMPT, OUTPUT = 1.0, 2.0
"""What a token of a prompt and one of an answer are worth."""
MOST = 32
"""So many clients are compared pair by pair."""
AT_ONCE = 1 << 20
"""Values that are looked at in one go."""
LOOKS = 1 << 24
"""So many values are looked at, at most, where those of all clients are needed at all times."""


def service_of(prompt: ArrayLike, output: ArrayLike, first_token: Floats) -> Floats:
    """What requests got in all; a prompt counts once its first token is out."""
    prompts = np.where(np.isnan(first_token), 0.0, prompt)
    return PROMPT * prompts + OUTPUT * np.asarray(output, dtype=np.float64)


class ServiceOverTime:
    """What each client got until any time. Clients are numbers from 0 on.

    Arrays have an entry a request: what never came is NaN. A request that was not `scheduled`
    waited until it `finished`, or to the end of it all; without `scheduled`, all waited for their
    first tokens. `output` are tokens of one of its `sequences`.
    """

    def __init__(
        self,
        client: NDArray[Any],
        arrival: Floats,
        first_token: Floats,
        finished: Floats,
        prompt: NDArray[Any],
        output: NDArray[Any],
        *,
        scheduled: Floats | None = None,
        sequences: NDArray[Any] | None = None,
        ends: Floats | None = None,
    ) -> None:
        self.clients = int(client.max(initial=-1)) + 1
        self._ends = ends
        over = np.nanmax([0.0, *(_last(some) for some in (arrival, first_token, finished, ends))])
        left = np.where(np.isnan(finished), over, finished)
        out = np.where(np.isnan(first_token), left, first_token)
        began = out if scheduled is None else np.where(np.isnan(scheduled), left, scheduled)
        self.waits = covered(client.astype(np.int64), arrival, began)
        got = ~np.isnan(first_token)
        token = OUTPUT * (np.ones(len(client)) if sequences is None else sequences)[got]
        more = token * np.maximum(output[got] - 1.0, 0)
        # Ramps begin with a jump, of the prompt and the first token.
        self._knots(client[got], out[got], left[got], PROMPT * prompt[got] + token, more)

    def at(self, client: ArrayLike, times: Floats, before: bool = False) -> Floats:
        """What a client had got at a time; `before`: without what came at that very time."""
        rank = np.searchsorted(self._times, times, "left" if before else "right")
        place = np.searchsorted(self._keys, np.asarray(client) * self._stride + rank, "right") - 1
        gone = self._clock(times, before) - self._when[place]
        return np.asarray(self._level[place] + self._slope[place] * gone)

    def gap_while_waiting(self) -> float | None:
        """The largest difference between what two clients got within any time in which both had
        requests waiting; None where no two ever had.

        All pairs of up to `MOST` clients are compared, which takes as long as the requests of
        each, for each other. Of more, those are which got the most and the least beyond the mean
        rate of all who wait, half of each: so it is then a lower bound.
        """
        curves = [self._curve(client) for client in self._farthest()]
        gaps = [widest_gap(one, other) for one, other in combinations(curves, 2)]
        return max((gap for gap in gaps if gap is not None), default=None)

    def gap_since_start(self, until: float = np.inf) -> float | None:
        """The largest difference between what two clients got since the beginning, whether they
        had requests or not, at any time up to `until`; None where there are not two.

        Where clients times requests are very many (`LOOKS`), not every change is looked at.
        """
        if self.clients < 2:
            return None
        every = self._times[self._times <= until]
        every = np.append(every, until) if np.isfinite(until) else every
        every = every[:: -(-2 * self.clients * len(every) // LOOKS)] if len(every) else every
        largest = 0.0
        for times in _parts(every, max(AT_ONCE // self.clients, 1)):
            for before in (True, False):
                values = self.at(np.arange(self.clients)[:, None], times[None, :], before)
                largest = max(largest, float(np.ptp(values, axis=0).max()))
        return largest

    def rates_while_waiting(self) -> Floats:
        """Service a second of each client while it had requests waiting; NaN if it never had."""
        gain, seconds = self._while_waiting()
        return np.divide(gain, seconds, out=np.full(len(gain), np.nan), where=seconds > 0)

    # -- how it is kept ------------------------------------------------------------------------

    def _knots(
        self, client: NDArray[Any], first: Floats, last: Floats, jump: Floats, more: Floats
    ) -> None:
        """Keep, for each client in order of time, level and slope from each knot on.

        A knot's key is its client and the rank of its time, and a client's first knot, of rank 0,
        is before all: so a search among the keys finds what holds for any client at any time.
        """
        steps = self._clock(last) - self._clock(first)
        slope = np.divide(more, steps, out=np.zeros(len(more)), where=steps > 0)
        late = np.where(steps > 0, 0.0, more)  # all at once, where no step is known
        self._times = np.unique(np.concatenate([first, last]))
        self._stride = len(self._times) + 1
        starts = np.arange(self.clients, dtype=np.int64) * self._stride
        of = np.tile(client.astype(np.int64) * self._stride, 2)
        when = np.concatenate([first, last])
        keys = np.concatenate([starts, of + np.searchsorted(self._times, when) + 1])
        order = np.argsort(keys, kind="stable")
        none = np.zeros(self.clients)
        self._keys = keys[order]
        self._when = np.concatenate([none, self._clock(when)])[order]
        self._jump = np.concatenate([none, jump, late])[order]
        self._slope = np.cumsum(np.concatenate([none, slope, -slope])[order])
        rise = self._jump.copy()
        rise[1:] += self._slope[:-1] * np.diff(self._when)
        sentinel = np.searchsorted(self._keys, starts)
        rise[sentinel] = 0.0
        level = np.cumsum(rise)
        self._level = level - level[sentinel[self._keys // self._stride]]

    def _clock(self, times: Floats, before: bool = False) -> Floats:
        """What tokens come evenly along: decode steps that ended, or time."""
        if self._ends is None:
            return np.asarray(times)
        steps = np.searchsorted(self._ends, times, "left" if before else "right")
        return steps.astype(np.float64)

    def _while_waiting(self) -> tuple[Floats, Floats]:
        """What each client got while it waited, and for how long it did."""
        who, begin, end = self.waits.client, self.waits.begin, self.waits.end
        gain = np.bincount(who, self.at(who, end) - self.at(who, begin), self.clients)
        seconds = np.bincount(who, end - begin, self.clients)
        return gain.astype(np.float64), seconds.astype(np.float64)

    def _farthest(self) -> list[int]:
        """Clients that ever waited: all, or those farthest from the mean."""
        gain, seconds = self._while_waiting()
        there = np.flatnonzero(seconds > 0)
        if len(there) <= MOST:
            return there.tolist()
        beyond = (gain - gain.sum() / seconds.sum() * seconds)[there]
        order = there[np.argsort(beyond, kind="stable")]
        return [*order[: MOST // 2].tolist(), *order[-(MOST // 2) :].tolist()]

    def _curve(self, client: int) -> Curve:
        """One client's own part of it, with where to look when it is compared."""
        start = client * self._stride
        low, high = np.searchsorted(self._keys, (start, start + self._stride))
        times = np.append(-np.inf, self._times[self._keys[low + 1 : high] - start - 1])
        some = slice(low, high)
        waits = self.waits.of(client)
        when = np.concatenate([waits.begin, waits.end, times[waits.which(times) >= 0]])
        jumps = times[self._jump[some] > 0]
        jumps = jumps[waits.which(jumps, before=True) >= 0]
        looks = tuple(
            Looks(at, self._clock(at, before), self.at(client, at, before), before)
            for at, before in ((when, False), (jumps, True))
        )
        parts = (self._when[some], self._level[some], self._slope[some])
        return Curve(times, *parts, waits, looks)


def jain(rates: Floats) -> float | None:
    """Jain's index: 1 where all are alike, 1/n where one has it all; None for fewer than two."""
    there = rates[~np.isnan(rates)]
    squares = float(there @ there)
    if len(there) < 2 or not squares:
        return None
    return float(there.sum()) ** 2 / (len(there) * squares)


def _parts(values: Floats, size: int) -> Iterator[Floats]:
    return (values[begin : begin + size] for begin in range(0, len(values), size))


def _last(values: Floats | None) -> float:
    there = np.zeros(0) if values is None else values[~np.isnan(values)]
    return float(there.max(initial=0.0))
