"""Arithmetic on curves of latency over rate: sustained rates, crossings, and points in between."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise

import numpy as np

from experiments.papers.reproduction import arrays
from pagedsim.core import ConfigError
from pagedsim.metrics.arms import Run

Curve = Mapping[float, float]
"""Rate: latency."""


def passes(curve: Curve, level: float) -> float:
    """The first x at which y rises past `level`, on lines between points; NaN for none.

    >>> passes({1: 0, 2: 4}, 1)
    1.25
    """
    for low, high in pairwise(sorted(curve)):
        below, above = curve[low], curve[high]
        if below <= level <= above:
            return low + (high - low) * (level - below) / ((above - below) or 1)
    return math.nan


def sustained(curve: Curve, bound: float) -> float:
    """The rate at which the latency first passes `bound`, on lines in its logarithm.

    NaN where the rates that were run do not bracket it.

    >>> sustained({1: 0.1, 2: 1.0, 3: 10.0}, 1.0)
    2.0
    >>> round(sustained({1: 0.1, 2: 10.0}, 1.0), 3)
    1.5
    """
    return passes({rate: math.log(value) for rate, value in curve.items()}, math.log(bound))


def gain(curves: Mapping[str, Curve], best: str, other: str, bound: float) -> float:
    """The sustained rate of `best` over that of another."""
    return sustained(curves[best], bound) / sustained(curves[other], bound)


def crossing(curves: Mapping[str, Curve]) -> float:
    """The first rate at which the first curve falls below the second; NaN for none.

    >>> crossing({"small": {1: 2.0, 3: 1.0}, "large": {1: 1.0, 3: 2.0}})
    2.0
    """
    first, second = curves.values()
    return sustained({rate: second[rate] / first[rate] for rate in first}, 1.0)


def at(curve: Curve, rate: float) -> float:
    """The latency at a rate, on lines in its logarithm; NaN beyond the rates that were run.

    >>> round(at({1: 1.0, 3: 100.0}, 2), 6)
    10.0
    """
    rates = sorted(curve)
    logs = [math.log(curve[one]) for one in rates]
    return math.exp(np.interp(rate, rates, logs, left=math.nan, right=math.nan))


def normalized_latency(run: Run, warm_up: float = 0.0, together: bool = False) -> float:
    """Mean seconds per output token, of requests that arrive after the warm-up.

    With `together` the answers of a static batch are returned when its last one ends.
    """
    table = run.requests("arrival", "scheduled", "finished", "output_tokens")
    arrival, scheduled, finished, tokens = arrays(table)
    if together:
        finished = ends_of_batches(scheduled, finished)
    counted = (arrival >= warm_up) & ~np.isnan(finished)
    if not counted.any():
        raise ConfigError(f"warm_up={warm_up:g}: must be shorter: no request arrives after it")
    return float(np.mean((finished - arrival)[counted] / tokens[counted]))


def ends_of_batches(scheduled: np.ndarray, finished: np.ndarray) -> np.ndarray:
    """For each request the end of its batch, where a batch begins after the one before it."""
    order = np.argsort(scheduled, kind="stable")
    begun, ended = scheduled[order], finished[order]
    before = np.concatenate(([-np.inf], np.maximum.accumulate(ended)[:-1]))
    batch = np.cumsum(begun >= before) - 1
    last = np.full(batch[-1] + 1, -np.inf)
    np.maximum.at(last, batch, ended)
    ends = np.empty(len(order))
    ends[order] = last[batch]
    return ends
