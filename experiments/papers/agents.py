"""What session-aware policies gain, beside the published numbers of Autellix and Continuum."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from experiments.papers.curves import sustained
from experiments.papers.panels import Panel, draw_panels
from experiments.papers.reproduction import ByArm, Reproduction, arm, mean, pair, per_s
from experiments.papers.settings import Count, In, Names, Number, Positive, Range
from pagedsim.metrics.arms import Run
from pagedsim.metrics.compare import Estimate, paired_ratio
from pagedsim.metrics.result import Listing, Row
from pagedsim.report.figures import FigureSpec
from pagedsim.report.numbers import percent
from pagedsim.run.study import Analysis

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TIME, PER_TOKEN, RATE = "session_time_mean", "session_time_per_token_mean", "sessions_per_s"
Factor = Annotated[Sequence[float], Range()]


@dataclass(frozen=True, kw_only=True)
class Load:
    """Sessions of some kind, at several rates; `bound` is a mean session time, in seconds."""

    overrides: Sequence[str]
    sessions: Annotated[int, Number(1, whole=True)]
    """Sessions per run: under overload, results depend on how long it lasts."""
    rates: Annotated[Sequence[float], Count(), Number(above=0)]
    bound: Positive


@dataclass(frozen=True, kw_only=True)
class Published:
    """Published factors of a policy: from, to."""

    times: Factor | None = None
    """How many times as long sessions take under the base."""
    rates: Factor | None = None
    """How many times the base's rate is served at the same latency."""
    token_rates: Factor | None = None
    """How many times the rate of `Agents.uncached` is served at the same session time per token."""


@dataclass(frozen=True, kw_only=True)
class Agents(Reproduction):
    """Session times of several policies against `base`, under rising rates of sessions."""

    policies: Names
    base: Annotated[str, In("policies")]
    uncached: Annotated[str, In("policies")]
    """The policy without a prefix cache: the baseline of rates by time per token."""
    token_bounds: Annotated[Sequence[float], Count(), Number(above=0)]
    """Mean session times per token at which those rates are compared, in seconds."""
    loads: Annotated[Mapping[str, Load], Count()]
    published: Annotated[Mapping[str, Published], In("policies")]

    def arms(self) -> dict[str, list[str]]:
        return {
            arm(name, policy, per_s(rate)): [
                *(*load.overrides, f"workload.sessions={load.sessions}"),
                *(f"workload.rate={rate}", *changes),
            ]
            for name, load in self.loads.items()
            for rate in load.rates
            for policy, changes in self.policies.items()
        }

    def key_of(self, arm: str) -> str:
        return f"study.loads.{arm.partition(', ')[0]}"

    def read_arms(self, runs: ByArm) -> Analysis:
        measured = [Measured(name, load, self, runs) for name, load in self.loads.items()]
        data = {one.name: one.data() for one in measured}
        caption = (
            "Mean time from a session's first question to its last answer; below, that time "
            "divided by the tokens generated in the session. Lines across: the bounds at which "
            "rates are compared."
        )
        return Analysis(
            finding=[" ".join(one.sentences()) for one in measured],
            rows=[row for one in measured for row in one.rows()],
            listings=[one.listing() for one in measured],
            data=data,
            drawings={
                "sessions": FigureSpec("Session time over load", caption, partial(draw, data))
            },
        )


