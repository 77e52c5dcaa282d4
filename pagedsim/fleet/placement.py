"""Where prefill and decode go: the arithmetic of DistServe's search for a placement.

What one server of each kind sustains within the objective is found elsewhere; here servers are
chosen by that, and counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from math import ceil

SLACK = 1e-9
"""Of a server: what rounding may ask for too much."""


@dataclass(frozen=True)
class Option:
    """A way to split a model over GPUs, and what one such server sustains."""

    name: str
    gpus: int
    goodput: float
    """Requests a second within the objective; 0 where no rate meets it."""
    euros_per_hour: float | None = None
    """Of one server; None where its GPUs have no price."""

    @property
    def per_gpu(self) -> float:
        """Requests a second and GPU."""
        return self.goodput / self.gpus

    def servers(self, rate: float) -> int:
        """How many sustain a rate.

        >>> Option("TP 2", gpus=2, goodput=4.0).servers(10.0)
        3
        """
        return max(1, ceil(rate / self.goodput - SLACK))


@dataclass(frozen=True)
class Share:
    """Servers of one kind."""

    option: Option
    servers: int

    @property
    def gpus(self) -> int:
        """Of all of them."""
        return self.servers * self.option.gpus


@dataclass(frozen=True)
class Placement:
    """Who serves a rate: servers that do both phases, or some for each."""

    rate: float
    shares: Sequence[Share]

    @property
    def gpus(self) -> int:
        """Of all servers."""
        return sum(share.gpus for share in self.shares)

    @property
    def per_gpu(self) -> float:
        """Requests a second and GPU."""
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
    """The one that sustains most a GPU, of these that with the fewest; None if none does any."""
    able = [option for option in options if option.goodput > 0]
    return max(able, key=lambda option: (option.per_gpu, -option.gpus), default=None)


def placed(rate: float, *kinds: Iterable[Option]) -> Placement | None:
    """The best option of each kind, as often as the rate takes; None where a kind has none."""
    shares = []
    for options in kinds:
        if (option := best(options)) is None:
            return None
        shares.append(Share(option, option.servers(rate)))
    return Placement(rate, shares)


def limit(*kinds: Iterable[Option]) -> float:
    """Requests a second and GPU of the best options of each kind, in the best proportion; 0 where
    a kind has none.

    >>> limit([Option("prefill", 1, 6.0)], [Option("decode", 1, 3.0)])  # one of 6/s, two of 3/s
    2.0
    """
    chosen = [best(options) for options in kinds]
    rates = [0.0 if option is None else option.per_gpu for option in chosen]
    return 0.0 if 0.0 in rates else 1 / sum(1 / rate for rate in rates)


def pair(
    prefill: Iterable[Option], decode: Iterable[Option], gpus: int | None = None
) -> Placement | None:
    """The best of one server for each phase, at the rate that both sustain, with so many GPUs
    together at most."""
    pairs = [
        Placement(min(one.goodput, other.goodput), (Share(one, 1), Share(other, 1)))
        for one, other in product(prefill, decode)
        if gpus is None or one.gpus + other.gpus <= gpus
    ]
    found = max(pairs, key=lambda each: (each.per_gpu, -each.gpus), default=None)
    return None if found is None or not found.rate else found
