"""A server under rising load: what each order's answers take, and what was published of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from experiments.papers.load_curve import sustained
from experiments.papers.size_answers import MEASURES, Answers, Arms, against, over_seeds
from pagedsim.core import ConfigError
from pagedsim.core.errors import require_number, unknown
from pagedsim.metrics.compare import NO_ESTIMATE, Estimate, paired_ratio
from pagedsim.run.job import Arm
from pagedsim.run.objects import require_kinds

MEAN = "mean"


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A server and its requests, at several rates."""

    overrides: Sequence[str] = ()
    server: str | None = None
    """One of the study's servers, whose overrides come first; None: that of the configuration."""
    rates: Mapping[str, Sequence[float]]
    """Requests/s at which each order is tried. Orders with the rates of the base are lines."""
    more: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Further overrides of some orders."""
    bound: float | None = None
    """Seconds a token that a sustained rate keeps; None: none is looked for."""
    published: Mapping[str, Mapping[str, Mapping[float, float]]] = field(default_factory=dict)
    """Of a measure (mean, P95) seconds a token by order and rate."""
    most: Mapping[str, float] = field(default_factory=dict)
    """By order: how many times as long the base took, at most, as published."""
    passes: Mapping[str, float] = field(default_factory=dict)
    """By order: such a multiple, whose rate is looked for."""

    def __post_init__(self) -> None:
        require_kinds(self)
        if self.bound is not None:
            require_number("bound", self.bound, above=0)
        for order, rates in self.rates.items():
            if not rates:
                raise ConfigError(f"rates.{order}=[]: must name at least one rate, in requests/s")
            for rate in rates:
                require_number(f"rates.{order}", rate, above=0)
        for measure, lines in self.published.items():
            if measure not in MEASURES:
                raise unknown("measure of published", measure, MEASURES)
            for order, line in lines.items():
                for rate, seconds in line.items():
                    require_number(f"published.{measure}.{order}.{rate}", seconds, above=0)
        for order in (*self.more, *self.most, *self.passes):
            if order not in self.rates:
                raise unknown("order", order, self.rates)

    def lines(self, base: str) -> list[str]:
        """The base first, then the orders that are tried at all of its rates."""
        own = set(self.rates[base])
        others = [order for order, rates in self.rates.items() if set(rates) == own]
        return [base, *(order for order in others if order != base)]

    def told(self, measure: str, order: str) -> dict[float, float]:
        """What was published of an order, by rate."""
        line = self.published.get(measure, {}).get(order, {})
        return {float(rate): line[rate] for rate in sorted(line)}


def arm_name(curve: str, order: str, rate: float) -> str:
    """What the runs of an order at a rate are called."""
    return f"{curve}, {order}, {rate:g} per s"


def of_server(name: str | None, servers: Mapping[str, Sequence[str]]) -> Sequence[str]:
    """The overrides that make a server; none for that of the configuration."""
    return () if name is None else servers[name]


def arms_of(
    curves: Mapping[str, Curve],
    orders: Mapping[str, Sequence[str]],
    servers: Mapping[str, Sequence[str]],
) -> Iterator[Arm]:
    """All that is to run."""
    for name, curve in curves.items():
        for order, rates in curve.rates.items():
            own = of_server(curve.server, servers), curve.overrides
            parts = (*own, orders[order], curve.more.get(order, ()))
            overrides = [override for part in parts for override in part]
            for rate in rates:
                yield Arm(arm_name(name, order, rate), overrides, {"workload.rate": rate})


@dataclass(frozen=True, eq=False)
class Measured:
    """A curve, and what its runs gave."""

    name: str
    curve: Curve
    base: str
    arms: Arms

    def of(self, order: str, rate: float) -> Sequence[Answers]:
        """The runs of an order at a rate."""
        return self.arms[arm_name(self.name, order, rate)]

    def line(self, order: str, measure: str = MEAN) -> dict[float, float]:
        """Seconds a token by rate, over all seeds."""
        rates = self.curve.rates[order]
        return {rate: over_seeds(self.of(order, rate), MEASURES[measure]) for rate in rates}

    def gain(self, order: str, rate: float) -> Estimate:
        """How many times as long a token takes under the base."""
        return against(self.of(self.base, rate), self.of(order, rate), MEASURES[MEAN])

    def gains(self, order: str) -> dict[float, Estimate]:
        """The same by rate, where both were tried."""
        rates = (rate for rate in self.curve.rates[order] if rate in self.curve.rates[self.base])
        return {rate: self.gain(order, rate) for rate in sorted(rates)}

    def told_gains(self, order: str) -> dict[float, float]:
        """What was published of it."""
        base, own = self.curve.told(MEAN, self.base), self.curve.told(MEAN, order)
        return {rate: base[rate] / own[rate] for rate in own if rate in base}

    def sustains(self, order: str, measure: str, seed: int) -> float:
        """The rate that keeps the bound under one seed; NaN where none that was tried tells."""
        assert self.curve.bound is not None
        rates = self.curve.rates[order]
        own = {rate: MEASURES[measure](self.of(order, rate)[seed]) for rate in rates}
        return sustained(own, self.curve.bound)

    def sustained_ratio(self, order: str, measure: str) -> Estimate:
        """Of the order's rate to the base's."""
        seeds = range(len(self.of(order, self.curve.rates[order][0])))
        pairs = [
            (self.sustains(order, measure, seed), self.sustains(self.base, measure, seed))
            for seed in seeds
        ]
        if any(math.isnan(one) for pair in pairs for one in pair):
            return NO_ESTIMATE
        return paired_ratio(*zip(*pairs, strict=True))

    @property
    def capacity(self) -> float:
        """Requests/s that the base finishes where most come."""
        runs = self.of(self.base, max(self.curve.rates[self.base]))
        return over_seeds(runs, lambda answers: answers.per_second)
