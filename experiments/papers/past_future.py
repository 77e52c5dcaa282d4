"""Goodput of admission by the expected peak of memory use (LightLLM's Past-Future scheduler)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from experiments.papers.panels import Panel, draw_panels
from experiments.papers.reproduction import (
    ByArm,
    Floats,
    Reproduction,
    arm,
    arrays,
    averaged,
    nested,
    ratio,
)
from experiments.papers.settings import Count, In, Names, Number, Range
from pagedsim.core import ConfigError
from pagedsim.metrics.arms import Run
from pagedsim.metrics.metric import token_gaps
from pagedsim.metrics.result import Listing, Row
from pagedsim.report.figures import FigureSpec
from pagedsim.report.numbers import percent
from pagedsim.run.job import Arm
from pagedsim.run.runs import Runs
from pagedsim.run.study import Analysis

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True)
class Load:
    """A kind of requests, from rising numbers of users that wait for their answers."""

    overrides: Sequence[str]
    users: Annotated[Sequence[int], Count(), Number(1, whole=True)]
    warm_up: Annotated[float, Number(0)]
    """Seconds in which finished requests are not counted."""


@dataclass(frozen=True)
class Served:
    """Results under one load, of requests that finish between the warm-up and the last arrival."""

    tokens: float
    """Tokens/s of all requests."""
    prompt: float
    """The share of requests that kept the first bound on the first token."""
    even: float
    """The share that kept the bound on gaps."""
    preemptions: float
    """Per request, over the whole run."""
    kv: float
    """The share of memory in use, over the whole run."""
    goodputs: Sequence[float]
    """Tokens/s of requests that kept the bound on gaps and each bound on the first token."""

    @property
    def goodput(self) -> float:
        """By the whole objective."""
        return self.goodputs[0]

    @property
    def smooth(self) -> float:
        """By the last bound, which is that of gaps alone."""
        return self.goodputs[-1]


Found = Mapping[str, Mapping[int, Served]]
"""By system and number of users."""


@dataclass(frozen=True, kw_only=True)
class Goodput(Reproduction):
    """Every system under every load.

    The objective of a request is a time to its first token of at most `ttft` seconds, and then no
    gap between tokens longer than `gap`.
    """

    idle: ClassVar[Mapping[str, str]] = {
        "workload.rate": "users ask once they are answered",
    }

    systems: Names
    ours: Annotated[str, In("systems")]
    """The published one, which is compared with `others`."""
    others: Annotated[Sequence[str], In("systems"), Count()]
    exact: Annotated[str | None, In("systems")]
    """The one with exact lengths, which should preempt no request."""
    loads: Annotated[Mapping[str, Load], Count()]
    ttft: Annotated[float, Number(0)]
    gap: Annotated[float, Number(0)]
    bounds: Annotated[Sequence[float], Number(0)]
    """Alternative bounds on the time to the first token, in seconds."""
    published: Annotated[Sequence[float], Range()]
    """The factor between the goodput of `ours` and others."""

    def next_runs(self, runs: Runs) -> list[Arm]:
        for name, load in self.loads.items():
            sets = any("workload.lengths" in change for change in load.overrides)
            if sets and "lengths" not in runs.config["workload"]:
                raise ConfigError(
                    f"workload={runs.command.choices.get('workload')}: must be one that draws "
                    f"lengths, such as sharegpt: study.loads.{name} sets them"
                )
        return super().next_runs(runs)

    def published_for(self, runs: Runs) -> str:
        low, high = self.published
        return (
            f"what was published, {low:g} to {high:g} times, is of the model, "
            f"hardware, loads and objective that experiment={runs.command.experiment} has by itself"
        )

    def arms(self) -> dict[str, list[str]]:
        return {
            _arm(name, system, users): [
                *load.overrides,
                "workload.arrivals=closed",
                f"workload.users={users}",
                *changes,
            ]
            for name, load in self.loads.items()
            for users in load.users
            for system, changes in self.systems.items()
        }

    @property
    def _first_bounds(self) -> list[float]:
        """On the first token: the objective's, alternatives, and none."""
        return [self.ttft, *self.bounds, math.inf]

    def read_arms(self, runs: ByArm) -> Analysis:
        found = {
            name: nested(
                lambda system, users, name=name, load=load: averaged(
                    served(run, load.warm_up, self._first_bounds, self.gap)
                    for run in runs[_arm(name, system, users)]
                ),
                *(self.systems, load.users),
            )
            for name, load in self.loads.items()
        }
        data = {
            name: {
                system: {
                    "users": list(by_users),
                    "goodput": [one.goodput for one in by_users.values()],
                    "gaps alone": [one.smooth for one in by_users.values()],
                }
                for system, by_users in each.items()
            }
            for name, each in found.items()
        }
        caption = (
            f"Tokens a second of requests that met the objective: above, a first token within "
            f"{self.ttft:g} s and no gap above {self.gap:g} s; below, the gaps alone."
        )
        return Analysis(
            finding=[line for name, each in found.items() for line in self._finding(name, each)],
            rows=[row for name, each in found.items() for row in self._rows(name, each)],
            listings=[self._by_bound(found), *(_listing(*each) for each in found.items())],
            data=data,
            drawings={"goodput": FigureSpec("Goodput over load", caption, partial(draw, data))},
            headline=["goodput"],
        )

    # -- rows --------------------------------------------------------------------------------------

    def _rows(self, name: str, found: Found) -> Iterator[Row]:
        low, high = self.published
        heavy = max(found[self.ours])
        ours = found[self.ours][heavy]
        for other in self.others:
            its = found[other][heavy]
            what = f"{name}: {self.ours} / {other}"
            best = ratio(_best(found[self.ours]).goodput, _best(found[other]).goodput)
            why = "" if low <= best <= high else self._why_best(found, other)
            yield Row(f"{what}, best goodput", best, (low, high), "×", why)
            even = ratio(ours.smooth, its.smooth)
            why = "" if low <= even <= high else self._why_even(ours, its)
            yield Row(f"{what}, {heavy} users, gaps alone", even, (low, high), "×", why)
        if self.exact is not None:
            most = max(one.preemptions for one in found[self.exact].values())
            yield Row(f"{name}: preemptions a request, {self.exact}", most, 0)

    def _why_best(self, found: Found, other: str) -> str:
        heavy = max(found[self.ours])
        best = [_best(found[system]).tokens for system in (self.ours, other)]
        ours, its = found[self.ours][heavy], found[other][heavy]
        return (
            f"with the users that each does best with, {self.ours} gives {best[0]:,.0f} and "
            f"{other} {best[1]:,.0f} tokens/s in all; with {heavy}, {percent(ours.prompt, 0)} and "
            f"{percent(its.prompt, 0)} of requests have their first token within {self.ttft:g} s, "
            f"{self._deciding(ours, its)}"
        )

    def _deciding(self, ours: Served, its: Served) -> str:
        """The bound that requests miss."""
        if min(ours.prompt, ours.even, its.prompt, its.even) == 1:
            return f"and all keep {self.gap:g} s between tokens: nothing decides under such a load"
        if min(ours.prompt, its.prompt) <= min(ours.even, its.even):
            return "so that waiting decides and not preemption"
        return (
            f"and {percent(ours.even, 0)} and {percent(its.even, 0)} keep {self.gap:g} s between "
            "tokens, so that gaps decide and not waiting"
        )

    def _why_even(self, ours: Served, its: Served) -> str:
        return (
            f"{percent(ours.even, 0)} and {percent(its.even, 0)} of requests keep {self.gap:g} s "
            f"between tokens, with {ours.preemptions:.2g} and {its.preemptions:.2g} preemptions a "
            f"request; all tokens a second are {ratio(ours.tokens, its.tokens):.2f} times as many"
        )

    # -- sentences and tables ----------------------------------------------------------------------

    def _finding(self, name: str, found: Found) -> Iterator[str]:
        heavy = max(found[self.ours])
        ours = found[self.ours][heavy]
        low, high = self.published
        for other in self.others:
            its = found[other][heavy]
            whole = f"{_times(ratio(ours.goodput, its.goodput))} the goodput of {other}"
            if not its.goodput:
                whole = f"{ours.goodput:,.0f} tokens/s where {other} gives none"
            if not ours.goodput and not its.goodput:
                whole = f"nothing, like {other},"
            yield (
                f"{name}, {heavy} users: {self.ours} gives {whole} by the whole objective, and "
                f"{_times(ratio(ours.smooth, its.smooth))} where gaps alone count (published: "
                f"{low:g} to {high:g}): {percent(ours.even, 0)} and {percent(its.even, 0)} of "
                f"requests keep {self.gap:g} s between tokens, {percent(ours.prompt, 0)} and "
                f"{percent(its.prompt, 0)} have the first within {self.ttft:g} s."
            )
        best = {system: _best(by_users).goodput for system, by_users in found.items()}
        each = ", ".join(f"{goodput:,.0f} with {system}" for system, goodput in best.items())
        users = max(found[self.ours], key=lambda users: found[self.ours][users].goodput)
        there = " and ".join(f"{found[one][users].goodput:,.0f} with {one}" for one in self.others)
        yield (
            f"{name}, best goodput in tokens/s over the loads: {each}; with the {users} users that "
            f"{self.ours} does best with, {there}."
        )

    def _by_bound(self, found: Mapping[str, Found]) -> Listing:
        """The gain under the heaviest load, by the bound on the first token."""
        rows = []
        for name, each in found.items():
            heavy = max(each[self.ours])
            for number, bound in enumerate(self._first_bounds):
                ours = each[self.ours][heavy].goodputs[number]
                gains = (ratio(ours, each[one][heavy].goodputs[number]) for one in self.others)
                first = "any first token" if math.isinf(bound) else f"first token in {bound:g} s"
                rows.append([f"{name}, {heavy} users, {first}", *map(_times, gains)])
        head = ["", *(f"{self.ours} / {other}" for other in self.others)]
        return Listing("Goodput under the heaviest load, by other bounds", head, rows)


