"""How a step is shared by a pipeline's stages, by groups of GPUs, and by experts' GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from math import pow, sqrt
from statistics import NormalDist
from typing import TYPE_CHECKING, NamedTuple

from pagedsim.sim.model import MoE
from pagedsim.sim.replica import Replica

if TYPE_CHECKING:
    from pagedsim.sim.cost.terms import Totals


class Busiest:
    """Of GPUs that have experts each, what the one with most to do has.

    All experts are taken to be chosen as often, but for those of that GPU, which are chosen `skew`
    times as often; what chance adds is the expected maximum of as many normal variables, of the
    variance that choices have.

    >>> mixtral = MoE(experts=8, experts_per_token=2, intermediate=1)
    >>> one_each = Busiest(mixtral, gpus=8, skew=1.0)
    >>> one_each.routed(1000) / (1000 * 2 / 8)
    1.08...
    """

    def __init__(self, moe: MoE, gpus: int, skew: float) -> None:
        self.gpus = gpus
        self.each = moe.experts // gpus
        # Of one token: how likely it chooses an expert there, and how many choices come there.
        skew = min(skew, moe.experts / moe.experts_per_token)
        self.chance = skew * moe.experts_per_token / moe.experts
        self.choices = min(self.each * self.chance, float(moe.experts_per_token))
        self.most = min(self.each, moe.experts_per_token)
        left = (moe.experts - moe.experts_per_token) / max(moe.experts - 1, 1)
        self.variance = self.choices * (1.0 - 1.0 / gpus) * left
        self.above = highest_of(gpus)

    def routed(self, tokens: float) -> float:
        """Choices that come to it, of so many tokens."""
        chance = self.above * sqrt(tokens * self.variance)
        return min(tokens * self.choices + chance, tokens * self.most)

    def unchosen(self, tokens: float) -> float:
        """The part of its experts that none of so many tokens chooses."""
        mean = pow(1.0 - self.chance, tokens)
        deviation = sqrt(mean * (1.0 - mean) / self.each)
        return max(mean - self.above * deviation, 0.0)


def highest_of(count: int) -> float:
    """The expected highest of so many standard normal variables, by Blom's approximation.

    >>> [round(highest_of(count), 2) for count in (1, 2, 8, 64)]
    [0.0, 0.59, 1.43, 2.37]
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

    Of several groups with requests of their own, all wait for the busiest, which has an equal share
    of the tokens or the longest chunk, if that is more.
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
        if replica.gpus == replica.tensor_parallel and replica.expert_parallel == 1:
            return None
        moe, experts = replica.model.moe, replica.expert_parallel
        return cls(
            stages=replica.pipeline_parallel,
            slowest=replica.most_layers / replica.model.layers,
            groups=replica.groups,
            unchosen=1.0 - moe.experts_per_token / moe.experts if moe else 0.0,
            busiest=Busiest(moe, experts, skew) if moe and experts > 1 else None,
        )

    def share(self, totals: Totals, longest: float) -> Share:
        """Of a step, in which no chunk has more tokens than `longest`; 0: there are decodes alone.

        `routed` and `unchosen` need not be given.
        """
        passes = min(totals.token, self.stages)
        tokens = totals.token / passes
        most = max(1.0 / self.groups, max(longest / passes, 1.0) / tokens) if self.groups > 1 else 1
        each = most / passes
        found = self.busiest
        part = totals._replace(
            token=totals.token * each,
            sequence=totals.sequence * each,
            pair=totals.pair * each,
            chunk_context=totals.chunk_context * each,
            decode_context=totals.decode_context * each,
            unchosen=found.unchosen(tokens) if found else self.unchosen**tokens,
            routed=found.routed(tokens) if found else 0.0,
        )
        long = lengthened(passes, self.slowest, prompts=longest > 0)
        return Share(part, part._replace(sequence=totals.sequence * most), passes, long)


def lengthened(passes: float, slowest: float, prompts: bool) -> float:
    """How many times as long as one micro-batch's way through all stages so many take.

    `slowest` is the part of that way that the slowest stage is.

    >>> lengthened(2, 0.5, prompts=False), lengthened(2, 0.5, prompts=True)
    (1.0, 1.5)
    """
    return 1.0 + (passes - 1.0) * slowest if prompts else max(1.0, passes * slowest)
