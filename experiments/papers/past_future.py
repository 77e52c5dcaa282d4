"""Goodput of admission by memory's future peak, beside cautious and greedy admission (LightLLM)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from experiments.papers.goodput import Served, over_seeds, ratio, served, times
from experiments.papers.past_future_drawing import draw
from experiments.papers.reproduction import Reproduction
from pagedsim.core import ConfigError
from pagedsim.core.errors import refuse_settings, require_number, require_whole, unknown
from pagedsim.metrics.arms import Run
from pagedsim.metrics.result import Listing, Row
from pagedsim.report.percent import percent
from pagedsim.report.pictures import Drawing
from pagedsim.run.kinds import require_kinds
from pagedsim.run.study import Reading


@dataclass(frozen=True, kw_only=True)
class Load:
    """A kind of requests, from more and more users who wait for their answers."""

    overrides: Sequence[str]
    users: Sequence[int]
    warm_up: float
    """Seconds in which who finishes does not count."""


Found = Mapping[str, Mapping[int, Served]]
"""Of each system and number of users."""


@dataclass(frozen=True, kw_only=True)
class Goodput(Reproduction):
    """Every system under every load.

    The objective of a request is a time to its first token of at most `ttft` seconds, and then no
    wait for a token longer than `gap`.
    """

    systems: Mapping[str, Sequence[str]]
    """Names, and the overrides that make them."""
    ours: str
    """The one that was published, held against `others`."""
    others: Sequence[str]
    exact: str | None
    """The one that knows lengths, by which nobody is to be preempted."""
    loads: Mapping[str, Mapping[str, Any]]
    """Settings of `Load`."""
    ttft: float
    gap: float
    bounds: Sequence[float]
    """Other times to the first token that could have been asked for, in seconds."""
    published: Sequence[float]
    """How many times the goodput of others: from, to."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number("study.ttft", self.ttft, 0)
        require_number("study.gap", self.gap, 0)
        for bound in self.bounds:
            require_number("study.bounds", bound, 0)
        if len(self.published) != 2:
            raise ConfigError(f"study.published={list(self.published)}: must be [from, to]")
        for name in filter(None, (self.ours, *self.others, self.exact)):
            if name not in self.systems:
                raise unknown("system", name, self.systems)
        for name, load in self._loads.items():
            require_kinds(load, f"study.loads.{name}")
            require_number(f"study.loads.{name}.warm_up", load.warm_up, 0)
            if not load.users:
                raise ConfigError(f"study.loads.{name}.users: must name at least one number")
            for users in load.users:
                require_whole(f"study.loads.{name}.users", users, 1)

    @property
    def _loads(self) -> dict[str, Load]:
        for name, load in self.loads.items():
            refuse_settings(name, load, Load, f"study.loads.{name}")
        return {name: Load(**load) for name, load in self.loads.items()}

    def arms(self) -> dict[str, list[str]]:
        return {
            _arm(name, system, users): [
                *load.overrides,
                "workload.arrivals=closed",
                f"workload.users={users}",
                *changes,
            ]
            for name, load in self._loads.items()
            for users in load.users
            for system, changes in self.systems.items()
        }

    def read_arms(self, runs: Mapping[str, Sequence[Run]]) -> Reading:
        found = {
            name: {
                system: {
                    users: self._served(runs[_arm(name, system, users)], load.warm_up)
                    for users in load.users
                }
                for system in self.systems
            }
            for name, load in self._loads.items()
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
        return Reading(
            finding=[line for name, each in found.items() for line in self._told(name, each)],
            rows=[row for name, each in found.items() for row in self._rows(name, each)],
            listings=[self._by_bound(found), *(self._listing(*each) for each in found.items())],
            data=data,
            drawings={"goodput": Drawing("Goodput over load", caption, partial(draw, data))},
            headline=["goodput"],
        )

    @property
    def _bounds(self) -> list[float]:
        """Of the first token: the objective's, others, and none."""
        return [self.ttft, *self.bounds, math.inf]

    def _served(self, runs: Sequence[Run], warm_up: float) -> Served:
        return over_seeds([served(run, warm_up, self._bounds, self.gap) for run in runs])

    # -- words and tables --------------------------------------------------------------------------

    def _rows(self, name: str, found: Found) -> Iterator[Row]:
        between = self.published[0], self.published[1]
        heavy = max(found[self.ours])
        ours = found[self.ours]
        for other in self.others:
            its = found[other]
            best = ratio(_best(ours).goodput, _best(its).goodput)
            what = f"{name}: {self.ours} / {other}"
            why = "" if _within(best, between) else self._why_best(found, other)
            yield Row(f"{what}, best goodput", best, between, "×", why)
            even = ratio(ours[heavy].smooth, its[heavy].smooth)
            why = "" if _within(even, between) else self._why_even(ours[heavy], its[heavy])
            yield Row(f"{what}, {heavy} users, gaps alone", even, between, "×", why)
        if self.exact is not None:
            most = max(served.preemptions for served in found[self.exact].values())
            yield Row(f"{name}: preemptions a request, {self.exact}", most, 0)

    def _why_best(self, found: Found, other: str) -> str:
        ours, its = _best(found[self.ours]), _best(found[other])
        heavy = max(found[self.ours])
        late = [found[system][heavy].prompt for system in (self.ours, other)]
        return (
            f"with the users that each does best with, {self.ours} gives {ours.tokens:,.0f} and "
            f"{other} {its.tokens:,.0f} tokens/s in all; with {heavy}, {percent(late[0], 0)} and "
            f"{percent(late[1], 0)} of requests have their first token within {self.ttft:g} s, so "
            "that waiting decides and not who is preempted"
        )

    def _why_even(self, ours: Served, its: Served) -> str:
        return (
            f"{percent(ours.even, 0)} and {percent(its.even, 0)} of requests keep {self.gap:g} s "
            f"between tokens, with {ours.preemptions:.2g} and {its.preemptions:.2g} preemptions a "
            f"request; all tokens a second are {ratio(ours.tokens, its.tokens):.2f} times as many"
        )

    def _told(self, name: str, found: Found) -> Iterator[str]:
        heavy = max(found[self.ours])
        ours = found[self.ours][heavy]
        for other in self.others:
            its = found[other][heavy]
            whole = f"{times(ratio(ours.goodput, its.goodput))} the goodput of {other}"
            if not its.goodput:
                whole = f"{ours.goodput:,.0f} tokens/s where {other} gives none"
            if not ours.goodput and not its.goodput:
                whole = f"nothing, like {other},"
            low, high = self.published
            yield (
                f"{name}, {heavy} users: {self.ours} gives {whole} by the whole objective, and "
                f"{times(ratio(ours.smooth, its.smooth))} where gaps alone count (published: "
                f"{low:g} to {high:g}): {percent(ours.even, 0)} and {percent(its.even, 0)} of "
                f"requests keep {self.gap:g} s between tokens, {percent(ours.prompt, 0)} and "
                f"{percent(its.prompt, 0)} have the first within {self.ttft:g} s."
            )
        best = {system: _best(by_users) for system, by_users in found.items()}
        each = ", ".join(f"{one.goodput:,.0f} with {system}" for system, one in best.items())
        users = max(found[self.ours], key=lambda users: found[self.ours][users].goodput)
        there = " and ".join(f"{found[one][users].goodput:,.0f} with {one}" for one in self.others)
        yield (
            f"{name}, best goodput in tokens/s over the loads: {each}; with the {users} users that "
            f"{self.ours} does best with, {there}."
        )

    def _by_bound(self, found: Mapping[str, Found]) -> Listing:
        """What the bound on the first token does to the gain under the heaviest load."""
        rows = []
        for name, each in found.items():
            heavy = max(each[self.ours])
            for number, bound in enumerate(self._bounds):
                gains = (
                    ratio(each[self.ours][heavy].goodputs[number], its[heavy].goodputs[number])
                    for its in map(each.__getitem__, self.others)
                )
                asked = "any first token" if math.isinf(bound) else f"first token in {bound:g} s"
                rows.append([f"{name}, {heavy} users, {asked}", *map(times, gains)])
        head = ["", *(f"{self.ours} / {other}" for other in self.others)]
        return Listing("Goodput under the heaviest load, by other bounds", head, rows)

    def _listing(self, name: str, found: Found) -> Listing:
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
    return f"{load}, {system}, {users} users"


def _best(by_users: Mapping[int, Served]) -> Served:
    return max(by_users.values(), key=lambda served: served.goodput)


def _within(value: float, between: tuple[float, float]) -> bool:
    return between[0] <= value <= between[1]
