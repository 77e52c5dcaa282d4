"""The weights of steps' times under which a simulated server answers as the outside one did."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, log

import numpy as np
from rich.console import Console

from experiments.outside_score import distance
from experiments.outside_search import Point, search
from experiments.outside_server import Twin, Weights

SIZES = (0.3, 0.15, 0.05)
"""Of the simplex, in logarithms: the first tries weights some 30 % larger."""
MOVES = 60
PULL = 0.0005
"""How much a weight is held to where it began, per ln² of what it is multiplied by: too little
to move what the log decides, enough for what it says nothing of."""
NUDGE = 1.1


@dataclass(frozen=True)
class Found:
    """What the search came to."""

    begin: Weights
    weights: Weights
    simulations: int
    distance: float
    """Mean |ln(predicted / measured)| of the fitted requests."""
    firmness: dict[str, float]
    """By how much that grows where one weight is 10 % larger or smaller, whichever is less."""


def fitted(twin: Twin, known: int) -> Found:
    """Fit to the first `known` requests; the same log gives the same weights."""
    begin = twin.begin()
    start = np.log(begin)
    tries, nearest = 0, np.inf
    with Console(stderr=True).status("fitting") as status:

        def value(point: Point) -> float:
            nonlocal tries, nearest
            tries += 1
            apart = _apart(twin, point, known)
            nearest = min(nearest, apart)
            status.update(f"simulation {tries}: requests are {100 * nearest:.2f} % off at best")
            return apart + PULL * float(((point - start) ** 2).sum())

        point = search(value, start, SIZES, MOVES)
    here, nudges = _apart(twin, point, known), log(NUDGE) * np.eye(len(point))
    firmness = {
        name: min(_apart(twin, point + side * nudge, known) for side in (1, -1)) - here
        for name, nudge in zip(Weights._fields, nudges, strict=True)
    }
    return Found(begin, _weights(point), tries, here, firmness)


def _apart(twin: Twin, point: Point, known: int) -> float:
    served = twin.serve(_weights(point), first=known)
    return distance(twin.log, served.latencies, np.arange(known))


def _weights(point: Point) -> Weights:
    return Weights(*(exp(value) for value in point))
