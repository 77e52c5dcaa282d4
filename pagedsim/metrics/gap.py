"""Inter-token gaps, derived from the ends of steps instead of per-token records.

A decoding request gets a token at the end of every decode step, so its gaps are those between the
decode steps from its first token to its last. Requests that decode in the same step share the gap,
so the gaps of a whole run are one value and one count per step. The sequences of a request get
their tokens together; their gaps count once.

This is exact for requests that decoded in each of those steps. For one that missed some, because it
was preempted or held, number and sum of the gaps are exact, but the missed steps are not recorded:
its ordinary gaps are spread evenly over the steps between its first token and its last, and the
remaining time is split into one equal long gap per preemption. So counts and means are exact for
all requests, and percentiles are approximate only for preempted ones.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

AT_ONCE = 1 << 18
"""Steps per vectorised chunk."""
_DUST = 1e-6
"""Rounding error of a sum of fractions; smaller weights are 0."""


def token_gaps(
    ends: Floats,
    first: Floats,
    last: Floats,
    tokens: NDArray[Any],
    preemptions: NDArray[Any],
    begun: Floats | None = None,
) -> tuple[Floats, Floats]:
    """The gaps of finished requests with two tokens or more, as values and weights.

    `ends` are the ends of decode steps in order; the others have an entry per request. `begun` is
    when each started to decode in these steps; None: with its first token.
    """
    begin = np.searchsorted(ends, first if begun is None else begun, side="right")
    stop = np.searchsorted(ends, last, side="right")
    steps, count = stop - begin, tokens - 1.0
    some = steps > 0
    covered = np.zeros_like(count)
    covered[some] = ends[stop[some] - 1] - first[some]
    pauses = _pauses(steps, count, preemptions, whole=covered == last - first)
    weight = np.divide(count - pauses, steps, out=np.zeros_like(count), where=some)
    rest = (last - first) - weight * covered
    pause = np.divide(rest, pauses, out=np.zeros_like(count), where=pauses > 0)
    # Prefix sum of joining and leaving requests: the weight of each gap between decode steps.
    change = np.bincount(begin[some] + 1, weight[some], len(ends) + 1)
    change -= np.bincount(stop[some], weight[some], len(ends) + 1)
    between = np.cumsum(change, out=change)[1 : len(ends)]
    came = between > _DUST
    first_gap, long = weight > 0, pauses > 0
    joins, steady = int(first_gap.sum()), int(came.sum())
    values = np.empty(joins + steady + int(long.sum()))
    weights = np.empty_like(values)
    values[:joins], weights[:joins] = ends[begin[first_gap]] - first[first_gap], weight[first_gap]
    at = joins
    for here in range(0, len(came), AT_ONCE):  # chunks limit copies of millions of steps
        some = came[here : here + AT_ONCE]
        to = at + int(some.sum())
        values[at:to] = np.diff(ends[here : here + AT_ONCE + 1])[some]
        weights[at:to] = between[here : here + AT_ONCE][some]
        at = to
    values[at:], weights[at:] = pause[long], pauses[long]
    return values, weights


def _pauses(
    steps: NDArray[Any], count: Floats, preemptions: NDArray[Any], whole: NDArray[np.bool_]
) -> Floats:
    """The number of long gaps of each request, which span more than one decode step."""
    # Without a preemption, a request was held back for single steps.
    missed = np.where(preemptions > 0, preemptions, np.maximum(steps - count, 0))
    pauses = np.minimum(missed, count)
    pauses[(steps == count) & whole] = 0
    pauses[steps < count - pauses] = 0
    return np.where(steps == 0, count, pauses)


def weighted_mean(values: Floats, weights: Floats) -> float:
    """The weighted mean; NaN for no values."""
    total = float(weights.sum())
    return float(values @ weights) / total if total else float("nan")


def weighted_percentiles(values: Floats, weights: Floats, percents: tuple[float, ...]) -> Floats:
    """Equal to numpy.percentile of each value repeated `weights` times."""
    if not len(values):
        return np.full(len(percents), np.nan)
    order = np.argsort(values, kind="stable")
    reached = weights[order]
    np.cumsum(reached, out=reached)
    rank = np.asarray(percents) / 100 * max(reached[-1] - 1, 0)
    below = np.floor(rank + 1e-9)
    at = np.minimum(np.searchsorted(reached, below + 1e-9, side="right"), len(values) - 1)
    after = np.minimum(np.searchsorted(reached, below + 1 + 1e-9, side="right"), len(values) - 1)
    low, high = values[order[at]], values[order[after]]
    return np.asarray(low + (high - low) * np.clip(rank - below, 0, 1))
