"""Routers that see an outdated state of the replicas: the effect on the time to the first token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np

from experiments.papers.panels import Panel, draw_panels
from experiments.papers.reproduction import ByArm, Reproduction, arm, nested
from experiments.papers.settings import Count, In, Names, Number
from pagedsim.metrics.result import Listing, Row
from pagedsim.report.figures import FigureSpec
from pagedsim.report.numbers import signed
from pagedsim.run.study import Analysis

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TAIL = "ttft_p99"
Tails = Mapping[float, Sequence[float]]
"""By age of the state, seconds of each seed."""


@dataclass(frozen=True, kw_only=True)
class Staleness(Reproduction):
    """The P99 time to the first token, by router and by the age of the state that it sees."""

    one_server: ClassVar[bool] = False

    routers: Annotated[Names, Count()]
    """The first is the published one."""
    ages: Annotated[Sequence[float], Count(2), Number(0)]
    """Seconds; the first is what the others are compared with."""
    variants: Names
    """Other choices where the source leaves one open, for the first router at all ages."""
    published: Mapping[float, float]
    """By age, the relative increase of the P99."""
    between: Mapping[float, Sequence[float]]
    """By age, the published spread of seeds."""
    tails: Annotated[Mapping[str, Mapping[float, Sequence[float]]], In("routers")]
    """By router and age, the range of the published P99 over seeds, in seconds."""

    def arms(self) -> dict[str, list[str]]:
        first = self.routers[self._first]
        varied = {name: [*first, *changes] for name, changes in self.variants.items()}
        return {
            _arm(name, one): [*own, f"fleet.staleness={one:g}"]
            for name, own in {**self.routers, **varied}.items()
            for one in self.ages
        }

    def read_arms(self, runs: ByArm) -> Analysis:
        found = nested(
            lambda name, one: [run.summary[TAIL] for run in runs[_arm(name, one)]],
            *((*self.routers, *self.variants), self.ages),
        )
        means = {name: [_mean(its[one]) for one in self.ages] for name, its in found.items()}
        data = {
            "ages": list(self.ages),
            "ttft_p99": means,
            "routers": list(self.routers),
            "published": {
                name: {f"{one:g}": list(ends) for one, ends in its.items()}
                for name, its in self.tails.items()
            },
        }
        rows = [[name, *(f"{1e3 * one:,.0f}" for one in its)] for name, its in means.items()]
        title = "P99 time to the first token (ms), by age"
        return Analysis(
            finding=list(self._finding(found)),
            rows=[*self._changes(found), *self._tails(found)],
            listings=[Listing(title, ["", *map(age, self.ages)], rows, "Means over seeds.")],
            data=data,
            drawings={
                "staleness": FigureSpec(
                    "First tokens by the age of what the router sees",
                    "P99, means over seeds; bars are what was published.",
                    partial(draw, data),
                )
            },
        )

    @property
    def _first(self) -> str:
        return next(iter(self.routers))

    def _change(self, its: Tails, one: float) -> list[float]:
        """The relative increase at an age, of each seed."""
        return [old / new - 1 for old, new in zip(its[one], its[self.ages[0]], strict=True)]

    def _signed(self, its: Tails, one: float) -> str:
        return signed(_mean(self._change(its, one)), 0)

    def _changes(self, found: Mapping[str, Tails]) -> Iterator[Row]:
        its = found[self._first]
        for one, told in self.published.items():
            if one in self.ages:
                ours = self._change(its, one)
                there = self.between.get(one)
                seeds = f"{signed(there[0], 0)} to {signed(there[1], 0)}" if there else "one seed"
                why = [
                    f"seeds here {signed(min(ours), 0)} to {signed(max(ours), 0)}",
                    f"there {seeds}",
                    *(f"{self._signed(found[name], one)} with {name}" for name in self.variants),
                ]
                what = f"{self._first}, {age(one)} old: P99 to the first token"
                yield Row(what, 100 * _mean(ours), 100 * told, "% more", "; ".join(why))

    def _tails(self, found: Mapping[str, Tails]) -> Iterator[Row]:
        for name, its in self.tails.items():
            for one, (low, high) in its.items():
                if one in self.ages:
                    ours = 1e3 * _mean(found[name][one])
                    yield Row(f"{_arm(name, one)}: P99", ours, (1e3 * low, 1e3 * high), "ms")

    def _finding(self, found: Mapping[str, Tails]) -> Iterator[str]:
        if told := [one for one in self.published if one in self.ages]:
            each = ", ".join(
                f"{self._signed(found[self._first], one)} with state {age(one)} old (published: "
                f"{signed(self.published[one], 0)})"
                for one in told
            )
            yield f"By {self._first} alone the P99 time to the first token changes by {each}."
        for one in sorted({*self.ages[1:]} & {0.1, self.ages[-1]}):
            others = ", ".join(
                f"{self._signed(found[name], one)} ({name})" for name in self.routers
            )
            yield f"With state {age(one)} old, against state as it is: {others}."


def age(seconds: float) -> str:
    """The age as text.

    >>> age(0), age(0.05), age(1)
    ('0 ms', '50 ms', '1 s')
    """
    return f"{seconds:g} s" if seconds >= 1 else f"{1e3 * seconds:g} ms"


def _arm(name: str, one: float) -> str:
    return arm(name, f"{age(one)} old")


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))


def draw(data: Mapping[str, Any]) -> Figure:
    """A line for each router; bars span the published seeds."""
    ages = data["ages"]

    def bars(axes: Axes, look: Mapping[str, Any]) -> None:
        for name, its in data["published"].items():
            for one, ends in its.items():
                if float(one) in ages:
                    place = [ages.index(float(one)) + 0.08] * 2
                    seconds = [1e3 * end for end in ends]
                    axes.plot(place, seconds, color=look[name].colour, lw=4, alpha=0.35)
        axes.set_xticks(range(len(ages)), [age(one) for one in ages])

    lines = {
        name: (range(len(ages)), [1e3 * seconds for seconds in data["ttft_p99"][name]])
        for name in data["routers"]
    }
    panel = Panel(
        lines=lines,
        log=True,
        origin=False,
        more=bars,
        x="age of what the router sees",
        y="P99 TTFT (ms)",
    )
    return draw_panels([[panel]], 3.6, left=0.8)
