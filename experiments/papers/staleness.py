"""Routers that see the state of replicas as it was: what that does to first tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np

from experiments.papers.reproduction import Reproduction
from experiments.papers.staleness_drawing import age, draw
from pagedsim.core import ConfigError
from pagedsim.core.errors import require_number, unknown
from pagedsim.metrics.arms import Run
from pagedsim.metrics.result import Listing, Row
from pagedsim.report.percent import signed
from pagedsim.report.pictures import Drawing
from pagedsim.run.study import Reading

TAIL = "ttft_p99"
Tails = Mapping[float, Sequence[float]]
"""By age of the state, seconds of each seed."""


@dataclass(frozen=True, kw_only=True)
class Staleness(Reproduction):
    """The P99 time to the first token, by router and by the age of what it sees."""

    one_server: ClassVar[bool] = False

    routers: Mapping[str, Sequence[str]]
    """Names, and the overrides that make them; the first is the one that was published."""
    ages: Sequence[float]
    """Seconds, the first of which is what the others are held against."""
    variants: Mapping[str, Sequence[str]]
    """What the source leaves open, decided otherwise, for the first router at all ages."""
    published: Mapping[float, float]
    """By age, what is added to the P99, as a part of it."""
    between: Mapping[float, Sequence[float]]
    """By age, what seeds lay between there."""
    tails: Mapping[str, Mapping[float, Sequence[float]]]
    """By router and age, seconds between which the P99 of seeds lay."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.ages) < 2 or not self.routers:
            raise ConfigError("study: must have at least two ages and a router")
        for one in self.ages:
            require_number("study.ages", one, 0)
        for name in self.tails:
            if name not in self.routers:
                raise unknown("router of study.tails", name, self.routers)

    def arms(self) -> dict[str, list[str]]:
        first = next(iter(self.routers.values()))
        every = {
            **self.routers,
            **{name: [*first, *changes] for name, changes in self.variants.items()},
        }
        return {
            _arm(name, one): [*own, f"fleet.staleness={one:g}"]
            for name, own in every.items()
            for one in self.ages
        }

    def read_arms(self, runs: Mapping[str, Sequence[Run]]) -> Reading:
        found = {
            name: {one: [run.summary[TAIL] for run in runs[_arm(name, one)]] for one in self.ages}
            for name in (*self.routers, *self.variants)
        }
        data = {
            "ages": list(self.ages),
            "ttft_p99": {
                name: [float(np.mean(its[one])) for one in self.ages] for name, its in found.items()
            },
            "routers": list(self.routers),
            "published": {
                name: {f"{one:g}": list(ends) for one, ends in its.items()}
                for name, its in self.tails.items()
            },
        }
        return Reading(
            finding=list(self._finding(found)),
            rows=[*self._changes(found), *self._tails(found)],
            listings=[self._listing(found)],
            data=data,
            drawings={
                "staleness": Drawing(
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
        """What an age adds, of each seed."""
        fresh = its[self.ages[0]]
        return [old / new - 1 for old, new in zip(its[one], fresh, strict=True)]

    def _mean(self, its: Tails, one: float) -> float:
        return float(np.mean(self._change(its, one)))

    def _changes(self, found: Mapping[str, Tails]) -> Iterator[Row]:
        its = found[self._first]
        for one, told in self.published.items():
            if one in self.ages:
                yield Row(
                    f"{self._first}, {age(one)} old: P99 to the first token",
                    100 * self._mean(its, one),
                    100 * told,
                    "% more",
                    self._why(found, one),
                )

    def _why(self, found: Mapping[str, Tails], one: float) -> str:
        ours = self._change(found[self._first], one)
        parts = [f"seeds here {signed(min(ours), 0)} to {signed(max(ours), 0)}"]
        if there := self.between.get(one):
            parts.append(f"there {signed(there[0], 0)} to {signed(there[1], 0)}")
        else:
            parts.append("there one seed")
        parts += [
            f"{signed(self._mean(found[name], one), 0)} with {name}" for name in self.variants
        ]
        return "; ".join(parts)

    def _tails(self, found: Mapping[str, Tails]) -> Iterator[Row]:
        for name, its in self.tails.items():
            for one, ends in its.items():
                if one in self.ages:
                    yield Row(
                        f"{name}, {age(one)} old: P99",
                        1e3 * float(np.mean(found[name][one])),
                        (1e3 * ends[0], 1e3 * ends[1]),
                        "ms",
                    )

    def _listing(self, found: Mapping[str, Tails]) -> Listing:
        rows = [
            [name, *(f"{1e3 * float(np.mean(its[one])):,.0f}" for one in self.ages)]
            for name, its in found.items()
        ]
        head = ["", *(age(one) for one in self.ages)]
        return Listing("P99 time to the first token (ms), by age", head, rows, "Means over seeds.")

    def _finding(self, found: Mapping[str, Tails]) -> Iterator[str]:
        told = [one for one in self.published if one in self.ages]
        its = found[self._first]
        if told:
            each = ", ".join(
                f"{signed(self._mean(its, one), 0)} with state {age(one)} old (published: "
                f"{signed(self.published[one], 0)})"
                for one in told
            )
            yield f"By {self._first} alone the P99 time to the first token changes by {each}."
        for one in sorted({*self.ages[1:]} & {0.1, self.ages[-1]}):
            others = ", ".join(
                f"{signed(self._mean(found[name], one), 0)} ({name})" for name in self.routers
            )
            yield f"With state {age(one)} old, against state as it is: {others}."


def _arm(name: str, one: float) -> str:
    return f"{name}, {age(one)} old"
