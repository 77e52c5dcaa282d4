"""A server that had just been started when its log begins."""

from __future__ import annotations

from math import log
from typing import NamedTuple

import numpy as np

from pagedsim.fidelity.external_log import Latencies, Log

LONGER = log(1.5)
"""How much longer a first token takes than it would later, to be of a cold server."""
LEAST = 0.05
"""And by so many seconds: less is chance."""
MOST = 0.1
"""Of the requests: a server whose first tokens are late for longer is just slow."""


class Cold(NamedTuple):
    """The first requests of a log whose server was not warm yet."""

    requests: int
    """How many; 0 where it was warm."""
    seconds: float = 0.0
    """From the first request until its first token."""
    warm: float = 0.0
    """What that would have taken a warm server, by the simulation."""


def cold_start(measured: Log, predicted: Latencies) -> Cold:
    """Which of its first requests took far longer to their first token than others did.

    Others are held against the same simulation, so that it need only tell one request from
    another.
    """
    late = np.log(measured.latencies.ttft / predicted.ttft)
    usual = float(np.median(late))
    warm = predicted.ttft * np.exp(usual)
    cold = (late - usual > LONGER) & (measured.latencies.ttft - warm > LEAST)
    count = int(cold.argmin())
    if cold.all() or not count or count > MOST * len(measured):
        return Cold(0)
    return Cold(count, float(measured.latencies.ttft[0]), float(warm[0]))
