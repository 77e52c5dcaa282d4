"""When a crowded fleet is to refuse: after the prefill, on arrival, or on arrival by what is to
come (Mooncake)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np

from experiments.papers.early_rejection_drawing import draw_load, draw_refused
from experiments.papers.reproduction import Reproduction
from experiments.papers.stage_load import Loads, loads
from pagedsim.core import ConfigError
from pagedsim.core.errors import require_number, require_whole, unknown
from pagedsim.metrics.arms import Run
from pagedsim.metrics.result import Listing, Row
from pagedsim.report.percent import percent
from pagedsim.report.pictures import Drawing
from pagedsim.run.command import group_of
from pagedsim.run.job import Arm
from pagedsim.run.runs import Runs
from pagedsim.run.study import Reading

Found = Mapping[str, Mapping[str, Loads]]
"""By case and way to refuse, over all seeds."""
_FAR = 0.05
"""A difference that wants a reason."""
_ALIKE = ("experiment", "seed", "seeds", "jobs", "report", "tracking", "study")
"""What may be typed without a change of what is compared."""


@dataclass(frozen=True, kw_only=True)
class Rejection(Reproduction):
    """Every way to refuse, in every case."""

    one_server: ClassVar[bool] = False

    ways: Mapping[str, Sequence[str]]
    """Names, and the overrides that make them; the first is the one that others improve."""
    cases: Mapping[str, Sequence[str]]
    """What the paper leaves open, decided in several ways: names, and the overrides."""
    shown: str
    """The one of them that is held against what was published."""
    warm_up: float
    """Seconds of which the loads do not count."""
    span: float
    """Seconds that the picture of loads shows, after the warm-up."""
    published: Mapping[str, int]
    """Refused requests by way."""
    of: int
    """Published requests in all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number("study.warm_up", self.warm_up, 0)
        require_number("study.span", self.span, above=0)
        require_whole("study.of", self.of, 1)
        if not self.ways:
            raise ConfigError("study.ways: must name at least one")
        if self.shown not in self.cases:
            raise unknown("case", self.shown, self.cases)
        for way in self.published:
            if way not in self.ways:
                raise unknown("way", way, self.ways)
            require_whole(f"study.published.{way}", self.published[way], 1, self.of)

    @property
    def base(self) -> str:
        """The way that others improve."""
        return next(iter(self.ways))

    def arms(self) -> dict[str, list[str]]:
        return {
            _arm(case, way): [*overrides, *changes]
            for case, overrides in self.cases.items()
            for way, changes in self.ways.items()
        }

    def ask(self, runs: Runs) -> list[Arm]:
        pools = runs.config["fleet"]["pools"] or {}
        if not {"prefill", "decode"} <= {pool.get("role") for pool in pools.values()}:
            raise ConfigError(
                f"fleet={runs.command.choices.get('fleet')}: must have prefill and decode apart, "
                "as fleet=prefill_decode has: what is refused between them is asked here"
            )
        return super().ask(runs)

    def read(self, runs: Runs) -> Reading:
        reading = super().read(runs)
        typed = [word for word in runs.command.words if group_of(word) not in _ALIKE]
        if not typed:
            return reading
        note = f"{', '.join(typed)}: what was published is of other requests, models or replicas"
        return replace(reading, notes=[note, *reading.notes])

    def read_arms(self, runs: Mapping[str, Sequence[Run]]) -> Reading:
        found = {
            case: {way: loads(runs[_arm(case, way)], self.warm_up, self.span) for way in self.ways}
            for case in self.cases
        }
        shown = found[self.shown]
        data: dict[str, Any] = {
            "refused": {
                case: {way: one.refused for way, one in each.items()}
                for case, each in found.items()
            },
            "published": {way: count / self.of for way, count in self.published.items()},
            "load": {way: one.curves() for way, one in shown.items()},
        }
        return Reading(
            finding=list(self._told(found)),
            rows=list(self._rows(shown)),
            listings=[self._listing(found)],
            data=data,
            drawings={
                "load": Drawing(
                    "Load over time",
                    f"{self.shown}, under the first seed: above, requests whose prompts wait or "
                    "are computed; below, those that decode.",
                    partial(draw_load, data["load"]),
                ),
                "refused": Drawing(
                    "Who is refused, by what is assumed",
                    "Share of requests refused, for either objective's sake; dotted: published.",
                    partial(draw_refused, data),
                ),
            },
        )

    def _rows(self, shown: Mapping[str, Loads]) -> Iterator[Row]:
        base = shown[self.base]
        for way in self.published:
            one = shown[way]
            why = (
                f"first tokens take {one.prefill:.1f} s and answers {one.decode:.1f} s; seeds give "
                f"{percent(min(one.by_seed))} to {percent(max(one.by_seed))}"
            )
            yield _row(f"refused {way}", one.refused, self._share(way), why)
        for way in self.published if self.base in self.published else ():
            if way != self.base:
                one, told = shown[way], self._share(way) / self._share(self.base)
                why = (
                    f"requests in prefill swing by {percent(one.queue_swing, 0)} of their mean, "
                    f"{percent(base.queue_swing, 0)} {self.base}; {percent(one.slow, 0)} and "
                    f"{percent(base.slow, 0)} of all are served slower than the objective"
                )
                ours = _over(one.refused, base.refused)
                yield _row(f"refused {way}, over {self.base}", ours, told, why)

    def _share(self, way: str) -> float:
        return self.published[way] / self.of

    def _told(self, found: Found) -> Iterator[str]:
        shown = found[self.shown]
        each = ", ".join(
            f"{percent(one.refused)} {way}"
            + (f" ({percent(self._share(way))})" if way in self.published else "")
            for way, one in shown.items()
        )
        yield (f"{self.shown}: of all requests are refused (published): {each}.")
        failed = ", ".join(f"{percent(one.refused + one.slow)} {way}" for way, one in shown.items())
        yield f"Refused, or served with more time between tokens than the objective, are {failed}."
        late = shown[self.base].late
        yield (
            f"Of all, {percent(late)} are refused {self.base} for nothing: about what others can "
            "gain, and only while prompts are what is short."
        )
        swings = ", ".join(f"{percent(one.swing, 0)} {way}" for way, one in shown.items())
        queues = ", ".join(f"{percent(one.queue_swing, 0)} {way}" for way, one in shown.items())
        yield (
            "How far the requests in a stage swing, as the standard deviation over time of their "
            f"mean: those that decode {swings}; those in prefill {queues}."
        )
        yield from self._ranked(found)

    def _ranked(self, found: Found) -> Iterator[str]:
        """In which cases the ways come in the published order."""
        for way in self.ways:
            if way == self.base:
                continue
            fewer = [
                case for case, each in found.items() if each[way].refused < each[self.base].refused
            ]
            where = f"{len(fewer)} of {len(found)} cases"
            where += f" ({'; '.join(fewer)})" if fewer else ""
            yield f"Fewer are refused {way} than {self.base} in {where}."

    def _listing(self, found: Found) -> Listing:
        rows = [
            [
                _arm(case, way),
                *(percent(value) for value in (one.refused, one.late, one.slow)),
                f"{one.prefill:.1f} s",
                f"{one.decode:.1f} s",
                *(percent(value, 0) for value in (one.queue_swing, one.swing)),
                f"{one.together:.2f}",
            ]
            for case, each in found.items()
            for way, one in each.items()
        ]
        head = ["", "refused", "late", "slow", "prefill", "decode"]
        note = (
            "Shares of all requests: refused, refused after their prefill, and served slower than "
            "the objective; mean times of the stages; how far their loads swing, and the "
            "correlation of the two."
        )
        head += ["prefill swings", "decode swings", "together"]
        return Listing("Who is refused, and how loads swing", head, rows, note)


def _arm(case: str, way: str) -> str:
    return f"{case}, {way}"


def _row(what: str, ours: float, told: float, why: str) -> Row:
    return Row(what, ours, told, why="" if abs(ours / told - 1) <= _FAR else why)


def _over(one: float, other: float) -> float:
    return one / other if other else float(np.nan)
