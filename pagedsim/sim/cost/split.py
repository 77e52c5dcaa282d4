"""How pipeline stages, data-parallel groups and expert parallelism share a step."""

from __future__ import annotations

from dataclasses import dataclass
from math import pow, sqrt
from statistics import NormalDist
from typing import NamedTuple

from pagedsim.sim.model import MoE
from pagedsim.sim.replica import Replica


class Totals(NamedTuple):
    """The inputs of a step's time, in order of summation."""

    token: float = 0.0
    """Tokens in the step."""
    sequence: float = 0.0
    """Prefill chunks and decoding sequences."""
    pair: float = 0.0
    """Query-key pairs of prefill attention."""
    chunk_context: float = 0.0
    """Tokens before chunks, whose KV cache is read."""
    decode_context: float = 0.0
    """Total context of decodes."""
    step: float = 0.0
    """1 for a step that is not empty."""
    unchosen: float = 0.0
    """Probability that no token of the step chooses a given expert."""
    routed: float = 0.0
    """Routed tokens on one GPU, under expert parallelism."""


class Busiest:
    """The load of the busiest GPU under expert parallelism.

    Experts are chosen uniformly, except those of the busiest GPU, chosen `skew` times as often. The
    random imbalance is the expected maximum over GPUs of variables with the variance and skewness
    of hypergeometric ones (a token chooses several distinct experts), by the Cornish-Fisher
    expansion: within 3 % from 64 tokens on, and within 10 % from 8 on.

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
        """Probability that a token chooses a given expert of that GPU."""
        self.choices = min(self.each * self.chance, float(chosen))
        """Expected choices per token that go to it."""
        self.most = min(self.each, chosen)
        self.variance = self.choices * (1 - 1 / gpus) * (experts - chosen) / max(experts - 1, 1)
        self.above = highest_of(gpus)
        uneven = (1 - 2 / gpus) * (1 - 2 * chosen / experts) * experts / max(experts - 2, 1)
        self.further = max(uneven * (self.above**2 - 1) / 6, 0.0)

    def routed(self, tokens: float) -> float:
        """Expected choices of `tokens` tokens that go to it."""
        chance = self.above * sqrt(tokens * self.variance) + self.further
        return min(max(tokens * self.choices + chance, 1.0), tokens * self.most)

    def unchosen(self, tokens: float) -> float:
        """Fraction of its experts that no token chooses; at least one is chosen."""
        mean = pow(1.0 - self.chance, tokens)
        deviation = sqrt(mean * (1.0 - mean) / self.each)
        return min(max(mean - self.above * deviation, 0.0), 1.0 - 1.0 / self.each)


def highest_of(count: int) -> float:
    """The expected maximum of `count` standard normal variables, by Blom's approximation.

    >>> [round(highest_of(count), 2) for count in (1, 2, 8, 64)]
    [0.0, 0.59, 1.43, 2.34]
    """
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


class Share(NamedTuple):
    """The share of one GPU in a step, for one micro-batch through all stages."""

    part: Totals
    host: Totals
    """The totals of host work: those of its group in the whole step."""
    passes: float
    """Number of micro-batches."""
    long: float
    """Duration of the step relative to one micro-batch through all stages."""


@dataclass(frozen=True)
class Split:
    """Parallelism of a replica beyond tensor parallelism.

    In a pipeline, the tokens of a step are split into as many micro-batches as there are stages, or
    tokens. Decode steps follow one another without bubbles, since a sequence only depends on its
    own last token: such a step takes the time of one micro-batch through all stages, or of all
    micro-batches through the slowest stage. A step with prompts starts and ends with an empty
    pipeline: the first micro-batch passes all stages, the others follow at the pace of the slowest.

    Of several data-parallel groups, all wait for the busiest. It has an equal share of the tokens,
    or the longest chunk if that is more, since chunks are not split between groups.
    """

    stages: int
    slowest: float
    """Fraction of the layers in the largest stage."""
    groups: int
    unchosen: float
    """Probability that a token does not choose a given expert."""
    busiest: Busiest | None
    """Under expert parallelism."""

    @classmethod
    def of(cls, replica: Replica, skew: float) -> Split | None:
        """None for tensor parallelism alone, or a single GPU."""
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
        """The share of a step with `prompts` prefill tokens, the longest chunk having `longest`.

        `totals.routed` and `totals.unchosen` are ignored.
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
        """The fraction of `whole` in the busiest group, which has at least `least`."""
        return max(1.0 / self.groups, min(least / whole, 1.0)) if whole else 1.0


def lengthened(passes: float, slowest: float, prompts: bool) -> float:
    """Duration of `passes` micro-batches relative to one through all stages.

    `slowest` is the share of the slowest stage in the latter.

    >>> lengthened(2, 0.5, prompts=False), lengthened(2, 0.5, prompts=True)
    (1.0, 1.5)
    """
    return 1.0 + (passes - 1.0) * slowest if prompts else max(1.0, passes * slowest)
