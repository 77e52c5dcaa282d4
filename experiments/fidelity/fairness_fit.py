"""The milliseconds under which a simulated server such as S-LoRA answers as the real one did.

Its kernels of 2023 are too far from a data sheet for shares of one: with those the requests of the
A100's log that are fitted are 15 % off, with these 3 %. They hold for the model that was measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from rich.console import Console

from pagedsim.fidelity.external_score import distance
from pagedsim.fidelity.external_server import ExternalServer
from pagedsim.fidelity.simplex import Point, search
from pagedsim.run.backend import Settings
from pagedsim.sim.cost import CostModel

FREE = ("decode_step", "mixed_step", "prompt_token", "context_token")
"""What is fitted; each begins where `cost=` has it. Latencies of whole requests do not tell the
others apart from these: a pair of a prompt's tokens goes with a token, since the GPU computes
both, and what a sequence adds to a step stays as it is."""
PULL = 0.0005
"""How much a weight is held to where it began, per ln² of what it is multiplied by: too little
to move what the log decides, enough for what it says nothing of."""
LEAST = 1e-12
"""Seconds: what a cost model leaves out altogether may still turn out to take time."""


class Weights(NamedTuple):
    """What a step's time is made of, in seconds."""

    decode_step: float
    """A step of nothing but decodes: reading the model's weights, and the host's work."""
    mixed_step: float
    """The same of a step with prompts."""
    prompt_token: float
    prompt_pair: float
    """A token of a prompt and one that it may attend to."""
    decode: float
    """A sequence that decodes."""
    context_token: float
    """One that a decode attends to."""

    @classmethod
    def of(cls, cost: CostModel) -> Weights:
        """Those that come nearest to a cost model that counts otherwise."""
        one, two = cost.decode_seconds(1, 0), cost.decode_seconds(2, 0)
        read = (cost.decode_seconds(1, 4096) - one) / 4096
        short, long, longer = (cost.recompute_seconds(size) for size in (1024, 2048, 4096))
        # A prompt's time is a + b·n + c·n², through three points.
        pair = ((longer - long) / 2048 - (long - short) / 1024) / (4096 - 1024)
        token = (long - short) / 1024 - pair * (1024 + 2048)
        fixed = 2 * one - two
        found = (fixed, fixed, token, pair, two - one, read)
        return cls(*(max(value, LEAST) for value in found))

    @property
    def settings(self) -> Settings:
        """The cost model that takes these."""
        prompt = {
            "constant": self.mixed_step,
            "prefill_tokens": self.prompt_token,
            "prefill_attention": self.prompt_pair,
        }
        decode = {"decode_context": self.context_token}
        sets: Mapping[str, Mapping[str, float]] = {
            "prefill": prompt,
            "decode": {"constant": self.decode_step, "decode_count": self.decode, **decode},
            # Beside prompts a decode is a token more of the same matrix products.
            "mixed": {**prompt, "decode_count": max(self.prompt_token, self.decode), **decode},
        }
        millis = {
            kind: {name: 1e3 * value for name, value in of.items()} for kind, of in sets.items()
        }
        return {"_target_": "pagedsim.sim.cost.Fitted", "unit": "ms", **millis}


@dataclass(frozen=True)
class Found:
    """What the search came to."""

    weights: Weights
    simulations: int
    distance: float
    """Mean |ln(predicted / measured)| of the fitted requests."""


def fitted(server: ExternalServer, known: int, sizes: Sequence[float], moves: int) -> Found:
    """Fit to the first `known` requests; the same log gives the same weights.

    `sizes` and `moves` are those of `search`.
    """
    begin = Weights.of(server.cost)
    tries, nearest = 0, np.inf
    with Console(stderr=True).status("fitting") as status:

        def value(point: Point) -> float:
            nonlocal tries, nearest
            tries += 1
            apart = _apart(server, begin, point, known)
            nearest = min(nearest, apart)
            status.update(f"simulation {tries}: requests are {100 * nearest:.2f} % off at best")
            return apart + PULL * float((point**2).sum())

        point = search(value, np.zeros(len(FREE)), sizes, moves)
    return Found(_weights(begin, point), tries, _apart(server, begin, point, known))


def _apart(server: ExternalServer, begin: Weights, point: Point, known: int) -> float:
    served = server.serve(_weights(begin, point).settings, first=known)
    return distance(server.log, served.latencies, np.arange(known))


def _weights(begin: Weights, point: Point) -> Weights:
    """The free ones multiplied, by a factor whose logarithm the point has."""
    factors = dict(zip(FREE, np.exp(point).tolist(), strict=True))
    factors["prompt_pair"] = factors["prompt_token"]
    return begin._replace(
        **{name: factor * getattr(begin, name) for name, factor in factors.items()}
    )
