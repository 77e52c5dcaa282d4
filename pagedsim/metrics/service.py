"""Service of clients over time, and the largest gap between clients.

Service is defined as in VTC (2401.00588): 1 per prompt token, counted when the first token is
output, and 2 per output token. A client is backlogged ("waits") while any of its requests is in the
queue without having been scheduled; waiting after a preemption is not recorded and does not count.

A decoding request gets a token at the end of each decode step of its `stretches`. Without these, as
in the log of another server, tokens are spread evenly over the time from the first to the last.
Either way a client's service is a sum of ramps and jumps, and differences are extreme at the ends
of ramps, so they are exact without visiting every step. Steps of several replicas are not on one
clock: there each token is a jump, or, of more than `TOKENS`, they are spread, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pagedsim.metrics.token_times import Stretches

Floats = NDArray[np.float64]
Whole = NDArray[np.int64]


@dataclass(frozen=True)
class Spans:
    """Intervals of time per client; those of one client are ordered and disjoint."""

    client: Whole
    begin: Floats
    end: Floats

    def of(self, client: int) -> Spans:
        """The intervals of one client."""
        some = slice(*np.searchsorted(self.client, (client, client + 1)))
        return Spans(self.client[some], self.begin[some], self.end[some])

    def which(self, times: Floats, before: bool = False) -> Whole:
        """For one client: the interval that contains each time, -1 for none.

        Intervals are closed; with `before`, open at the beginning.
        """
        span = np.searchsorted(self.begin, times, "left" if before else "right") - 1
        inside = (span >= 0) & (times <= self.end[span]) if len(self.end) else span >= 0
        return np.where(inside, span, -1)


def covered(client: Whole, begin: Floats, end: Floats, depth: int = 1) -> Spans:
    """The intervals in which at least `depth` of a client's overlap; touching ones are merged."""
    some = end > begin
    owner = np.tile(client[some], 2)
    times = np.concatenate([begin[some], end[some]])
    change = np.repeat([1, -1], len(times) // 2)
    order = np.lexsort((-change, times, owner))
    now = np.cumsum(change[order])
    before = now - change[order]
    opens, closes = (now == depth) & (before < depth), (now < depth) & (before == depth)
    owner, times = owner[order], times[order]
    spans = Spans(owner[opens], times[opens], times[closes])
    long = spans.end > spans.begin
    return Spans(spans.client[long], spans.begin[long], spans.end[long])


def together(first: Spans, other: Spans) -> Spans:
    """The intersection of two clients' intervals."""
    begin, end = np.append(first.begin, other.begin), np.append(first.end, other.end)
    return covered(np.zeros(len(begin), dtype=np.int64), begin, end, 2)


@dataclass(frozen=True)
class Looks:
    """Evaluation times and the service at them; `before`: just before."""

    times: Floats
    clock: Floats
    values: Floats
    before: bool


@dataclass(frozen=True)
class Curve:
    """Piecewise linear service: `slope` per tick of `clock` from each of `times` on."""

    times: Floats
    clock: Floats
    level: Floats
    slope: Floats
    waits: Spans
    looks: tuple[Looks, ...]
    """Ends of its waiting intervals, knots within, and the values just before jumps."""

    def at(self, looks: Looks) -> Floats:
        """Service at the evaluation times of another curve."""
        place = np.searchsorted(self.times, looks.times, "left" if looks.before else "right") - 1
        return self.level[place] + self.slope[place] * (looks.clock - self.clock[place])


def widest_gap(first: Curve, other: Curve) -> float | None:
    """The largest difference in service over any interval in which both waited; None if they never
    did."""
    both = together(first.waits, other.waits)
    if not len(both.begin):
        return None
    groups, values = [], []
    for mine, its, sign in ((first, other, 1.0), (other, first, -1.0)):
        for looks in mine.looks:
            group = both.which(looks.times, looks.before)
            some = group >= 0
            joint = Looks(looks.times[some], looks.clock[some], looks.values[some], looks.before)
            groups.append(group[some])
            values.append(sign * (joint.values - its.at(joint)))
    group = np.concatenate(groups)
    order = np.argsort(group, kind="stable")
    starts = np.flatnonzero(np.diff(group[order], prepend=-1))
    every = np.concatenate(values)[order]
    return float((np.maximum.reduceat(every, starts) - np.minimum.reduceat(every, starts)).max())


PROMPT, OUTPUT = 1.0, 2.0
"""Weights of a prompt token and an output token."""
MOST = 32
"""Maximum number of clients that are compared pairwise."""
AT_ONCE = 1 << 20
"""Values per vectorised chunk."""
TOKENS = 1 << 22
"""Maximum number of tokens of several replicas whose times are taken one by one."""
LOOKS = 1 << 24
"""Maximum number of values evaluated for all clients at all times."""


def service_of(prompt: ArrayLike, output: ArrayLike, first_token: Floats) -> Floats:
    """Total service of requests; a prompt counts once the first token is output."""
    prompts = np.where(np.isnan(first_token), 0.0, prompt)
    return PROMPT * prompts + OUTPUT * np.asarray(output, dtype=np.float64)


class ServiceOverTime:
    """Cumulative service of each client at any time. Clients are numbered from 0.

    Arrays have an entry per request, NaN for events that did not happen. A request that was not
    `scheduled` waited until it `finished` or until the end; without `scheduled`, requests wait for
    their first tokens. `output` are the tokens of one of its `sequences`. `alone`: the stretches
    are those of one replica.
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
        stretches: Stretches | None = None,
        alone: bool = True,
    ) -> None:
        self.clients = int(client.max(initial=-1)) + 1
        ends = None if stretches is None else stretches.ends
        self._ends = ends if alone else None
        known = [np.zeros(1), arrival, first_token, finished]
        over = np.nanmax(np.concatenate(known if ends is None else [*known, ends]))
        left = np.where(np.isnan(finished), over, finished)
        out = np.where(np.isnan(first_token), left, first_token)
        began = out if scheduled is None else np.where(np.isnan(scheduled), left, scheduled)
        self.waits = covered(client.astype(np.int64), arrival, began)
        token = OUTPUT * (np.ones(len(client)) if sequences is None else sequences)
        tokens = np.where(np.isnan(first_token), 0, output)
        if stretches is not None and not alone and tokens.sum() <= TOKENS:
            whose = np.repeat(np.arange(len(client)), tokens)
            number = np.arange(len(whose)) - np.searchsorted(whose, whose)
            first = last = stretches.at(whose, number)
            is_first, count = number == 0, np.ones(len(whose))
        elif stretches is not None and alone:
            whose, count = stretches.request, stretches.count
            first, last, is_first = stretches.start, stretches.last, stretches.before == 0
        else:
            whose = np.flatnonzero(~np.isnan(first_token))
            first, last, is_first, count = out[whose], left[whose], True, output[whose]
        # A ramp starts with a jump: its first token, and before that of the request the prompt.
        jump = PROMPT * prompt[whose] * is_first + token[whose]
        self._knots(client[whose], first, last, jump, token[whose] * np.maximum(count - 1.0, 0))

    def at(self, client: ArrayLike, times: Floats, before: bool = False) -> Floats:
        """Service of a client up to a time, exclusive with `before`."""
        rank = np.searchsorted(self._times, times, "left" if before else "right")
        place = np.searchsorted(self._keys, np.asarray(client) * self._stride + rank, "right") - 1
        gone = self._clock(times, before) - self._when[place]
        return np.asarray(self._level[place] + self._slope[place] * gone)

    def gap_while_waiting(self) -> float | None:
        """The largest difference in service between two clients over any interval in which both had
        requests waiting; None if no two ever had.

        Up to `MOST` clients are all compared pairwise. Of more, only those with the most and the
        least service relative to the mean rate of waiting clients are, half of each, so the result
        is a lower bound.
        """
        curves = [self._curve(client) for client in self._farthest()]
        gaps = [widest_gap(curve, other) for curve, other in combinations(curves, 2)]
        return max((gap for gap in gaps if gap is not None), default=None)

    def gap_since_start(self, until: float = np.inf) -> float | None:
        """The largest difference in cumulative service between two clients at any time up to
        `until`, whether they had requests or not; None for fewer than two clients.

        Above `LOOKS` values (clients times requests), changes are subsampled.
        """
        if self.clients < 2:
            return None
        every = self._times[self._times <= until]
        every = np.append(every, until) if np.isfinite(until) else every
        every = every[:: -(-2 * self.clients * len(every) // LOOKS)] if len(every) else every
        largest, size = 0.0, max(AT_ONCE // self.clients, 1)
        for begin in range(0, len(every), size):
            times = every[begin : begin + size]
            for before in (True, False):
                values = self.at(np.arange(self.clients)[:, None], times[None, :], before)
                largest = max(largest, float(np.ptp(values, axis=0).max()))
        return largest

    def rates_while_waiting(self) -> Floats:
        """Service per second of each client while it had requests waiting; NaN if it never had."""
        gain, seconds = self._while_waiting()
        return np.divide(gain, seconds, out=np.full(len(gain), np.nan), where=seconds > 0)

    # -- representation ------------------------------------------------------------------------

    def _knots(
        self, client: NDArray[Any], first: Floats, last: Floats, jump: Floats, more: Floats
    ) -> None:
        """Store level and slope from each knot on, for each client in order of time.

        A knot's key combines its client and the rank of its time; a client's first knot, of rank 0,
        precedes all others, so a binary search over the keys works for any client and time.
        """
        steps = self._clock(last) - self._clock(first)
        slope = np.divide(more, steps, out=np.zeros(len(more)), where=steps > 0)
        late = np.where(steps > 0, 0.0, more)  # a jump, if there are no steps
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
        """The axis along which tokens are evenly spaced: completed decode steps, or time."""
        if self._ends is None:
            return np.asarray(times)
        steps = np.searchsorted(self._ends, times, "left" if before else "right")
        return steps.astype(np.float64)

    def _while_waiting(self) -> tuple[Floats, Floats]:
        """Service of each client while it waited, and the time it waited."""
        client, begin, end = self.waits.client, self.waits.begin, self.waits.end
        gain = np.bincount(client, self.at(client, end) - self.at(client, begin), self.clients)
        seconds = np.bincount(client, end - begin, self.clients)
        return gain.astype(np.float64), seconds.astype(np.float64)

    def _farthest(self) -> list[int]:
        """Clients that ever waited: all, or those farthest from the mean."""
        gain, seconds = self._while_waiting()
        waited = np.flatnonzero(seconds > 0)
        if len(waited) <= MOST:
            return waited.tolist()
        beyond = (gain - gain.sum() / seconds.sum() * seconds)[waited]
        order = waited[np.argsort(beyond, kind="stable")]
        return [*order[: MOST // 2].tolist(), *order[-(MOST // 2) :].tolist()]

    def _curve(self, client: int) -> Curve:
        """One client's curve, with the times at which to evaluate it in comparisons."""
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
    """Jain's index: 1 if all are equal, 1/n if one has everything; None for fewer than two."""
    known = rates[~np.isnan(rates)]
    squares = float(known @ known)
    if len(known) < 2 or not squares:
        return None
    return float(known.sum()) ** 2 / (len(known) * squares)
