"""Little's law: how many are in a system is how many come, times how long one stays."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pagedsim.metrics.tables import NAN, Requests


class LittlesLaw(NamedTuple):
    """Two ways to the same number, which holds however the requests were scheduled."""

    number: float
    """Requests in the system, averaged over time."""
    rate_times_time: float
    """Requests per second times the mean time that one stays."""


def littles_law(requests: Requests) -> LittlesLaw:
    """Both sides of Little's law over the finished requests; NaN for none."""
    done = requests.are("finished")
    arrival, finished = requests["arrival"][done], requests["finished"][done]
    if not len(arrival) or (span := float(finished.max() - arrival.min())) == 0:
        return LittlesLaw(NAN, NAN)
    times = np.concatenate((arrival, finished))
    order = np.argsort(times, kind="stable")
    present = np.cumsum(np.where(order < len(arrival), 1.0, -1.0))
    number = float(present[:-1] @ np.diff(times[order])) / span
    return LittlesLaw(number, len(arrival) / span * float(np.mean(finished - arrival)))
