"""Normalized latency of a run, and the rate that keeps it within a bound."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from pagedsim.core import ConfigError
from pagedsim.metrics.arms import Run

Floats = NDArray[np.float64]
Curve = Mapping[float, float]
"""Rate: mean normalized latency in seconds a token."""


def sustained(curve: Curve, bound: float) -> float:
    """The rate at which the latency first passes `bound`; NaN where none that was tried tells.

    >>> sustained({1: 0.1, 2: 1.0, 3: 10.0}, 1.0)
    2.0
    >>> round(sustained({1: 0.1, 2: 10.0}, 1.0), 3)
    1.5
    """
    rates = sorted(curve)
    for low, high in pairwise(rates):
        below, above = math.log(curve[low]), math.log(curve[high])
        if below <= math.log(bound) <= above:
            return low + (high - low) * (math.log(bound) - below) / ((above - below) or 1)
    return math.nan


def ratio(curves: Mapping[str, Curve], best: str, other: str, bound: float) -> float:
    """How many times the rate of another is sustained."""
    return sustained(curves[best], bound) / sustained(curves[other], bound)


def normalized_latency(run: Run, warm_up: float, together: bool) -> float:
    """Mean seconds a token, of requests that arrive after the warm-up."""
    table = run.requests("arrival", "scheduled", "finished", "output_tokens")
    arrival, scheduled, finished, tokens = (
        np.asarray(table[name].to_numpy()) for name in table.column_names
    )
    if together:
        finished = ends_of_batches(scheduled, finished)
    counted = (arrival >= warm_up) & ~np.isnan(finished)
    if not counted.any():
        raise ConfigError(f"warm_up={warm_up:g}: must be shorter: no request arrives after it")
    return float(np.mean((finished - arrival)[counted] / tokens[counted]))


def ends_of_batches(scheduled: Floats, finished: Floats) -> Floats:
    """When the last of each request's batch ends, if a batch begins after the one before."""
    order = np.argsort(scheduled, kind="stable")
    begun, ended = scheduled[order], finished[order]
    before = np.concatenate(([-np.inf], np.maximum.accumulate(ended)[:-1]))
    batch = np.cumsum(begun >= before) - 1
    last = np.full(batch[-1] + 1, -np.inf)
    np.maximum.at(last, batch, ended)
    ends = np.empty(len(order))
    ends[order] = last[batch]
    return ends