@dataclass(frozen=True)
class Measured:
    """A load, and the results of its runs."""

    name: str
    load: Load
    study: Agents
    every: ByArm

    def runs(self, policy: str, rate: float) -> Sequence[Run]:
        """One arm."""
        return self.every[arm(self.name, policy, per_s(rate))]

    def line(self, policy: str, key: str = TIME) -> dict[float, float]:
        """A metric by rate."""
        return {rate: mean(self.runs(policy, rate), key) for rate in self.load.rates}

    def gain(self, policy: str, rate: float, key: str = TIME) -> Estimate:
        """A metric of the base over the policy's."""
        both = (self.study.base, policy)
        return paired_ratio(*([run.summary[key] for run in self.runs(one, rate)] for one in both))

    def sustains(self, policy: str) -> float:
        """The rate of sessions that keeps the bound."""
        return sustained(self.line(policy), self.load.bound)

    def sustains_per_token(self, policy: str, bound: float) -> float:
        """The rate of sessions that keeps a session time per token."""
        return sustained(self.line(policy, PER_TOKEN), bound)

    def serves(self, policy: str, baseline: str, bound: float) -> float:
        """The ratio of two such rates."""
        return self.sustains_per_token(policy, bound) / self.sustains_per_token(baseline, bound)

    def cached(self, policy: str, rate: float) -> float:
        """The share of prompt tokens found in the prefix cache."""

        def share(run: Run) -> float:
            table = run.requests("cached_tokens", "prompt_tokens")
            cached, prompt = (table[name].to_numpy().sum() for name in table.column_names)
            return float(cached / prompt)

        return mean(self.runs(policy, rate), share)

    # -- rows, sentences, table --------------------------------------------------------------------

    def rows(self) -> Iterator[Row]:
        """Each policy against the base, and against the one without a cache."""
        base, uncached = self.study.base, self.study.uncached
        for policy in self.study.policies:
            if policy == base:
                continue
            told = self.study.published.get(policy, Published())
            gains = {rate: self.gain(policy, rate).mean for rate in self.load.rates}
            best = max(gains, key=gains.__getitem__)
            what = f"{self.name}: session time, {base} / {policy} where that is most"
            yield Row(what, gains[best], pair(told.times), "×", self.why(policy, best))
            ours, its = self.sustains(policy), self.sustains(base)
            why = f"{policy} keeps it up to {_rate(ours)}, {base} up to {_rate(its)}"
            what = f"{self.name}: rate at {self.load.bound:g} s a session, {policy} / {base}"
            yield Row(what, ours / its, pair(told.rates), "×", why)
            for bound in self.study.token_bounds if told.token_rates else ():
                at = f"{bound:g} s per token of a session"
                what = f"{self.name}: rate at {at}, {policy} / {uncached}"
                why = self.share_of_cache(policy, bound)
                yield Row(
                    what, self.serves(policy, uncached, bound), pair(told.token_rates), "×", why
                )

    def why(self, policy: str, rate: float) -> str:
        """The median and the cache behind a gain."""
        base = self.study.base
        found = [percent(self.cached(one, rate), 0) for one in (policy, base)]
        half = self.gain(policy, rate, "session_time_p50").mean
        return (
            f"at {rate:g}/s; in the median {half:.2f}; {policy} finds {found[0]} of its prompts in "
            f"the cache, {base} {found[1]}"
        )

    def share_of_cache(self, policy: str, bound: float) -> str:
        """The rates behind a gain over `uncached`, and the part that the base has as well."""
        base, uncached = self.study.base, self.study.uncached
        names = (policy, base, uncached)
        rates = [f"{one} up to {_rate(self.sustains_per_token(one, bound))}" for one in names]
        rates[0] = rates[0].replace(" up", " keeps it up", 1)
        return (
            f"{', '.join(rates)}; {base} / {uncached} is {self.serves(base, uncached, bound):.2f}, "
            f"{policy} / {base} {self.serves(policy, base, bound):.2f}"
        )

    def sentences(self) -> Iterator[str]:
        """All policies under the highest rate, and rates at the same session time per token."""
        base, uncached, bounds = self.study.base, self.study.uncached, self.study.token_bounds
        rate = max(self.load.rates)
        policies = dict.fromkeys([base, *self.study.policies])
        each = ", ".join(f"{self.line(one)[rate]:,.0f} s with {one}" for one in policies)
        yield f"{self.name}, {rate:g} sessions/s: a session takes {each}."
        for policy, told in self.study.published.items():
            if told.token_rates:
                gains, cache = (
                    " and ".join(f"{self.serves(one, uncached, bound):.2f}" for bound in bounds)
                    for one in (policy, base)
                )
                low, high = told.token_rates
                yield (
                    f"Within {' and '.join(f'{bound:g}' for bound in bounds)} s per token of a "
                    f"session, {policy} serves {gains} times the rate of {uncached}, {base} "
                    f"{cache} (published for {policy}: {low:g} to {high:g})."
                )

    def listing(self) -> Listing:
        """Every arm, over seeds."""
        rows = []
        for rate in self.load.rates:
            for policy in self.study.policies:
                runs = self.runs(policy, rate)
                times = (TIME, "session_time_p50", "session_time_p90")
                rows.append(
                    [
                        f"{rate:g}/s, {policy}",
                        *(f"{mean(runs, key):,.1f}" for key in times),
                        f"{1000 * mean(runs, PER_TOKEN):,.1f}",
                        f"{mean(runs, RATE):.3f}",
                        percent(self.cached(policy, rate), 0),
                        f"{mean(runs, 'preemptions'):,.0f}",
                    ]
                )
        head = ["", "mean", "P50", "P90", "ms/token", "sessions/s", "cached", "preemptions"]
        note = (
            "Seconds a session, its mean milliseconds per token generated, sessions finished a "
            "second, and prompts found in the cache."
        )
        return Listing(f"{self.name}: sessions", head, rows, note)

    def data(self) -> dict[str, Any]:
        """For a file, and to draw."""
        seconds, per_token = (
            {policy: list(self.line(policy, key).values()) for policy in self.study.policies}
            for key in (TIME, PER_TOKEN)
        )
        return {
            "rates": list(self.load.rates),
            "bound": self.load.bound,
            "seconds": seconds,
            "token_bounds": list(self.study.token_bounds),
            "seconds_per_token": per_token,
        }


def _rate(value: float) -> str:
    return "no rate that was tried" if math.isnan(value) else f"{value:.2f}/s"


def draw(data: Mapping[str, Any]) -> Figure:
    """A column for each load: seconds a session, and below it seconds per token."""
    labels = {"seconds": "seconds a session", "seconds_per_token": "s per token of a session"}
    rows = [
        [
            Panel(
                lines={policy: (load["rates"], values) for policy, values in load[key].items()},
                bounds=load["token_bounds"] if below else [load["bound"]],
                title="" if below else name,
                x="sessions/s" if below else None,
                y=None if column else label,
                origin=False,
            )
            for column, (name, load) in enumerate(data.items())
        ]
        for below, (key, label) in enumerate(labels.items())
    ]
    return draw_panels(rows, 5.4, share={"sharex": "col"}, wspace=0.2)
