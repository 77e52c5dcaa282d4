"""Which beams go on in a simulated search: a law, since a simulation knows no probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from pagedsim.core import Request, RequestId, StepPlan
from pagedsim.core.errors import require_number

TURNOVER = 0.1
"""The published savings of memory ask for about that: see `experiment=paper_fig14_15`."""


class Beams:
    """Draws, step by step, which beam each surviving beam of a request goes on from.

    In every step each of the k places is refilled with probability `turnover`: by a child of any of
    the k old beams, all alike. Otherwise its own beam goes on. So 0 is parallel sampling, and at 1
    every parent is drawn (the Wright-Fisher model of heredity, in which two beams were one k steps
    ago, on average). Real beams lie between: a beam that is far ahead has many children, for a
    while. What a request draws depends on the seed, on itself and on how far it is, and on nothing
    that a scheduler decides.

    >>> from pagedsim.core import SamplingParams
    >>> Beams(0.0).chosen(Request("a", 4, SamplingParams(n=3, beam_search=True))) is None
    True
    """

    def __init__(self, turnover: float = TURNOVER, seed: int = 0) -> None:
        require_number("beam_turnover", turnover, 0, 1)
        self.turnover = turnover
        self.seed = seed
        self._dice: dict[RequestId, Random] = {}

    def parents(self, plan: StepPlan) -> dict[RequestId, Sequence[int]]:
        """What `Scheduler.commit` is to be told of the beams that decode in `plan`."""
        found: dict[RequestId, Sequence[int]] = {}
        for request in plan.decodes:
            if request.params.beam_search and (chosen := self.chosen(request)):
                found[request.id] = chosen
        return found

    def chosen(self, request: Request) -> Sequence[int] | None:
        """The parents of its next beams; None where each goes on by itself."""
        if not self.turnover:
            return None
        dice = self._dice.get(request.id)
        if dice is None:
            dice = self._dice[request.id] = Random(f"beams/{self.seed}/{request.id}")
        draw, width, turnover = dice.random, request.width, self.turnover
        parents = [int(draw() * width) if draw() < turnover else place for place in range(width)]
        return None if parents == list(range(width)) else parents

    def left(self, request: Request) -> None:
        """Nothing more is drawn for it."""
        self._dice.pop(request.id, None)
