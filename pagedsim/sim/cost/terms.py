"""Cost models defined by a table of terms, each bound by one resource.

`Split` has the share of one GPU in a step under pipeline, data and expert parallelism.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from math import fsum, pow, sqrt
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagedsim.core import StepPlan
from pagedsim.core.compiled import mypyc_attr
from pagedsim.sim.cost.base import Bound, Breakdown, CostModel, Term, kind_of
from pagedsim.sim.model import MoE
from pagedsim.sim.replica import Replica


class Totals(NamedTuple):
    """The inputs of a step's time, in order of summation."""

    token: float = 0.0
    sequence: float = 0.0
    """Prefill chunks and decoding sequences."""
    pair: float = 0.0
    """Query-key pairs of prefill attention."""
    chunk_context: float = 0.0
    """Tokens before chunks, whose KV cache is read."""
    decode_context: float = 0.0
    step: float = 0.0
    """1 for a step that is not empty."""
    unchosen: float = 0.0
    """Probability that no token of the step chooses a given expert."""
    routed: float = 0.0
    """Routed tokens on one GPU, under expert parallelism."""

    def scaled(self, factor: float) -> Totals:
        return Totals(*(factor * part for part in self))


_PAIRS = Totals._fields.index("pair")


@mypyc_attr(serializable=True)  # cost models are copied
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
        self.local_experts = experts // gpus
        self.chance = skew * chosen / experts
        """Probability that a token chooses a given expert of that GPU."""
        self.choices = min(self.local_experts * self.chance, float(chosen))
        """Expected choices per token that go to it."""
        self.most = min(self.local_experts, chosen)
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
        deviation = sqrt(mean * (1.0 - mean) / self.local_experts)
        return min(max(mean - self.above * deviation, 0.0), 1.0 - 1.0 / self.local_experts)


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


class Split(NamedTuple):
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
        tokens, busiest = totals.token / passes, self.busiest
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
            unchosen=busiest.unchosen(tokens) if busiest else self.unchosen**tokens,
            routed=busiest.routed(tokens) if busiest else 0.0,
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


class CostTerm(NamedTuple):
    """An entry of the table: `seconds` per unit of each of a step's totals.

    Terms of one `kernel` overlap: those of one resource add up, or those of one `way`, and the
    slowest counts. Kernels run one after another. An empty step takes the host terms alone.
    """

    kernel: str
    name: str
    bound: Bound
    seconds: Totals
    way: int | None = None

    @property
    def lane(self) -> int | str:
        """What it adds up with in its kernel."""
        return self.bound if self.way is None else self.way

    def of(self, totals: Totals) -> float:
        """Seconds in a step."""
        return sum(seconds * total for seconds, total in zip(self.seconds, totals, strict=True))


_Form = tuple[tuple[int, float], ...]
"""(index in the totals, seconds per unit), without zeros."""


