"""How a step is shared by a pipeline's stages, by groups of GPUs, and by experts' GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from math import pow, sqrt
from statistics import NormalDist
from typing import NamedTuple

from pagedsim.sim.model import MoE
from pagedsim.sim.replica import Replica


class Totals(NamedTuple):
    """What a step's time is worked out from, in the order in which it is summed up."""

    token: float = 0.0
    """Tokens that are computed."""
    sequence: float = 0.0
    """Chunks, and sequences that decode."""
    pair: float = 0.0
    """Pairs of tokens of which one, in a chunk, attends to the other."""
    chunk_context: float = 0.0
    """Tokens before a chunk, whose keys and values are read for it."""
    decode_context: float = 0.0
    """Tokens that decodes attend to."""
    step: float = 0.0
    """1 where anything is computed."""
    unchosen: float = 0.0
    """The chance that no token of the step chooses a given expert."""
    routed: float = 0.0
    """Choices of experts that come to one GPU, where each has experts of its own."""


class Busiest:
    """Of GPUs that have experts each, what the one with most to do has.

    All experts are taken to be chosen as often, but for those of that GPU, which are chosen `skew`
    times as often. What chance adds is the expected highest of as many variables as GPUs, with the
    variance and the skewness of hypergeometric ones (a token chooses so many of all experts), by
    Cornish and Fisher's expansion: within 3 % from 64 tokens on, and within 10 % from 8 on.

    >>> mixtral = MoE(experts=8, experts_per_token=2, intermediate=1)
    >>> busiest = Busiest(mixtral, gpus=8, skew=1.0)
    >>> [round(busiest.routed(tokens) / (tokens * 2 / 8), 2) for tokens in (8, 64, 4096)]
    [1.92, 1.32, 1.04]
    """

    def __init__(self, moe: MoE, gpus: int, skew: float) -> None:
        chosen, experts = moe.experts_per_token, moe.experts
        skew = min(skew, experts / chosen)
        self.each = experts // gpus
        self.chance = skew * chosen / experts
        """That a token chooses a given expert of that GPU."""
        self.choices = min(self.each * self.chance, float(chosen))
        """How many of one token's choices come to it, on average."""
        self.most = min(self.each, chosen)
        self.variance = self.choices * (1 - 1 / gpus) * (experts - chosen) / max(experts - 1, 1)
        self.above = highest_of(gpus)
        uneven = (1 - 2 / gpus) * (1 - 2 * chosen / experts) * experts / max(experts - 2, 1)
        self.further = max(uneven * (self.above**2 - 1) / 6, 0.0)

    def routed(self, tokens: float) -> float:
        """Choices that come to it, of so many tokens."""
        chance = self.above * sqrt(tokens * self.variance) + self.further
        return min(max(tokens * self.choices + chance, 1.0), tokens * self.most)

    def unchosen(self, tokens: float) -> float:
        """The part of its experts that none of so many tokens chooses: of one at least, some."""
        mean = pow(1.0 - self.chance, tokens)
        deviation = sqrt(mean * (1.0 - mean) / self.each)
        return min(max(mean - self.above * deviation, 0.0), 1.0 - 1.0 / self.each)


def highest_of(count: int) -> float:
    """The expected highest of so many standard normal variables, by Blom's approximation.

    >>> [round(highest_of(count), 2) for count in (1, 2, 8, 64)]
    [0.0, 0.59, 1.43, 2.34]
    """
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


class Share(NamedTuple):
    """What one GPU has of a step while one micro-batch passes all stages."""

    part: Totals
    host: Totals
    """What the host works for: of its group, all of the step."""
    passes: float
    """Micro-batches."""
    long: float
    """How many times as long as that passing the step takes."""


@dataclass(frozen=True)
class Split:
    """A replica that is more than GPUs which share each matrix.

    Of a pipeline, the tokens of a step are dealt to as many micro-batches as there are stages, or
    tokens. Steps of decodes follow one another without a gap, since a sequence waits for its own
    token alone: such a step takes as long as one micro-batch needs for all stages, or as the
    slowest stage for all micro-batches. A step with prompts begins and ends with an empty pipeline:
    the first micro-batch passes all stages, the others follow it out of the slowest.

    Of several groups with requests of their own, all wait for the busiest. It has an equal share of
    the tokens or the longest chunk, if that is more: no chunk is cut between groups.
    """

    stages: int
    slowest: float
    """The part of the layers that the largest stage has."""
    groups: int
    unchosen: float
    """The chance that a token does not choose a given expert."""
    busiest: Busiest | None
    """Where GPUs have experts of their own."""

    @classmethod
    def of(cls, replica: Replica, skew: float) -> Split | None:
        """None for GPUs which share each matrix, be it one."""
        if not replica.more_than_shared:
            return None
        moe, experts = replica.model.moe, replica.expert_parallel
        return cls(
            stages=replica.pipeline_parallel,
            slowest=replica.most_layers / replica.model.layers,
            groups=replica.groups,
            unchosen=1.0 - moe.experts_per_token / moe.experts if moe else 0.0,
            busiest=Busiest(moe, experts, skew) if moe and experts > 1 else None,
        )

    def share(self, totals: Totals, prompts: float, longest: float) -> Share:
        """Of a step with so many tokens of prompts, of which the longest chunk has `longest`.

        `routed` and `unchosen` need not be given.
        """
        passes = min(totals.token, self.stages)
        tokens, found = totals.token / passes, self.busiest
        decodes = (totals.token - prompts) / passes
        chunk = longest / passes
        sequences = self._largest(totals.sequence / passes, 1.0)
        context = self._largest(prompts / passes, chunk)
        part = totals._replace(
            token=self._largest(tokens, max(chunk, 1.0)) * tokens,
            sequence=sequences * totals.sequence / passes,
            pair=context * totals.pair / passes,
            chunk_context=context * totals.chunk_context / passes,
            decode_context=self._largest(decodes, 1.0) * totals.decode_context / passes,
            unchosen=found.unchosen(tokens) if found else self.unchosen**tokens,
            routed=found.routed(tokens) if found else 0.0,
        )
        long = lengthened(passes, self.slowest, prompts=prompts > 0)
        host = self._largest(totals.sequence, 1.0) * totals.sequence
        return Share(part, part._replace(sequence=host), passes, long)

    def _largest(self, whole: float, least: float) -> float:
        """The part of so much that the busiest group has, which is at least `least`."""
        return max(1.0 / self.groups, min(least / whole, 1.0)) if whole else 1.0


def lengthened(passes: float, slowest: float, prompts: bool) -> float:
    """How many times as long as one micro-batch's way through all stages so many take.

    `slowest` is the part of that way that the slowest stage is.

    >>> lengthened(2, 0.5, prompts=False), lengthened(2, 0.5, prompts=True)
    (1.0, 1.5)
    """
    return 1.0 + (passes - 1.0) * slowest if prompts else max(1.0, passes * slowest)
