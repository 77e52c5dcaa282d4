"""The weights of steps' times under which a simulated server answers as the outside one did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log

import numpy as np
from rich.console import Console

from pagedsim.fidelity.external_score import distance
from pagedsim.fidelity.external_server import ExternalServer, Weights
from pagedsim.fidelity.simplex import Point, search

FREE = ("decode_step", "mixed_step", "prompt_token", "context_token")
"""What is fitted; each begins where `cost=` has it. Latencies of whole requests do not tell the
others apart from these: a pair of a prompt's tokens goes with a token, since the GPU computes
both, and what a sequence adds to a step stays as it is."""
SIZES = (0.3, 0.15, 0.05)
"""Of the simplex, in logarithms: the first tries weights some 30 % larger."""
MOVES = 50
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
    """By how much that grows where a free weight is 10 % larger or smaller, whichever is less."""


def fitted(
    server: ExternalServer,
    known: int,
    sizes: Sequence[float] | None = None,
    moves: int | None = None,
) -> Found:
    """Fit to the first `known` requests; the same log gives the same weights.

    `sizes` and `moves` are those of `search`, by default SIZES and MOVES.
    """
    begin = server.begin()
    tries, nearest = 0, np.inf
    with Console(stderr=True).status("fitting") as status:

        def value(point: Point) -> float:
            nonlocal tries, nearest
            tries += 1
            apart = _apart(server, begin, point, known)
            nearest = min(nearest, apart)
            status.update(f"simulation {tries}: requests are {100 * nearest:.2f} % off at best")
            return apart + PULL * float((point**2).sum())

        point = search(value, np.zeros(len(FREE)), sizes or SIZES, moves or MOVES)
    here, nudges = _apart(server, begin, point, known), log(NUDGE) * np.eye(len(point))
    firmness = {
        name: min(_apart(server, begin, point + side * nudge, known) for side in (1, -1)) - here
        for name, nudge in zip(FREE, nudges, strict=True)
    }
    return Found(begin, _weights(begin, point), tries, here, firmness)


def _apart(server: ExternalServer, begin: Weights, point: Point, known: int) -> float:
    served = server.serve(_weights(begin, point), first=known)
    return distance(server.log, served.latencies, np.arange(known))


def _weights(begin: Weights, point: Point) -> Weights:
    """The free ones multiplied, by a factor whose logarithm the point has."""
    factors = dict(zip(FREE, np.exp(point).tolist(), strict=True))
    factors["prompt_pair"] = factors["prompt_token"]
    return begin._replace(
        **{name: factor * getattr(begin, name) for name, factor in factors.items()}
    )