@mypyc_attr(allow_interpreted_subclasses=True)
class ByTerms(CostModel):
    """A cost model whose answers all come from one table of terms.

    `unchosen` is the probability that a token does not choose a given expert; `launching` the
    seconds in which the host launches a step's kernels, without prompts and with them, while the
    GPU runs those already launched: a lower bound of the step. With `split`, terms are those of a
    micro-batch on the busiest GPU of each stage, through all stages; host terms are of the whole
    step.
    """

    def __init__(
        self,
        replica: Replica,
        terms: Sequence[CostTerm],
        unchosen: float = 0.0,
        launching: tuple[float, float] = (0.0, 0.0),
        split: Split | None = None,
    ) -> None:
        super().__init__(replica)
        self._split = split
        self.terms = tuple(terms)
        self._unchosen = unchosen
        self._launching_decodes, self._launching_prompts = launching
        self._host = _added(term.seconds for term in terms if term.bound == "host")
        self._host_form = _form(self._host)
        self._host_sequence, self._host_step = self._host.sequence, self._host.step
        plain = Totals(sequence=self._host.sequence, step=self._host.step)
        self._host_is_plain = self._host == plain and split is None
        of_gpu = [term for term in terms if term.bound != "host"] if split else terms
        kernels = [_by_resource(same) for same in _kernels(of_gpu)]
        overlaps = [_longest(ways) for ways in kernels if len(ways) > 1]
        self._alone = _added(ways[0] for ways in kernels if len(ways) == 1)
        self._sums = [[_form(way) for way in ways] for ways in (*overlaps, [self._alone])]
        # The context of decodes changes between steps of the same batch, all else is constant.
        reading = [ways for ways in overlaps if any(way.decode_context for way in ways)]
        if any(len(ways) > 1 for ways in reading):
            raise ValueError("a kernel that reads the context of decodes can overlap nothing else")
        self._overlaps = [ways for ways in overlaps if ways not in reading]
        self._read = sum(ways[0].decode_context for ways in reading) + self._alone.decode_context
        self._decodes = {0: (0.0, self._read, 0.0, self._host.step, 0.0)}

    def step_seconds(self, plan: StepPlan) -> float:
        if not plan.ahead:
            return self._in_turn(plan)
        host = self._host_seconds(plan)
        seconds, least = self._in_turn(plan) - host, host + self._launches(plan)
        return seconds if seconds > least else least

    def _launches(self, plan: StepPlan) -> float:
        """Seconds of host time to launch a step's kernels."""
        launching = self._launching_prompts if plan.prefill_tokens else self._launching_decodes
        if not launching or not plan.prefill_tokens + plan.decode_count:
            return 0.0
        if self._split is None:
            return launching
        return launching * self._share(plan, self._split).long

    def _host_seconds(self, plan: StepPlan) -> float:
        if self._host_is_plain:  # computing all totals would dominate a decode step
            sequences = len(plan.chunks) + plan.decode_count
            return sequences * self._host_sequence + self._host_step
        totals = self._totals(plan)
        if self._split and totals.token:
            totals = self._share(plan, self._split).host
        return _worth(self._host_form, totals)

    def _in_turn(self, plan: StepPlan) -> float:
        """Duration of a step whose host work does not overlap with the step before."""
        if not plan.prefill_tokens:
            return self.decode_seconds(plan.decode_count, plan.decode_context)
        if self._split:
            return self._spread(self._share(plan, self._split))
        return self._sum(self._totals(plan))

    def decode_seconds(self, sequences: int, context: int) -> float:
        try:
            longest, read, alone, constant, least = self._decodes[sequences]
        except KeyError:
            line = self._decodes[sequences] = self._decoding(sequences)
            longest, read, alone, constant, least = line
        seconds = longest + context * read + alone + constant
        return seconds if seconds > least else least

    def _decoding(self, sequences: int) -> tuple[float, float, float, float, float]:
        """Coefficients of decode steps: overlapping kernels, seconds per context token, other
        kernels, constant part, and the lower bound.
        """
        if self._split:
            return self._spread_decoding(sequences, self._split)
        unchosen = self._unchosen**sequences
        longest = fsum(
            max(
                sequences * (way.token + way.sequence) + way.step + unchosen * way.unchosen
                for way in ways
            )
            for ways in self._overlaps
        )
        constant = self._alone.step + unchosen * self._alone.unchosen
        per_sequence = self._alone.token + self._alone.sequence
        least = self._least(Totals(sequence=sequences, step=1), self._launching_decodes)
        return longest, self._read, sequences * per_sequence, constant, least

    def _least(self, totals: Sequence[float], launching: float) -> float:
        """Lower bound of a step, in which the GPU waits for the last launch."""
        if not launching:
            return 0.0
        return launching + _worth(self._host_form, totals)

    def recompute_seconds(self, tokens: int) -> float:
        if not tokens:
            return 0.0
        pairs, unchosen = tokens * (tokens + 1) // 2, self._unchosen**tokens
        totals = Totals(token=tokens, sequence=1, pair=pairs, step=1, unchosen=unchosen)
        if self._split:
            return self._spread(self._split.share(totals, tokens, tokens))
        return self._sum(totals)

    def seconds_of(
        self, steps: NDArray[np.float64], ahead: NDArray[np.bool_] | bool = False
    ) -> NDArray[np.float64]:
        """`step_seconds` of many steps, one per row, with the columns of `Totals` up to `step`;
        `ahead`: each was planned while the one before ran.

        Steps must not be empty, which `step_seconds` treats differently. Not for a split replica,
        where the lengths of individual chunks matter.
        """
        assert self._split is None
        totals = np.column_stack([steps, self._unchosen ** steps[:, 0]])
        width = range(totals.shape[1])
        seconds = np.zeros(len(totals))
        for ways in self._sums:
            forms = np.array([[dict(way).get(index, 0.0) for index in width] for way in ways])
            seconds += reduce(np.maximum, (totals @ forms.T).T)
        host = totals @ np.array(self._host[: len(width)])
        prompts = steps[:, _PAIRS] > 0.0
        launching = np.where(prompts, self._launching_prompts, self._launching_decodes)
        seconds = np.where(launching > 0.0, np.maximum(seconds, launching + host), seconds)
        return np.where(ahead, np.maximum(seconds - host, host + launching), seconds)

    def _totals(self, plan: StepPlan) -> Totals:
        tokens = plan.prefill_tokens
        every = tokens + plan.decode_count
        sequences = len(plan.chunks) + plan.decode_count
        # The chunks' own keys and values are still in the GPU's caches.
        context = plan.prefill_context - tokens
        reads, unchosen = plan.decode_context, self._unchosen**every
        # Keyword arguments would double the time.
        return Totals._make(
            (every, sequences, plan.prefill_pairs, context, reads, 1.0, unchosen, 0.0)
        )

    def _sum(self, totals: Sequence[float]) -> float:
        """Duration of a step with prompts."""
        seconds, least = self._added_up(totals), self._least(totals, self._launching_prompts)
        return seconds if seconds > least else least

    def _added_up(self, totals: Sequence[float]) -> float:
        seconds = 0.0
        for ways in self._sums:
            longest = 0.0
            for form in ways:
                way = 0.0
                for index, rate in form:  # `_worth` inlined: a call would add half of the time
                    way += totals[index] * rate
                if way > longest:
                    longest = way
            seconds += longest
        return seconds

    def _share(self, plan: StepPlan, split: Split) -> Share:
        longest = max((chunk.length for chunk in plan.chunks), default=0)
        return split.share(self._totals(plan), plan.prefill_tokens, longest)

    def _spread(self, share: Share) -> float:
        """Duration of a step with prompts under pipeline or data parallelism."""
        passing = max(self._added_up(share.part), self._launching_prompts)
        host = _worth(self._host_form, share.host)
        return passing * share.long + host

    def _spread_decoding(
        self, sequences: int, split: Split
    ) -> tuple[float, float, float, float, float]:
        """Like `_decoding`, scaled by the share of the busiest GPU."""
        totals = Totals(token=sequences, sequence=sequences, decode_context=1, step=1)
        share = split.share(totals, 0, 0)
        part, host_part = (t._replace(decode_context=0.0) for t in (share.part, share.host))
        longest = self._added_up(part) * share.long
        read = share.part.decode_context * self._read * share.long
        read += share.host.decode_context * self._host.decode_context
        host = _worth(self._host_form, host_part)
        return longest, read, 0.0, host, self._launching_decodes * share.long + host

    def explain(self, plan: StepPlan) -> Breakdown:
        terms = list(self._counting(plan))
        if plan.ahead:
            terms = list(hidden(terms, self._launches(plan)))
        return Breakdown(kind_of(plan), tuple(terms), self.work(plan))

    def _counting(self, plan: StepPlan) -> Iterator[Term]:
        """The terms that contribute to a step, in the order of the table."""
        if not plan.prefill_tokens + plan.decode_count:
            for term in self.terms:
                if term.bound == "host":
                    yield Term(term.name, term.seconds.step, term.bound)
            return
        if self._split is None:
            yield from self._of(self._totals(plan), self.terms)
            return
        share = self._share(plan, self._split)
        hosts = [term for term in self.terms if term.bound == "host"]
        parts = list(self._of(share.part, [term for term in self.terms if term not in hosts]))
        busy = share.passes / self._split.stages
        yield from (term._replace(seconds=term.seconds * busy) for term in parts)
        if (idle := share.long - busy) > 1e-9:
            passing = sum(term.seconds for term in parts)
            yield Term("bubbles", passing * idle, "pipeline")
        yield from (Term(term.name, term.of(share.host), term.bound) for term in hosts)

    def _of(self, totals: Totals, terms: Sequence[CostTerm]) -> Iterator[Term]:
        """The terms of a step with these totals on one GPU, without micro-batches."""
        gpu = 0.0
        for kernel in _kernels(terms):
            ways: dict[str | int, list[Term]] = {}
            for term in kernel:
                evaluated = Term(term.name, term.of(totals), term.bound)
                ways.setdefault(term.lane, []).append(evaluated)
            longest = max(ways.values(), key=lambda way: sum(term.seconds for term in way))
            gpu += sum(term.seconds for term in longest if term.bound != "host")
            yield from (term for term in longest if term.seconds or term.bound == "host")
        launching = self._launching_prompts if totals.pair else self._launching_decodes
        if gpu < launching:
            yield Term("launches", launching - gpu, "launch")