def _listing(name: str, found: Found) -> Listing:
    rows = [
        [
            f"{users} users, {system}",
            *(f"{value:,.0f}" for value in (one.goodput, one.smooth, one.tokens)),
            *(percent(value, 0) for value in (one.prompt, one.even)),
            f"{one.preemptions:.2f}",
            percent(one.kv, 0),
        ]
        for users in next(iter(found.values()))
        for system in found
        for one in [found[system][users]]
    ]
    head = ["", "goodput", "gaps alone", "all", "first in time", "gaps kept", "preempted", "KV"]
    note = "Tokens/s, shares of requests, preemptions a request, and memory in use."
    return Listing(f"{name}: what was served", head, rows, note)


def _arm(load: str, system: str, users: int) -> str:
    return arm(load, system, f"{users} users")


def _best(by_users: Mapping[int, Served]) -> Served:
    return max(by_users.values(), key=lambda one: one.goodput)


def _times(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.2f} times"


# -- one run ---------------------------------------------------------------------------------------


def served(run: Run, warm_up: float, bounds: Sequence[float], gap: float) -> Served:
    """Of one run; `bounds` are of the first token, the objective's before others."""
    table = run.requests("arrival", "first_token", "finished", "output_tokens")
    arrival, first, finished, tokens = arrays(table)
    last = float(arrival.max())
    counted = (finished > warm_up) & (finished <= last)
    if not counted.any():
        raise ConfigError(
            f"{run.arm}: no request finishes between warm_up={warm_up:g} and the last arrival at "
            f"{last:.0f} s: must have a shorter warm_up, or more workload.requests"
        )
    even = longest_gaps(run) <= gap

    def rate(which: NDArray[np.bool_]) -> float:
        return float(tokens[counted & which].sum() / (last - warm_up))

    return Served(
        tokens=rate(counted),
        prompt=float((first - arrival <= bounds[0])[counted].mean()),
        even=float(even[counted].mean()),
        preemptions=run.summary["preemptions"] / run.summary["requests"],
        kv=run.summary["kv_utilisation_mean"],
        goodputs=[rate(even & (first - arrival <= bound)) for bound in bounds],
    )


