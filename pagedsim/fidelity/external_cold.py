"""A server that had just been started when its log begins."""

from __future__ import annotations

from math import exp, log
from typing import NamedTuple

import numpy as np

from pagedsim.fidelity.external_log import Latencies, Log

LONGER = log(1.5)
"""How much longer the first token takes than it would later, to be of a cold server."""
LEAST = 0.05
"""And by so many seconds: less is chance."""


class Cold(NamedTuple):
    """The first requests of a log whose server was not warm yet."""

    requests: int
    """How many; 0 where it was warm."""
    seconds: float = 0.0
    """From the first request until its first token."""
    warm: float = 0.0
    """What that would have taken a warm server, by the simulation."""


def cold_start(measured: Log, predicted: Latencies) -> Cold:
    """Whether its first request took far longer to its first token than others did.

    Others are held against the same simulation, so that it need only tell one request from
    another. Who comes meanwhile waits for the same.
    """
    seconds = float(measured.latencies.ttft[0])
    usual = float(np.median(np.log(measured.latencies.ttft / predicted.ttft)))
    warm = float(predicted.ttft[0]) * exp(usual)
    if log(seconds / warm) < LONGER or seconds - warm < LEAST:
        return Cold(0)
    return Cold(int((measured.arrived < seconds).sum()), seconds, warm)
