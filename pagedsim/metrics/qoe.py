"""The quality of experience of those who read answers while they are written.

Andes (2404.16283) sets the times at which a reader takes in each token against those at which it
could at best: the first after a time to first token that is as good as none, the others at the
speed of reading. Of all the time that the reader spent until each token, added up over tokens,
QoE is the share that was no delay.

A reader takes in no token before it is there, none sooner than at best, and none faster than it
reads, so tokens that come early make up for later gaps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagedsim.core.errors import require_number

Floats = NDArray[np.float64]
Counts = NDArray[Any]

_AT_ONCE = 1 << 13
"""Tokens that are looked at in one go."""


@dataclass(frozen=True)
class Reader:
    """What is expected of an answer, in seconds and in tokens a second.

    Unless told, as Andes has it for text chat: a first token as soon as a web page is to be there
    (1.3 s), and the speed at which people read (4.8 tokens/s).
    """

    ttft: float = 1.3
    tokens_per_s: float = 4.8

    def __post_init__(self) -> None:
        require_number("qoe.ttft", self.ttft, 0)
        require_number("qoe.tokens_per_s", self.tokens_per_s, above=0)

    def qoe(
        self,
        arrival: Floats,
        first: Floats,
        last: Floats,
        tokens: Counts,
        begin: Counts,
        steps: Counts,
        ends: Floats,
    ) -> Floats:
        """The QoE of answers whose tokens came at their first token and at ends of decode steps:
        so many `steps` of `ends`, from `begin` on.

        Exact for whoever decoded in each step between. One that missed some, because it was
        preempted or held, has its tokens spread evenly over these steps.
        """
        late = self._late(arrival + self.ttft, first, last, tokens, begin, steps, ends)
        return self._share(late, tokens)

    def qoe_of_times(self, arrival: Floats, tokens: Counts, came: Sequence[Floats]) -> Floats:
        """The QoE of answers of which it is known when each part came.

        Where an answer has more tokens than parts, each part has equally many of them.
        """
        pace, late = 1 / self.tokens_per_s, np.zeros(len(arrival))
        for row, (times, count) in enumerate(zip(came, tokens.tolist(), strict=True)):
            if count and len(times):
                each = times[np.arange(count) * len(times) // count]
                best = arrival[row] + self.ttft + np.arange(count) * pace
                late[row] = np.maximum(np.maximum.accumulate(each - best), 0).sum()
        return self._share(late, tokens)

    def _share(self, late: Floats, tokens: Counts) -> Floats:
        """QoE of answers that were late by so many seconds, added up over their tokens."""
        reading = tokens * (tokens - 1.0) / (2 * self.tokens_per_s)
        whole = tokens * self.ttft + reading + late
        return 1 - np.divide(late, whole, out=np.zeros(len(late)), where=whole > 0)

    def _late(
        self,
        best: Floats,
        first: Floats,
        last: Floats,
        tokens: Counts,
        begin: Counts,
        steps: Counts,
        ends: Floats,
    ) -> Floats:
        """Seconds by which tokens are taken in later than at best, added up for each request."""
        pace = 1 / self.tokens_per_s
        delay = np.maximum(first - best, 0)
        # No step known: all after the first came with the last.
        rest = np.where(steps > 0, delay, np.maximum(delay, last - best - pace))
        total = delay + (tokens - 1) * rest
        # Where nobody missed a step, the token of a step is late by what the step ended after the
        # reader's pace: only a request with a step beyond its delay so far needs a look at each.
        ahead = np.arange(len(ends) + 1.0)
        ahead *= pace
        np.subtract(ends, ahead[:-1], out=ahead[:-1])
        ahead[-1] = -np.inf  # an end may be one past the last
        due = best + pace - begin * pace
        odd = (steps != tokens - 1) | (_highest(ahead, begin, steps) - due > delay)
        some = np.flatnonzero(odd & (tokens > 1) & (steps > 0))
        some = some[np.argsort(-tokens[some], kind="stable")]
        if not len(some):
            return total
        late = _Spread(tokens[some], steps[some], begin[some], last[some], best[some])
        total[some] = late.sums(delay[some], pace, ends)
        return total


class _Spread(NamedTuple):
    """Answers of several tokens, the longest first, which lie evenly over the steps of each."""

    tokens: Counts
    steps: Counts
    begin: Counts
    last: Floats
    best: Floats

    def sums(self, delay: Floats, pace: float, ends: Floats) -> Floats:
        """The delay of the first token of each and those of all after it, added up.

        Some tokens of every answer are looked at in one go.
        """
        gaps, sums = self.tokens - 1, delay.copy()
        most, number = int(gaps[0]), 1
        longer = np.searchsorted(-gaps, -np.arange(1, most + 1), side="right")
        while number <= most:
            some = int(longer[number - 1])
            end = min(number + max(_AT_ONCE // some, 1), most + 1)
            numbers = np.arange(number, end)[:, None]
            left = gaps[:some] - numbers
            # Who has more after a token gets it with a step, the others have their last.
            step = self.begin[:some] - (-numbers * self.steps[:some] // gaps[:some]) - 1
            came = np.where(left > 0, ends[np.where(left > 0, step, 0)], self.last[:some])
            late = came - self.best[:some] - numbers * pace
            late[0] = np.maximum(late[0], delay[:some])
            np.maximum.accumulate(late, axis=0, out=late)
            delay[:some] = late[-1]
            late[left < 0] = 0.0
            late[0] += sums[:some]
            sums[:some] = np.add.accumulate(late, axis=0)[-1]
            number = end
        return sums


def decoded(ends: Floats, first: Floats, last: Floats) -> tuple[Counts, Counts]:
    """Of the ends of decode steps, where those after the first token of each answer begin, and how
    many there are up to its last."""
    begin = np.searchsorted(ends, first, side="right")
    return begin, np.searchsorted(ends, last, side="right") - begin


def _highest(values: Floats, begin: Counts, count: Counts) -> Floats:
    """The largest of `count` values from `begin` on, of which one more is there than may be looked
    at; minus infinity for none."""
    found = np.full(len(begin), -np.inf)
    some = np.flatnonzero(count > 0)
    some = some[np.argsort(begin[some], kind="stable")]
    pairs = np.stack([begin[some], begin[some] + count[some]], axis=1).ravel()
    found[some] = np.maximum.reduceat(values, pairs)[::2] if len(some) else 0.0
    return found
