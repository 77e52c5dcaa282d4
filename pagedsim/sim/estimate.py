"""Back-of-the-envelope estimates of step times and their bottlenecks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import fsum
from typing import NamedTuple, TypeVar

from pagedsim.core import StepPlan
from pagedsim.sim.cost import Breakdown, CostModel, Roofline
from pagedsim.sim.cost.base import Bound, step
from pagedsim.sim.products import HEAD, Product, products

T = TypeVar("T")


@dataclass(frozen=True)
class StepEstimate:
    """The estimate of one step."""

    plan: StepPlan
    breakdown: Breakdown
    products: list[ProductTime]

    @property
    def tokens_per_s(self) -> float:
        """Throughput of the step."""
        tokens = self.plan.prefill_tokens + self.plan.decode_count
        return tokens / self.breakdown.seconds


class ProductTime(NamedTuple):
    """A product with its compute and read times."""

    product: Product
    computing: float
    """Seconds."""
    reading: float

    @property
    def bound(self) -> Bound:
        """The longer of the two."""
        return "compute" if self.computing >= self.reading else "bandwidth"

    @property
    def seconds(self) -> float:
        """The longer of the two."""
        return max(self.computing, self.reading)


def estimate(cost: Roofline, plan: StepPlan) -> StepEstimate:
    """Estimate a step: its time, parts and products."""
    return StepEstimate(plan, cost.explain(plan), timed(cost, plan))


def timed(cost: Roofline, plan: StepPlan) -> list[ProductTime]:
    """The products of a step with their times."""

    def time(product: Product) -> ProductTime:
        if not product.attention:
            rate = cost.head_rate if product.name == HEAD else cost.flop_rate
            return ProductTime(product, product.flop / rate, product.bytes / cost.bandwidth)
        longer = cost.paged if product.from_blocks else 1.0
        read = product.bytes / cost.cache_bandwidth * longer
        return ProductTime(product, product.flop / cost.attention_rate, read)

    return [time(product) for product in products(cost.replica, plan)]


def bound_of(told: Breakdown) -> tuple[Bound, str]:
    """The bottleneck of a step, and the longest term of it."""
    waits = [term for term in told.terms if term.bound == told.bound]
    return told.bound, max(waits, key=lambda term: term.seconds).name


def changes(of: Callable[[int], T], most: int) -> list[tuple[int, T]]:
    """The sizes from 1 to `most` at which `of` changes, with its values.

    Intervals between powers of two are bisected if their ends differ, so a change that reverts
    within one is missed.

    >>> changes(lambda size: "large" if size > 20 else "small", 100)
    [(1, 'small'), (21, 'large')]
    """
    sizes = [2**i for i in range(most.bit_length())]
    found = [(1, of(1))]
    for low, high in pairwise([*sizes, most]):
        found += _between(of, (low, of(low)), (high, of(high)))
    return found


def _between(
    of: Callable[[int], T], low: tuple[int, T], high: tuple[int, T]
) -> Iterator[tuple[int, T]]:
    if low[1] == high[1]:
        return
    if high[0] - low[0] == 1:
        yield high
        return
    middle = (low[0] + high[0]) // 2
    found = middle, of(middle)
    yield from _between(of, low, found)
    yield from _between(of, found, high)


@dataclass(frozen=True)
class Generation:
    """The generation of one answer on an idle server."""

    seconds: float
    flop: float
    """Of one GPU."""


def with_cache(cost: CostModel, prompt: int, output: int, ahead: bool) -> Generation:
    """Generation with a KV cache: one prefill, then one token per step."""
    decodes = (step(decodes=1, context=prompt + i, ahead=ahead) for i in range(1, output))
    return _generation(cost, [step(prompt, ahead=ahead), *decodes])


def without_cache(cost: CostModel, prompt: int, output: int, ahead: bool) -> Generation:
    """Generation without a KV cache: each step recomputes all tokens."""
    return _generation(cost, [step(prompt + i, ahead=ahead) for i in range(output)])


def _generation(cost: CostModel, steps: list[StepPlan]) -> Generation:
    seconds = fsum(cost.step_seconds(plan) for plan in steps)
    return Generation(seconds, fsum(cost.work(plan).flop for plan in steps))
