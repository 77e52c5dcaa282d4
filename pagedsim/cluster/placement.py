"""Placement of prefill and decode on GPUs: the arithmetic of DistServe's placement search.

The goodput of one server of each kind is an input; this module chooses and counts servers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from math import ceil

SLACK = 1e-9
"""Rounding tolerance, as a fraction of a server."""


@dataclass(frozen=True)
class Option:
    """A parallelism configuration of a model, and the goodput of one such server."""

    name: str
    gpus: int
    goodput: float
    """Requests/s within the SLO; 0 if no rate meets it."""
    euros_per_hour: float | None = None
    """Price of one server; None if its GPUs have no price."""

    @property
    def per_gpu(self) -> float:
        return self.goodput / self.gpus

    def servers(self, rate: float) -> int:
        """The number of servers that sustain a rate.

        >>> Option("TP 2", gpus=2, goodput=4.0).servers(10.0)
        3
        """
        return max(1, ceil(rate / self.goodput - SLACK))


@dataclass(frozen=True)
class Share:
    """A number of servers of one kind."""

    option: Option
    servers: int

    @property
    def gpus(self) -> int:
        return self.servers * self.option.gpus


@dataclass(frozen=True)
class Placement:
    """The servers for a request rate: of both phases, or some for each phase."""

    rate: float
    shares: Sequence[Share]

    @property
    def gpus(self) -> int:
        return sum(share.gpus for share in self.shares)

    @property
    def per_gpu(self) -> float:
        return self.rate / self.gpus

    @property
    def euros_per_hour(self) -> float | None:
        """Of all servers; None where a price is missing."""
        euros = 0.0
        for share in self.shares:
            if share.option.euros_per_hour is None:
                return None
            euros += share.servers * share.option.euros_per_hour
        return euros


def best(options: Iterable[Option]) -> Option | None:
    """The option with the highest goodput per GPU, on ties the smallest; None if all are 0."""
    able = [option for option in options if option.goodput > 0]
    return max(able, key=lambda option: (option.per_gpu, -option.gpus), default=None)


def placed(rate: float, *kinds: Iterable[Option]) -> Placement | None:
    """As many servers of the best option of each kind as the rate needs; None if a kind has
    none."""
    shares = []
    for options in kinds:
        if (option := best(options)) is None:
            return None
        shares.append(Share(option, option.servers(rate)))
    return Placement(rate, shares)


def limit(*kinds: Iterable[Option]) -> float:
    """Requests/s per GPU of the best options of each kind, in the ideal proportion; 0 if a kind has
    none.

    >>> limit([Option("prefill", 1, 6.0)], [Option("decode", 1, 3.0)])  # one of 6/s, two of 3/s
    2.0
    """
    chosen = [best(options) for options in kinds]
    rates = [0.0 if option is None else option.per_gpu for option in chosen]
    return 0.0 if 0.0 in rates else 1 / sum(1 / rate for rate in rates)


def pair(
    prefill: Iterable[Option], decode: Iterable[Option], gpus: int | None = None
) -> Placement | None:
    """The best pair of one server for each phase, at the rate that both sustain, on at most `gpus`
    GPUs in total."""
    pairs = [
        Placement(min(first.goodput, other.goodput), (Share(first, 1), Share(other, 1)))
        for first, other in product(prefill, decode)
        if gpus is None or first.gpus + other.gpus <= gpus
    ]
    best = max(pairs, key=lambda placement: (placement.per_gpu, -placement.gpus), default=None)
    return None if best is None or not best.rate else best
