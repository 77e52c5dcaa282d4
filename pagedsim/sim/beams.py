"""A random model of beam search: which beams survive, since a simulation has no probabilities."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random
from typing import SupportsFloat

from pagedsim.core import Request, RequestId, SamplingParams, StepPlan
from pagedsim.core.errors import require_number

TURNOVER = 0.1
"""Reproduces about the published memory savings: see `experiment=paper_fig14_15`."""


class Beams:
    """Draws the parent of each surviving beam, step by step.

    In each step each of the k beams is replaced with probability `turnover` by a child of one of
    the k old beams, drawn uniformly; otherwise it continues. So 0 is parallel sampling, and at 1
    every parent is drawn (the Wright-Fisher model, in which two beams have a common ancestor k
    steps ago, on average). Real searches lie between, since a leading beam has many children for a
    while. The draws depend on the seed, the request and its progress, not on scheduling.

    >>> from pagedsim.core import SamplingParams
    >>> Beams(0.0).chosen(Request("a", 4, SamplingParams(n=3, beam_search=True))) is None
    True
    """

    def __init__(self, turnover: SupportsFloat = TURNOVER, seed: int = 0) -> None:
        self.turnover = require_number("beam_turnover", turnover, 0, 1)
        self.seed = seed
        self._dice: dict[RequestId, Random] = {}

    def draws_for(self, asked: Iterable[SamplingParams]) -> bool:
        """Whether the seed matters to requests that ask for this."""
        return self.turnover > 0 and any(params.beam_search for params in asked)

    def parents(self, plan: StepPlan) -> dict[RequestId, Sequence[int]]:
        """The parents of the beams that decode in `plan`, for `Scheduler.commit`."""
        parents: dict[RequestId, Sequence[int]] = {}
        for request in plan.decodes:
            if request.params.beam_search and (chosen := self.chosen(request)):
                parents[request.id] = chosen
        return parents

    def chosen(self, request: Request) -> Sequence[int] | None:
        """The parents of its next beams; None if each beam continues."""
        if not self.turnover:
            return None
        dice = self._dice.get(request.id)
        if dice is None:
            dice = self._dice[request.id] = Random(f"beams/{self.seed}/{request.id}")
        draw, width, turnover = dice.random, request.num_seqs, self.turnover
        parents = [int(draw() * width) if draw() < turnover else place for place in range(width)]
        return None if parents == list(range(width)) else parents

    def left(self, request: Request) -> None:
        self._dice.pop(request.id, None)
