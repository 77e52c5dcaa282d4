"""What goodput over load says, in words and tables."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from experiments.papers.goodput import Served, ratio, times
from pagedsim.metrics.result import Listing, Row
from pagedsim.report.percent import percent

Found = Mapping[str, Mapping[int, Served]]
"""Of each system and number of users."""


@dataclass(frozen=True, kw_only=True)
class Words:
    """Of a study whose settings these are."""

    ours: str
    others: Sequence[str]
    exact: str | None
    ttft: float
    gap: float
    bounds: Sequence[float]
    published: Sequence[float]

    @property
    def asked(self) -> list[float]:
        """Of the first token: the objective's, others, and none."""
        return [self.ttft, *self.bounds, math.inf]

    def rows(self, name: str, found: Found) -> Iterator[Row]:
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
            f"{percent(late[1], 0)} of requests have their first token within {self.ttft:g} s, "
            f"{self._deciding(found[self.ours][heavy], found[other][heavy])}"
        )

    def _deciding(self, ours: Served, its: Served) -> str:
        """What it is that requests miss the objective by."""
        if min(ours.prompt, ours.even, its.prompt, its.even) == 1:
            return f"and all keep {self.gap:g} s between tokens: nothing decides under such a load"
        if min(ours.prompt, its.prompt) <= min(ours.even, its.even):
            return "so that waiting decides and not who is preempted"
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

    def told(self, name: str, found: Found) -> Iterator[str]:
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

    def by_bound(self, found: Mapping[str, Found]) -> Listing:
        """What the bound on the first token does to the gain under the heaviest load."""
        rows = []
        for name, each in found.items():
            heavy = max(each[self.ours])
            for number, bound in enumerate(self.asked):
                gains = (
                    ratio(each[self.ours][heavy].goodputs[number], its[heavy].goodputs[number])
                    for its in map(each.__getitem__, self.others)
                )
                asked = "any first token" if math.isinf(bound) else f"first token in {bound:g} s"
                rows.append([f"{name}, {heavy} users, {asked}", *map(times, gains)])
        head = ["", *(f"{self.ours} / {other}" for other in self.others)]
        return Listing("Goodput under the heaviest load, by other bounds", head, rows)

    def listing(self, name: str, found: Found) -> Listing:
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


def _best(by_users: Mapping[int, Served]) -> Served:
    return max(by_users.values(), key=lambda served: served.goodput)


def _within(value: float, between: tuple[float, float]) -> bool:
    return between[0] <= value <= between[1]