def longest_gaps(run: Run) -> Floats:
    """Each request's longest gap between tokens, by id, in seconds; NaN for unfinished requests.

    Of a request that was preempted more than once, the pauses are taken as equally long, since the
    steps that it missed are not recorded.
    """
    end, decodes = arrays(run.steps("end", "decode_seqs"))
    ends = end[decodes > 0]
    table = run.requests("first_token", "finished", "output_tokens", "preemptions")
    first, last, tokens, preempted = arrays(table)
    begin, stop = (np.searchsorted(ends, times, side="right") for times in (first, last))

    def longest(row: int) -> float:
        if np.isnan(last[row]):
            return math.nan
        if tokens[row] < 2:
            return 0.0
        one = slice(row, row + 1)
        own = ends[begin[row] : stop[row]]
        gaps, _ = token_gaps(own, first[one], last[one], tokens[one], preempted[one])
        return float(gaps.max(initial=0.0))

    return np.array([longest(row) for row in range(table.num_rows)])


def draw(data: Mapping[str, Any]) -> Figure:
    """A column for each load: goodput, and what it would be were gaps alone to count."""
    rows = [
        [
            Panel(
                lines={system: (its["users"], its[what]) for system, its in systems.items()},
                title=f"{name}: {title}",
                x="users" if below else None,
                y=None if column else "tokens/s",
                origin=False,
            )
            for column, (name, systems) in enumerate(data.items())
        ]
        for below, (what, title) in enumerate(
            {"goodput": "the whole objective", "gaps alone": "gaps alone"}.items()
        )
    ]
    return draw_panels(rows, 5.0, share={"sharex": "col"}, wspace=0.14, hspace=0.28)