def hidden(terms: Sequence[Term], launching: float) -> Iterator[Term]:
    """Terms with host time hidden behind the GPU: only the excess counts.

    `launching` is further host time in the same period.
    """
    host = sum(term.seconds for term in terms if term.bound == "host")
    others = sum(term.seconds for term in terms if term.bound != "host")
    left = max(1.0 - max(others - launching, 0.0) / host, 0.0) if host else 0.0
    for term in terms:
        yield term._replace(seconds=term.seconds * left) if term.bound == "host" else term


def _kernels(terms: Iterable[CostTerm]) -> list[list[CostTerm]]:
    """Terms grouped by kernel, in the order of the table."""
    kernels: dict[str, list[CostTerm]] = {}
    for term in terms:
        kernels.setdefault(term.kernel, []).append(term)
    return list(kernels.values())


def _by_resource(terms: Sequence[CostTerm]) -> list[Totals]:
    """Sums of the terms of a kernel per resource, or way."""
    ways: dict[str | int, list[Totals]] = {}
    for term in terms:
        ways.setdefault(term.lane, []).append(term.seconds)
    return [_added(seconds) for seconds in ways.values()]


def _added(seconds: Iterable[Totals]) -> Totals:
    return Totals(*map(fsum, zip(Totals(), *seconds, strict=True)))


def _longest(ways: Sequence[Totals]) -> list[Totals]:
    """The ways without those dominated by another."""
    kept: list[Totals] = []
    for way in ways:
        if not any(_within(way, other) for other in kept):
            kept = [other for other in kept if not _within(other, way)] + [way]
    return kept


def _within(way: Totals, other: Totals) -> bool:
    return all(coefficient <= more for coefficient, more in zip(way, other, strict=True))


def _worth(form: _Form, totals: Sequence[float]) -> float:
    """Weighted sum of totals."""
    seconds = 0.0
    for index, coefficient in form:
        seconds += totals[index] * coefficient
    return seconds


def _form(way: Totals) -> _Form:
    return tuple((index, coefficient) for index, coefficient in enumerate(way) if coefficient)
