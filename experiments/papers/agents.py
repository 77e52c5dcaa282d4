"""What policies that know sessions buy, beside what Autellix and Continuum published."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from experiments.papers.agents_drawing import draw
from experiments.papers.load_curve import sustained
from experiments.papers.reproduction import Reproduction
from pagedsim.core import ConfigError
from pagedsim.core.errors import require_number, require_whole, unknown
from pagedsim.metrics.arms import Run
from pagedsim.metrics.compare import Estimate, paired_ratio
from pagedsim.metrics.result import Listing, Row
from pagedsim.report.percent import percent
from pagedsim.report.pictures import Drawing
from pagedsim.run.objects import each_of, require_kinds
from pagedsim.run.study import Reading

TIME, PER_TOKEN, RATE = "session_time_mean", "session_time_per_token_mean", "sessions_per_s"


@dataclass(frozen=True, kw_only=True)
class Load:
    """Sessions of some kind, at several rates; `bound` is a mean session time, in seconds."""

    overrides: Sequence[str]
    sessions: int
    """Sessions of a run: under overload, results depend on how long it lasts."""
    rates: Sequence[float]
    bound: float


@dataclass(frozen=True, kw_only=True)
class Told:
    """What was published of a policy: times, from and to."""

    times: Sequence[float] | None = None
    """How many times as long sessions take under the base."""
    rates: Sequence[float] | None = None
    """How many times the base's rate is served at the same latency."""
    token_rates: Sequence[float] | None = None
    """How many times the rate of `Agents.uncached` is served at the same session time per token."""


@dataclass(frozen=True, kw_only=True)
class Agents(Reproduction):
    """Session times of several policies against `base`, under rising rates of sessions."""

    policies: Mapping[str, Sequence[str]]
    """Names, and the overrides that make them."""
    base: str
    uncached: str
    """The policy that runs without a prefix cache: the baseline of rates by time per token."""
    token_bounds: Sequence[float]
    """Mean session times per token at which those rates are compared, in seconds."""
    loads: Mapping[str, Mapping[str, Any]]
    """Settings of `Load`."""
    published: Mapping[str, Mapping[str, Any]]
    """Settings of `Told`, by policy."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.loads:
            raise ConfigError("study.loads: must name at least one")
        for name in (self.base, self.uncached, *self.published):
            if name not in self.policies:
                raise unknown("policy", name, self.policies)
        if not self.token_bounds:
            raise ConfigError("study.token_bounds: must name at least one")
        for bound in self.token_bounds:
            require_number("study.token_bounds", bound, above=0)
        for name, load in self._loads.items():
            require_kinds(load, f"study.loads.{name}")
            require_whole(f"study.loads.{name}.sessions", load.sessions, 1)
            require_number(f"study.loads.{name}.bound", load.bound, above=0)
            if not load.rates:
                raise ConfigError(f"study.loads.{name}.rates: must name at least one")
            for rate in load.rates:
                require_number(f"study.loads.{name}.rates", rate, above=0)
        for name, told in self._told.items():
            for pair in filter(None, (told.times, told.rates, told.token_rates)):
                if len(pair) != 2:
                    raise ConfigError(f"study.published.{name}={list(pair)}: must be [from, to]")

    @property
    def _loads(self) -> dict[str, Load]:
        return each_of(Load, self.loads, "study.loads")

    @property
    def _told(self) -> dict[str, Told]:
        return each_of(Told, self.published, "study.published")

    @property
    def _others(self) -> list[str]:
        return [name for name in self.policies if name != self.base]

    def arms(self) -> dict[str, list[str]]:
        return {
            _arm(name, policy, rate): [
                *(*load.overrides, f"workload.sessions={load.sessions}"),
                *(f"workload.rate={rate}", *changes),
            ]
            for name, load in self._loads.items()
            for rate in load.rates
            for policy, changes in self.policies.items()
        }

    def key_of(self, arm: str) -> str:
        return f"study.loads.{arm.partition(', ')[0]}"

    def read_arms(self, runs: Mapping[str, Sequence[Run]]) -> Reading:
        measured = [
            Measured(name, load, self.base, runs, tuple(self.policies))
            for name, load in self._loads.items()
        ]
        data = {one.name: one.data(self.token_bounds) for one in measured}
        caption = (
            "Mean time from a session's first question to its last answer; below, that time "
            "divided by the tokens generated in the session. Lines across: the bounds at which "
            "rates are compared."
        )
        return Reading(
            finding=[" ".join(self._sentences(one)) for one in measured],
            rows=[row for one in measured for row in self._rows(one)],
            listings=[one.listing() for one in measured],
            data=data,
            drawings={"sessions": Drawing("Session time over load", caption, partial(draw, data))},
        )

    def _sentences(self, one: Measured) -> Iterator[str]:
        yield one.sentence(self._others)
        for policy, told in self._told.items():
            if told.token_rates:
                yield one.per_token(policy, self.uncached, self.token_bounds, told.token_rates)

    def _rows(self, one: Measured) -> Iterator[Row]:
        for policy in self._others:
            told = self._told.get(policy, Told())
            gains = {rate: one.gain(policy, rate) for rate in one.load.rates}
            best = max(gains, key=lambda rate: gains[rate].mean)
            what = f"{one.name}: session time, {self.base} / {policy} where that is most"
            yield Row(what, gains[best].mean, _pair(told.times), "×", one.why(policy, best))
            ours, its = one.sustains(policy), one.sustains(self.base)
            why = f"{policy} keeps it up to {_rate(ours)}, {self.base} up to {_rate(its)}"
            what = f"{one.name}: rate at {one.load.bound:g} s a session, {policy} / {self.base}"
            yield Row(what, ours / its, _pair(told.rates), "×", why)
            for bound in self.token_bounds if told.token_rates else ():
                what = (
                    f"{one.name}: rate at {bound:g} s per token of a session, "
                    f"{policy} / {self.uncached}"
                )
                gain = one.serves(policy, self.uncached, bound)
                why = one.share_of_cache(policy, self.uncached, bound)
                yield Row(what, gain, _pair(told.token_rates), "×", why)


@dataclass(frozen=True)
class Measured:
    """A load, and what its runs gave."""

    name: str
    load: Load
    base: str
    runs: Mapping[str, Sequence[Run]]
    policies: tuple[str, ...]

    def each(self, policy: str, rate: float, key: str) -> list[float]:
        """One metric under each seed."""
        return [run.summary[key] for run in self.runs[_arm(self.name, policy, rate)]]

    def mean(self, policy: str, rate: float, key: str) -> float:
        """The same, over all seeds."""
        return float(np.mean(self.each(policy, rate, key)))

    def line(self, policy: str, key: str = TIME) -> dict[float, float]:
        """The same by rate."""
        return {rate: self.mean(policy, rate, key) for rate in self.load.rates}

    def gain(self, policy: str, rate: float, key: str = TIME) -> Estimate:
        """How many times as much the base has."""
        return paired_ratio(self.each(self.base, rate, key), self.each(policy, rate, key))

    def sustains(self, policy: str) -> float:
        """Sessions/s that keep the bound."""
        return sustained(self.line(policy), self.load.bound)

    def sustains_per_token(self, policy: str, bound: float) -> float:
        """Sessions/s that keep a session time per token."""
        return sustained(self.line(policy, PER_TOKEN), bound)

    def serves(self, policy: str, baseline: str, bound: float) -> float:
        """How many times the baseline's rate keeps a session time per token."""
        rates = [self.sustains_per_token(one, bound) for one in (policy, baseline)]
        return rates[0] / rates[1]

    def cached(self, policy: str, rate: float) -> float:
        """The share of all prompts that was found in the prefix cache."""
        tables = [
            run.requests("cached_tokens", "prompt_tokens")
            for run in self.runs[_arm(self.name, policy, rate)]
        ]
        shares = [
            table["cached_tokens"].to_numpy().sum() / table["prompt_tokens"].to_numpy().sum()
            for table in tables
        ]
        return float(np.mean(shares))

    def why(self, policy: str, rate: float) -> str:
        """What stands behind a gain."""
        found = [percent(self.cached(one, rate), 0) for one in (policy, self.base)]
        half = self.gain(policy, rate, "session_time_p50").mean
        return (
            f"at {rate:g}/s; in the median {half:.2f}; {policy} finds {found[0]} of its prompts in "
            f"the cache, {self.base} {found[1]}"
        )

    def sentence(self, others: Sequence[str]) -> str:
        """All policies under the highest rate."""
        rate = max(self.load.rates)
        each = ", ".join(
            f"{self.mean(policy, rate, TIME):,.0f} s with {policy}"
            for policy in (self.base, *others)
        )
        return f"{self.name}, {rate:g} sessions/s: a session takes {each}."

    def share_of_cache(self, policy: str, uncached: str, bound: float) -> str:
        """The rates behind a gain over `uncached`, and the part that the base has, too."""
        names = (policy, self.base, uncached)
        rates = [f"{one} up to {_rate(self.sustains_per_token(one, bound))}" for one in names]
        rates[0] = rates[0].replace(" up", " keeps it up", 1)
        cache = self.serves(self.base, uncached, bound)
        rest = self.serves(policy, self.base, bound)
        return (
            f"{', '.join(rates)}; {self.base} / {uncached} is {cache:.2f}, "
            f"{policy} / {self.base} {rest:.2f}"
        )

    def per_token(
        self, policy: str, uncached: str, bounds: Sequence[float], published: Sequence[float]
    ) -> str:
        """Rates at the same session time per token, against `uncached`."""
        gains, cache = (
            " and ".join(f"{self.serves(one, uncached, bound):.2f}" for bound in bounds)
            for one in (policy, self.base)
        )
        within = " and ".join(f"{bound:g}" for bound in bounds)
        return (
            f"Within {within} s per token of a session, {policy} serves {gains} times the rate of "
            f"{uncached}, {self.base} {cache} (published for {policy}: {published[0]:g} to "
            f"{published[1]:g})."
        )

    def listing(self) -> Listing:
        """Every run, over seeds."""
        keys = (TIME, "session_time_p50", "session_time_p90")
        rows = [
            [
                f"{rate:g}/s, {policy}",
                *(f"{self.mean(policy, rate, key):,.1f}" for key in keys),
                f"{1000 * self.mean(policy, rate, PER_TOKEN):,.1f}",
                f"{self.mean(policy, rate, RATE):.3f}",
                percent(self.cached(policy, rate), 0),
                f"{self.mean(policy, rate, 'preemptions'):,.0f}",
            ]
            for rate in self.load.rates
            for policy in self.policies
        ]
        head = ["", "mean", "P50", "P90", "ms/token", "sessions/s", "cached", "preemptions"]
        note = (
            "Seconds a session, its mean milliseconds per token generated, sessions finished a "
            "second, and prompts found in the cache."
        )
        return Listing(f"{self.name}: sessions", head, rows, note)

    def data(self, token_bounds: Sequence[float]) -> dict[str, Any]:
        """For a file, and to draw."""
        seconds, per_token = (
            {policy: list(self.line(policy, key).values()) for policy in self.policies}
            for key in (TIME, PER_TOKEN)
        )
        return {
            "rates": list(self.load.rates),
            "bound": self.load.bound,
            "seconds": seconds,
            "token_bounds": list(token_bounds),
            "seconds_per_token": per_token,
        }


def _arm(load: str, policy: str, rate: float) -> str:
    return f"{load}, {policy}, {rate:g} per s"


def _pair(told: Sequence[float] | None) -> tuple[float, float] | None:
    return None if told is None else (told[0], told[1])


def _rate(value: float) -> str:
    return "no rate that was tried" if math.isnan(value) else f"{value:.2f}/s"
